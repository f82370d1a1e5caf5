"""`checkpoint.remote`: a run whose machine is lost goes on, on another, as if nothing had been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Command, Finished, losses, trained
from tests.stores import ODD
from titancli.checkpoint.format.manifest import (
    MANIFEST,
    faults,
    manifest_bytes,
    read_manifest,
    steps,
)
from titancli.checkpoint.remote.requests import Unreachable
from titancli.checkpoint.remote.store import RemotePath, at
from titancli.checkpoint.remote.transfer import upload
from titancli.cli import main
from titancli.observe.summary import summarize
from titancli.process import Place
from titancli.recipe.schema import Checkpoint
from titancli.runs import RunFolder
from titancli.worker.remote import upload_rest
from titancli.worker.resume import Resume

Train = Callable[..., Finished]


def _tensors(checkpoint: Path) -> dict[str, str]:
    """Checksums of the data files: equal ones hold the same bits."""
    return {n: d.xxh3_64 for n, d in read_manifest(checkpoint).files.items() if n.endswith(".safetensors")}


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
    puts = 0
    put = RemotePath.put

    def fails_once(self: RemotePath, *given: Any, **more: Any) -> None:
        nonlocal puts
        puts += 1
        if puts == 1:
            raise Unreachable("the line is dead")
        put(self, *given, **more)

    monkeypatch.setattr(RemotePath, "put", fails_once)
    remote = [f"checkpoint.remote=file://{here}/store", "checkpoint.keep_latest_k=0"]
    done = train("tiny.toml", "--run-dir", "r", *remote)
    assert done.code == 0, done.err
    assert "the next save tries again: the line is dead" in done.err
    assert sorted(path.name for path in steps(here / "store/r")) == ["step-2", "step-4", "step-6"]


STORES = Path(__file__).parents[1] / "stores.py"


@pytest.mark.e2e
@pytest.mark.parametrize(("when", "ranks"), [("at the end", 1), ("in the middle", 2)])
def test_a_signal_ends_a_run_whose_store_hangs(
    command: Callable[..., Command], here: Path, when: str, ranks: int
) -> None:
    """In time; what was not uploaded is said, and uploaded by the next start."""
    steps_in_all = 2 if when == "at the end" else 100_000
    line = ["-p", str(STORES), "--nproc", str(ranks), f"training.steps={steps_in_all}"]
    remote = [f"checkpoint.remote=odd://{here}/store", "checkpoint.remote_exit_seconds=1"]
    env = {**os.environ, ODD: "put_file:hang"}
    hanging = command("tiny.toml", "--run-dir", "r", *line, *remote, env=env)
    if when == "at the end":
        hanging.until_said("waiting for the upload of step-2", 60)
    else:
        hanging.until_step(here / "r/events.jsonl", 3)
    hanging.process.send_signal(signal.SIGTERM)
    done = hanging.wait()
    assert done.code == 75, done.err
    assert f"not known to be in odd://{here}/store/r: step-" in done.err
    assert not steps(here / "store/r")
    outcome = json.loads((here / "r/run.json").read_text())["attempts"][-1]["outcome"]
    assert (outcome["why"], outcome["signal"]) == ("stopped", "SIGTERM")

    stopped_at = outcome["step"]
    again = command("r", "--resume", "-p", str(STORES), f"training.steps={stopped_at}").wait()
    assert again.code == 0, again.err
    words = f": step {stopped_at} of {stopped_at}" if when == "at the end" else f" at step {stopped_at}"
    assert f"finished{words}" in again.err
    assert summarize(here / "r").state == "finished"
    # What keep_latest_k leaves there; here an older one stays until the next save.
    assert _left(here) >= {path.name for path in steps(here / "store/r")} >= {f"step-{stopped_at}"}
    assert all(_is_good(path) for path in steps(here / "store/r"))


@pytest.mark.e2e
def test_a_command_whose_store_hangs_ends_after_the_limit_and_by_ctrl_c(
    command: Callable[..., Command], here: Path
) -> None:
    store = ["-p", str(STORES), f"checkpoint.remote=odd://{here}/store"]
    late = command(
        *("tiny.toml", "--run-dir", "r", *store, "checkpoint.remote_timeout_seconds=1"),
        env={**os.environ, ODD: "*:hang"},
    ).wait()
    assert late.code == 5 and "has made no progress for 1 seconds" in late.err

    assert command("tiny.toml", "--run-dir", "r", *store, "training.steps=2").wait().code == 0
    shutil.rmtree(here / "store/r/step-2")
    hanging = command("r", "--resume", "-p", str(STORES), env={**os.environ, ODD: "put_file:hang"})
    while not (begun := list((here / "store/r").glob(".step-2.*"))) and hanging.process.poll() is None:
        time.sleep(0.05)
    hanging.process.send_signal(signal.SIGINT)
    assert hanging.wait(30).code == 130 and begun


def test_a_finished_run_is_resumed_to_upload_what_is_missing(train: Train, here: Path, both: str) -> None:
    shutil.rmtree(here / "store/r/step-6")
    with ExitStack() as stack:
        stack.callback(RunFolder(here / "r").hold().release)
        refused = train("r", "--resume")
        assert refused.code == 5 and "in use" in refused.err
    assert not (here / "store/r/step-6").exists()
    with ThreadPoolExecutor(2) as two:  # the commands of two nodes
        section = Checkpoint(remote=f"file://{here}/store")
        list(two.map(lambda _: upload_rest(RunFolder(here / "r"), section), range(2)))
    assert _is_good(here / "store/r/step-6")
    done = train("r", "--resume", both)
    assert done.code == 0 and "r is finished: step 6 of 6" in done.err


# ------------------------------------------------------------- damaged here, and the store has it intact


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `r` whose steps 2, 4 and 6 lie in `store` too."""
    folder = tmp_path_factory.mktemp("uploaded")
    remote = f"checkpoint.remote=file://{folder}/store"
    trained(folder, "--run-dir", "r", remote, "checkpoint.keep_latest_k=0")
    return folder


@pytest.fixture
def both(uploaded: Path, here: Path) -> str:
    """A copy of them, as `r` and `store` of the working folder; the override that names the store."""
    shutil.copytree(uploaded, here, dirs_exist_ok=True)
    return f"checkpoint.remote=file://{here}/store"


def _flip(checkpoint: Path, name: str = "rank-00000.safetensors") -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[-1] ^= 1
    (checkpoint / name).write_bytes(data)


def _is_good(checkpoint: Path) -> bool:
    return not faults(checkpoint, read_manifest(checkpoint))


def _left(here: Path) -> set[str]:
    return {path.name for path in (here / "r/checkpoints").iterdir() if path.is_dir()}


def test_a_step_that_is_damaged_here_is_taken_from_the_store(train: Train, here: Path, both: str) -> None:
    _flip(here / "r/checkpoints/step-6", MANIFEST)
    dry = train("r", "--resume", both, "training.steps=7", "--dry-run")
    assert dry.code == 0 and "step-6" in dry.out, dry.err
    assert _left(here) == {"step-2", "step-4", "step-6"}
    _flip(here / "r/checkpoints/step-6", MANIFEST)

    _flip(here / "r/checkpoints/step-6")
    done = train("r", "--resume", both, "training.steps=7", "--run-dir", "r")
    assert done.code == 0, done.err
    why = done.err.index("step-6 is skipped: rank-00000.safetensors is damaged")
    assert why < done.err.index(f"downloading file://{here}/store/r/step-6 (")
    assert "the run continues from step-6" in done.err and "step-4" not in done.err
    assert list(losses(here / "r"))[-1] == 7 and len(losses(here / "r")) == 7
    assert _is_good(here / "r/checkpoints/step-6")
    assert _left(here) == {"step-2", "step-4", "step-6", "step-7"}

    _flip(here / "r/checkpoints/step-4")
    again = train("r", "--resume", both, "--step", "4", "training.steps=5")
    assert again.code == 0, again.err
    assert f"downloading file://{here}/store/r/step-4 (" in again.err

    _flip(here / "r/checkpoints/step-4", MANIFEST)
    dry = train("r", "--resume", both, "--step", "4", "--dry-run")
    assert dry.code == 0 and "step-4" in dry.out, dry.err
    assert train("r", "--resume", both, "--step", "4", "training.steps=5").code == 0
    assert _is_good(here / "r/checkpoints/step-4")

    for place in ("r/checkpoints", "store/r"):
        _flip(here / place / "step-4")
    refused = train("r", "--resume", both, "--step", "4", "training.steps=5")
    assert refused.code == 5 and "Traceback" not in refused.err
    assert f"checkpoint file://{here}/store/r/step-4 is damaged" in refused.err


def test_a_dry_run_looks_for_the_step_in_the_store(train: Train, here: Path, both: str) -> None:
    """And takes nothing from there; the run itself does."""
    _flip(here / "store/r/step-6", MANIFEST)
    shutil.rmtree(here / "r/checkpoints/step-4")
    elsewhere = ["tiny.toml", "--run-dir", "elsewhere/r"]
    for run, there in ((["r"], "2, 4, 6"), (elsewhere, "2, 4")):
        line = [*run, "--resume", both, "--dry-run", "--step"]
        dry = train(*line, "4")
        assert dry.code == 0 and "step-4" in dry.out, dry.err
        refused = train(*line, "3")
        assert refused.code == 5 and f"available steps: {there}\n" in refused.err
    assert not (here / "r/checkpoints/step-4").exists() and not (here / "elsewhere").exists()
    (here / "store/r/step-2/rank-00000.safetensors").unlink()
    damaged = train(*line, "2")
    assert damaged.code == 5 and "rank-00000.safetensors is missing" in damaged.err


@pytest.mark.ranks
def test_all_ranks_take_the_stores_where_one_finds_damage(
    train_on: Train, reference: Train, here: Path
) -> None:
    """Only rank 1 reads what is damaged."""
    before, folder = reference(2)
    shutil.copytree(folder, here / "r")
    upload(here / "r/checkpoints/step-6", at(f"file://{here}/store/r/step-6"))
    _flip(here / "r/checkpoints/step-6", "rank-00001.safetensors")
    done = train_on(2, "r", "--resume", f"checkpoint.remote=file://{here}/store", "training.steps=7")
    assert done.code == 0, done.err
    assert "step-6 is skipped: rank-00001.safetensors is damaged" in done.err
    assert f"downloading file://{here}/store/r/step-6 (" in done.err
    assert "the run continues from step-6" in done.err
    assert {step: loss for step, loss in losses(here / "r").items() if step < 7} == before


@pytest.fixture
def damaged(both: str, here: Path) -> Iterator[Callable[..., Path | None]]:
    """`damaged(restart=0)`: what rank 0 goes on from after ranks have found step 6 damaged."""
    step = here / "r/checkpoints/step-6"
    _flip(step)
    section, bad = Checkpoint(remote=f"file://{here}/store"), {step: "rank-00000.safetensors is damaged"}
    rank = Resume(RunFolder(here / "r"), Place())
    yield lambda: rank.checkpoint(step, section, bad)


@pytest.mark.parametrize("harm", ["flipped", "short", "a file missing", "no manifest", "another run's"])
def test_an_older_one_is_taken_where_the_stores_is_no_better(
    damaged: Callable[..., Path | None], here: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    there, file = here / "store/r/step-6", "rank-00000.safetensors"
    if harm == "flipped":
        _flip(there)
    elif harm == "another run's":
        (there / MANIFEST).write_bytes(manifest_bytes(replace(read_manifest(there), run_id="another")))
    elif harm == "short":
        (there / file).write_bytes((there / file).read_bytes()[:-1])
    else:
        (there / (file if harm == "a file missing" else MANIFEST)).unlink()
    assert damaged() == here / "r/checkpoints/step-4"
    words = {"short": file, "flipped": file, "a file missing": file, "no manifest": MANIFEST}
    assert words.get(harm, "another run") in caplog.text.rpartition("step-6 is skipped: ")[2]
    assert _left(here) == {"step-2", "step-4", "step-6"}


def test_a_store_that_fails_on_the_way_leaves_what_there_was(
    damaged: Callable[..., Path | None], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all ranks fail: steps are not lost in silence. The next resume tries again."""
    before = (here / "r/checkpoints/step-6/rank-00000.safetensors").read_bytes()
    get, gets = RemotePath.get, iter(range(9))

    def fails_second(self: RemotePath, target: Path) -> None:
        if next(gets) == 1:
            raise Unreachable("the line is dead")
        get(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "get", fails_second)
        with pytest.raises(Unreachable, match="the line is dead"):
            damaged()
    assert _left(here) == {"step-2", "step-4", "step-6"}
    assert (here / "r/checkpoints/step-6/rank-00000.safetensors").read_bytes() == before


def test_the_store_is_asked_once_for_each(damaged: Callable[..., Path | None], here: Path) -> None:
    """A node that sees another file than rank 0 finds it damaged again and again."""
    assert damaged() == here / "r/checkpoints/step-6"
    assert _is_good(here / "r/checkpoints/step-6")
    assert damaged() == here / "r/checkpoints/step-4"


def test_ranks_that_start_anew_take_the_stores_too(both: str, here: Path) -> None:
    folder = RunFolder(here / "r")
    folder.update_attempt(serial=2)
    (folder.checkpoints / "step-6/recipe.lock.toml").unlink()
    again = Resume(folder, Place(restart=1))
    section = Checkpoint(remote=f"file://{here}/store")
    assert again.checkpoint(folder.checkpoints / "step-4", section) == folder.checkpoints / "step-6"
    assert _is_good(folder.checkpoints / "step-6")


def test_ranks_that_start_anew_from_the_newest_need_no_store(
    both: str, here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with an older one is a line."""

    def dead(*given: object, **more: object) -> None:
        raise Unreachable("the line is dead")

    monkeypatch.setattr("titancli.checkpoint.remote.transfer.newest_of_both", dead)
    folder, section = RunFolder(here / "r"), Checkpoint(remote=f"file://{here}/store")
    _flip(folder.checkpoints / "step-2", MANIFEST)
    for serial, began, expected in ((2, 4, 6), (3, 6, 6), (3, 4, 4)):
        folder.update_attempt(serial=serial)
        again = Resume(folder, Place(restart=1))
        found = again.checkpoint(folder.checkpoints / f"step-{began}", section)
        assert found == folder.checkpoints / f"step-{expected}"
        assert "step-2/manifest.json is damaged" in caplog.text
    _flip(folder.checkpoints / "step-6", MANIFEST)
    with pytest.raises(Unreachable, match="the line is dead"):  # that one may be the newest
        again.checkpoint(folder.checkpoints / "step-4", section)


def test_a_later_attempts_damaged_step_is_kept(damaged: Callable[..., Path | None], here: Path) -> None:
    """What the store has of it is older: the upload had not begun."""
    step = here / "r/checkpoints/step-6"
    later = replace(read_manifest(step), serial=9)
    (step / MANIFEST).write_bytes(manifest_bytes(later))
    folder = RunFolder(here / "r")
    folder.update_attempt(serial=9)
    assert damaged() == step and _is_good(step) and read_manifest(step).serial == 3
    [kept] = step.parent.glob("step-6.unknown-*")
    assert read_manifest(kept) == later

    saved = step.with_name("step-4")  # after that, as if it were: ranks that start anew go on from it
    (saved / MANIFEST).write_bytes(manifest_bytes(replace(read_manifest(saved), serial=4)))
    again = Resume(folder, Place(restart=1))
    assert again.checkpoint(step, Checkpoint(remote=f"file://{here}/store")) == saved
