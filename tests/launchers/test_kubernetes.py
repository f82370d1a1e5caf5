"""The manifests in docs/clusters.md are a TrainJob and a PyTorchJob, and start titan in words that it knows.

The schemas are written by hand and have only the fields of the manifests. Those of the PyTorchJob itself, and
what is required of a pod, were compared with the custom resource definition `pytorchjobs.kubeflow.org` v1 and
the webhook of Kubeflow's Training Operator; where a schema lists words, the definition allows any string, and
they are those of its descriptions. Those of the TrainJob were compared with the types of
`trainer.kubeflow.org/v1alpha1` in Kubeflow Trainer 2.2, and the names `node` with its runtime
`torch-distributed`. Other fields of a pod are as Kubernetes documents them. No operator and no cluster has
seen the manifests.
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
NAME = table("name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63})
PYTORCHJOB = table(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=NAME,
    spec=table(
        "pytorchReplicaSpecs",
        runPolicy=table(backoffLimit=NUMBER, cleanPodPolicy={"enum": ["", "All", "Running", "None"]}),
        pytorchReplicaSpecs=table(Master=REPLICAS, Worker=REPLICAS),
    ),
)


# A patch may set few fields of a pod, and has to name a container that the runtime has.
POD_PATCH = table(
    containers=rows(
        table("name", name={"const": "node"}, volumeMounts=CONTAINER["properties"]["volumeMounts"])
    ),
    volumes=rows(VOLUME),
)
RUNTIME_PATCH = table(
    template=table(
        spec=table(
            replicatedJobs=rows(
                table(
                    "name",
                    name={"const": "node"},
                    template=table(spec=table(template=table(spec=POD_PATCH))),
                )
            )
        )
    )
)
TRAINJOB = table(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=NAME,
    spec=table(
        "runtimeRef",
        runtimeRef=table("name", name={"const": "torch-distributed"}),
        trainer=table(
            image=TEXT,
            numNodes=NUMBER,
            command=rows(TEXT),
            args=rows(TEXT),
            resourcesPerNode=CONTAINER["properties"]["resources"],
        ),
        runtimePatches=rows(
            table("manager", manager={**TEXT, "minLength": 1}, trainingRuntimeSpec=RUNTIME_PATCH)
        ),
    ),
)


@pytest.fixture
def manifests() -> dict[str, Any]:
    """By kind."""
    texts = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found = [importlib.import_module("yaml").safe_load(text) for text in texts]
    return {manifest["kind"]: manifest for manifest in found}


def test_they_are_what_the_operators_take(manifests: dict[str, Any]) -> None:
    assert sorted(manifests) == ["PyTorchJob", "TrainJob"]
    jsonschema.validate(manifests["PyTorchJob"], PYTORCHJOB)
    jsonschema.validate(manifests["TrainJob"], TRAINJOB)
    worker = manifests["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]
    for change in ({"replica": 1}, {"restartPolicy": "Sometimes"}):  # the schemas can tell
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**worker, **change}, REPLICAS)
    trainer = manifests["TrainJob"]["spec"]["trainer"]
    for change in ({"nodes": 4}, {"numNodes": "4"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(
                {**trainer, **change}, TRAINJOB["properties"]["spec"]["properties"]["trainer"]
            )


def starts_titan(words: list[str], nodes: int, gpus: int, mounts: list[dict[str, str]]) -> None:
    titan, train, recipe, *rest = words
    assert (titan, train, recipe) == ("titan", "train", "llama3_8b")
    parsed = command.make_context("train", [recipe, *rest]).params
    assert parsed["arguments"] == ("llama3_8b", "launcher.max_restarts=100")
    assert (parsed["nnodes"], parsed["nproc"]) == ((None, nodes), gpus)
    assert parsed["resume"] and parsed["rdzv"] is None
    assert any(parsed["run_dir"].is_relative_to(mount["mountPath"]) for mount in mounts)


def test_pods_of_a_pytorchjob_start_titan_on_as_many_nodes_as_there_are(manifests: dict[str, Any]) -> None:
    replicas = manifests["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    [container] = replicas["Master"]["template"]["spec"]["containers"]
    assert replicas["Worker"]["template"]["spec"]["containers"] == [container]
    nodes = replicas["Master"]["replicas"] + replicas["Worker"]["replicas"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    starts_titan(container["command"] + container["args"], nodes, gpus, container["volumeMounts"])


def test_pods_of_a_trainjob_do_too(manifests: dict[str, Any]) -> None:
    spec = manifests["TrainJob"]["spec"]
    trainer, [patch] = spec["trainer"], spec["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    starts_titan(trainer["command"] + trainer["args"], trainer["numNodes"], gpus, container["volumeMounts"])
