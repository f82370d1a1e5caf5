"""The manifest in docs/clusters.md is a PyTorchJob, and starts titan with arguments that it knows.

`SCHEMA` is written by hand and has only the fields of the manifest. Those of the job itself, and what is
required of a pod, were compared with the custom resource definition `pytorchjobs.kubeflow.org` v1 and the
webhook of Kubeflow's Training Operator; where `SCHEMA` lists words, the definition allows any string, and
they are those of its descriptions. Other fields of a pod are as Kubernetes documents them. No operator and
no cluster has seen the manifest.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from titancli.cli.train import command

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def table(required: str = "", **properties: Any) -> dict[str, Any]:
    closed = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**closed, "required": required.split()}


def rows(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
CONTAINER = table(
    "name image",  # by the operator's webhook, and of at least one container this name
    name={"const": "pytorch"},
    image=TEXT,
    command=rows(TEXT),
    args=rows(TEXT),
    resources=table(limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}}),
    volumeMounts=rows(table("name mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = table(
    "name",
    name=TEXT,
    persistentVolumeClaim=table("claimName", claimName=TEXT),
    emptyDir=table(medium=TEXT),
)
POD = table(
    "containers", terminationGracePeriodSeconds=NUMBER, containers=rows(CONTAINER), volumes=rows(VOLUME)
)
REPLICAS = table(
    replicas=NUMBER,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=table(spec=POD),
)
SCHEMA = table(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=table("name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}),
    spec=table(
        "pytorchReplicaSpecs",
        runPolicy=table(backoffLimit=NUMBER, cleanPodPolicy={"enum": ["", "All", "Running", "None"]}),
        pytorchReplicaSpecs=table(Master=REPLICAS, Worker=REPLICAS),
    ),
)


@pytest.fixture
def manifest() -> dict[str, Any]:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return importlib.import_module("yaml").safe_load(text)


def test_the_manifest_is_a_pytorchjob(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, SCHEMA)
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    for change in ({"replica": 1}, {"restartPolicy": "Sometimes"}):  # the schema can tell
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**replicas["Worker"], **change}, REPLICAS)


def test_its_pods_start_titan_on_as_many_nodes_as_there_are(manifest: dict[str, Any]) -> None:
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    [container] = replicas["Master"]["template"]["spec"]["containers"]
    assert replicas["Worker"]["template"]["spec"]["containers"] == [container]
    titan, train, recipe, *rest = container["command"] + container["args"]
    assert (titan, train, recipe) == ("titan", "train", "llama3_8b")
    parsed = command.make_context("train", [recipe, *rest]).params
    assert parsed["nnodes"] == (None, replicas["Master"]["replicas"] + replicas["Worker"]["replicas"])
    assert parsed["nproc"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert parsed["resume"] and parsed["rdzv"] == "$(MASTER_ADDR):$(MASTER_PORT)"
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(parsed["run_dir"].is_relative_to(mount) for mount in mounts)
