"""`checkpoint.remote`: a run whose machine is lost goes on, on another, as if nothing had been."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.run.conftest import Finished, losses
from titancli.checkpoint.format.manifest import read_manifest, steps
from titancli.checkpoint.remote.store import at
from titancli.cli import main

Train = Callable[..., Finished]


def _tensors(checkpoint: Path) -> dict[str, str]:
    """Checksums of the data files: equal ones hold the same bits."""
    return {n: d.xxh3_64 for n, d in read_manifest(checkpoint).files.items() if n.endswith(".safetensors")}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of an S3 server in this process, on a free port."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # buckets outlive a server
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    import fsspec

    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    yield "s3://bucket/checkpoints"
    server.stop()


def test_a_run_whose_folder_is_lost_goes_on_bitwise_from_s3(train: Train, here: Path, s3: str) -> None:
    whole = train("tiny.toml", "--run-dir", "whole", "checkpoint.enable=false")
    assert whole.code == 0, whole.err
    line = ["tiny.toml", "--run-dir", "runs/r", "--resume", f"checkpoint.remote={s3}"]
    first = train(*line, "training.steps=4", "lr_scheduler.total_steps=6", "checkpoint.keep_latest_k=1")
    assert first.code == 0, first.err
    assert [path.name for path in steps(at(f"{s3}/r"))] == ["step-4"]
    run_id = json.loads((here / "runs/r/run.json").read_text())["run_id"]
    shutil.rmtree(here / "runs")

    done = train(*line, "lr_scheduler.total_steps=6")
    assert done.code == 0, done.err
    assert f"downloading {s3}/r/step-4" in done.err
    run = here / "runs/r"
    assert losses(run) == {step: loss for step, loss in losses(here / "whole").items() if step > 4}
    assert json.loads((run / "run.json").read_text())["run_id"] == run_id
    assert [path.name for path in steps(at(f"{s3}/r"))] == ["step-6", "step-4"]
    assert _tensors(at(f"{s3}/r/step-6")) == _tensors(run / "checkpoints/step-6")

    refused = train("tiny.toml", "--run-dir", "x", f"checkpoint.remote={s3.replace('bucket', 'nosuch')}")
    assert refused.code == 5
    assert "no checkpoint can be uploaded: s3://nosuch/checkpoints/x" in refused.err
    assert not (here / "x").exists()


def test_a_lost_run_goes_on_from_the_last_good_one_and_says_so(train: Train, here: Path) -> None:
    url = f"file://{here}/store"
    line = ["tiny.toml", "--run-dir", "r", "--resume", f"checkpoint.remote={url}"]
    assert train(*line).code == 0
    before = losses(here / "r")
    shutil.move(here / "r", here / "old")
    (here / "store/r/step-6/manifest.json").unlink()

    dry = train(*line, "--dry-run", "--json")
    plan = json.loads(dry.out)["plan"]
    assert (plan["checkpoint"], plan["start_step"]) == (f"{here}/r/checkpoints/step-4", 4)
    assert not (here / "r").exists()

    done = train(*line)
    assert done.code == 0, done.err
    [told] = [line for line in done.err.splitlines() if "step-6 is skipped" in line]
    assert "no manifest.json" in told and url in told
    assert losses(here / "r") == {step: before[step] for step in (5, 6)}
    assert _tensors(here / "r/checkpoints/step-6") == _tensors(here / "old/checkpoints/step-6")
    assert _tensors(here / "store/r/step-6") == _tensors(here / "old/checkpoints/step-6")

    assert main(["convert-checkpoint", f"{url}/r", "hf", "--to", "hf"]) == 0
    assert (here / "hf/model.safetensors").is_file() and not list(here.glob(".titan-*"))

    shutil.rmtree(here / "r/checkpoints/step-4")
    again = train("r", "--resume", "--step", "4")  # only the store has it
    assert again.code == 0, again.err
    assert f"downloading {url}/r/step-4" in again.err and "from step-4" in again.err


@pytest.mark.parametrize("whole", [False, True])
def test_a_run_begins_with_weights_by_url(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    url = f"file://{here}/r/checkpoints/step-2"
    more = [f"checkpoint.initial_load_model_only={str(not whole).lower()}", "training.steps=3"]
    for name, weights in {"near": "r/checkpoints/step-2", "far": url, "again": url}.items():
        done = train("tiny.toml", "--run-dir", name, f"weights={weights}", *more)
        assert done.code == 0, done.err
        assert ("downloading" in done.err) == (name == "far")
    assert losses(here / "far") == losses(here / "again") == losses(here / "near")
    assert f'weights = "{url}"' in (here / "far/recipe.lock.toml").read_text()
    missing = train("tiny.toml", f"weights=file://{here}/nothing", "checkpoint.enable=false")
    assert missing.code == 5
    assert f"file://{here}/nothing is not a titan checkpoint" in missing.err


@pytest.mark.slow  # test_resume_without_weights.py has a folder
def test_a_run_that_began_with_weights_by_url_goes_on_elsewhere_without_them(
    train: Train, here: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters alone still take their base from there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    remote = f"checkpoint.remote={s3}"
    assert train("tiny.toml", "--run-dir", "base", remote, "training.steps=2").code == 0
    weights = f"weights={s3}/base/step-2"
    lora = 'converters=[{type="lora", rank=2}]'
    lines = {
        name: ("tiny.toml", "--run-dir", f"runs/{name}", weights, "lr_scheduler.total_steps=4", *more)
        for name, more in {"whole": (), "adapters": (lora,)}.items()
    }
    for name, line in lines.items():
        done = train(*line, "training.steps=4", "--run-dir", f"once/{name}")
        assert done.code == 0, done.err
        done = train(*line, "training.steps=2", remote)
        assert done.code == 0, done.err
    shutil.rmtree(here / "runs")
    shutil.rmtree(here / "cache")

    done = train(*lines["adapters"], "training.steps=3", "--resume", remote)
    assert done.code == 0, done.err
    assert f"downloading {s3}/base/step-2" in done.err
    assert losses(here / "runs/adapters") == {3: losses(here / "once/adapters")[3]}
    shutil.rmtree(here / "cache")
    at(f"{s3}/base/step-2/manifest.json").unlink()
    done = train(*lines["adapters"], "training.steps=4", "--resume", remote)
    assert done.code == 5 and "Traceback" not in done.err
    assert "base/step-2 is not a titan checkpoint" in done.err
    assert "but step-3 holds adapters, and these weights are their base" in done.err

    dry = train(*lines["whole"], "training.steps=4", "--resume", remote, "--dry-run", "--json")
    assert json.loads(dry.out)["plan"]["missing"] == []
    done = train(*lines["whole"], "training.steps=4", "--resume", remote)
    assert done.code == 0, done.err
    assert "base/step-2" not in done.err
    assert losses(here / "runs/whole") == {step: losses(here / "once/whole")[step] for step in (3, 4)}


def test_another_run_of_the_same_name_is_refused(train: Train, here: Path) -> None:
    remote = f"checkpoint.remote=file://{here}/store"
    assert train("tiny.toml", "--run-dir", "r", remote, "training.steps=2").code == 0
    shutil.rmtree(here / "r")
    refused = train("tiny.toml", "--run-dir", "r", remote)
    assert refused.code == 5
    assert "already holds the checkpoints of a run (step-2)" in refused.err and "--resume" in refused.err
    drifted = train("tiny.toml", "--run-dir", "r", "--resume", remote, "model.dim=64")
    assert drifted.code == 5
    assert "model.dim: 32 -> 64" in drifted.err


def test_a_store_that_fails_on_the_way_is_told_and_costs_no_step(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titancli.checkpoint.remote.store import RemotePath, Unreachable

    puts = 0
    put = RemotePath.put

    def fails_once(self: RemotePath, *given: object) -> None:
        nonlocal puts
        puts += 1
        if puts == 1:
            raise Unreachable("the line is dead")
        put(self, *given)

    monkeypatch.setattr(RemotePath, "put", fails_once)
    remote = [f"checkpoint.remote=file://{here}/store", "checkpoint.keep_latest_k=0"]
    done = train("tiny.toml", "--run-dir", "r", *remote)
    assert done.code == 0, done.err
    assert "the next save tries again: the line is dead" in done.err
    assert sorted(path.name for path in steps(here / "store/r")) == ["step-2", "step-4", "step-6"]
