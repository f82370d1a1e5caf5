"""titan-wandb: the real package in its offline mode, whose files are read back."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from titan_testing import check_plugin, recipe, run_cli
from titan_wandb import WandB
from titan_wandb.logger import build, last_step
from titancli import TitanError
from titancli.errors import RecipeError
from titancli.recipe import load_recipe

OFFLINE = '[[loggers]]\ntype = "wandb"\nmode = "offline"\n'


def records(run: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: LevelDB's log format, blocks of 32 KiB after a 7-byte header."""
    (file,) = run.glob("*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def rows(run: Path) -> dict[int, dict[str, Any]]:
    found = [record.history for record in records(run) if record.WhichOneof("record_type") == "history"]
    return {one.step.num: {i.nested_key[0]: json.loads(i.value_json) for i in one.item} for one in found}


def start(run: Path) -> Any:
    return next(record.run for record in records(run) if record.WhichOneof("record_type") == "run")


def test_the_plugin_is_sound(tmp_path: Path) -> None:
    check_plugin("titan-wandb", configs={"logger/wandb": {"mode": "offline"}})


def test_a_run_and_its_resume_are_one_run_with_recipe_and_environment(tmp_path: Path) -> None:
    path = recipe(tmp_path, OFFLINE + "[training]\nsteps = 4\n[checkpoint]\nenable = true\ninterval = 2\n")
    folder = tmp_path / "r"
    done = run_cli("train", str(path), "--run-dir", str(folder))
    assert done.code == 0 and "wandb sync" in done.stderr, done.stderr
    (first,) = folder.glob("wandb/offline-run-*")
    # As after a crash: it goes on from step 2, and steps 3 and 4 are logged once more.
    done = run_cli("train", str(folder), "--resume", "--step", "2", "training.steps=5")
    assert done.code == 0, done.stderr
    (second,) = set(folder.glob("wandb/offline-run-*")) - {first}
    assert (list(rows(first)), list(rows(second))) == ([1, 2, 3, 4], [3, 4, 5])
    assert rows(first)[1]["loss"] > 0 and "grad_norm" in rows(first)[1]
    run_id = json.loads((folder / "run.json").read_text())["run_id"]
    before, after = start(first), start(second)
    assert (before.run_id, after.run_id, before.display_name) == (run_id, run_id, "r")
    assert not before.HasField("branch_point")
    assert (after.branch_point.run, after.branch_point.value) == (run_id, 2)
    config = {update.key: json.loads(update.value_json) for update in after.config.update}
    assert config["training"]["steps"] == 5 and "torch" in config["environment"]["versions"]
    assert (second / "files/recipe.lock.toml").read_text() == (folder / "recipe.lock.toml").read_text()


def test_two_at_once_do_not_mix(tmp_path: Path) -> None:
    loggers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        loggers.append(build(WandB(mode="offline"), run_folder=tmp_path / name, is_main=True))
        loggers[-1].run_start({"run_id": f"id-{name}", "step": 0, "recipe": {"name": "two"}})
    for step in (1, 2):
        for number, logger in enumerate(loggers):
            logger.step_end(step, {"loss": float(number)})
    for logger in loggers:
        logger.run_end({"why": "finished"})
    for number, name in enumerate("ab"):
        (run,) = (tmp_path / name).glob("wandb/offline-run-*")
        until = time.monotonic() + 30.0
        while len(rows(run)) < 2 and time.monotonic() < until:
            time.sleep(0.1)  # W&B's own process writes, on a busy machine a little later
        assert [row["loss"] for row in rows(run).values()] == [number, number]


def test_without_a_key_the_run_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TitanError, match="no API key"):
        build(WandB(), run_folder=tmp_path, is_main=True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    build(WandB(), run_folder=tmp_path, is_main=True)
    monkeypatch.delenv("WANDB_MODE")
    assert not hasattr(build(WandB(), run_folder=tmp_path, is_main=False), "run_start")


def test_two_in_one_recipe_are_refused() -> None:
    with pytest.raises(RecipeError, match="same W&B run"):
        load_recipe("llama3_debug", ['loggers=["wandb", "wandb"]'])


def test_the_last_step_is_found_in_a_file_that_was_cut_off(tmp_path: Path) -> None:
    assert last_step(tmp_path / "events.jsonl") == 0
    (tmp_path / "events.jsonl").write_text('{"event": "step", "step": 7}\n{"event": "log"}\n{"event": "st')
    assert last_step(tmp_path / "events.jsonl") == 7
