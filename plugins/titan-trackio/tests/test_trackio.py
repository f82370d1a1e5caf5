"""titan-trackio: the real package, whose database is read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trackio.sqlite_storage import SQLiteStorage

from titan_testing import check_plugin, recipe, run_cli
from titan_trackio import Trackio
from titan_trackio.logger import build
from titancli import TitanError
from titancli.errors import RecipeError
from titancli.recipe import load_recipe


def rows(project: str, run: str) -> list[dict]:
    return SQLiteStorage.get_logs(project, run)


def test_the_plugin_is_sound(tmp_path: Path) -> None:
    check_plugin("titan-trackio")


def test_a_run_and_its_resume_are_one_run_with_recipe_and_environment(tmp_path: Path) -> None:
    text = '[[loggers]]\ntype = "trackio"\n[training]\nsteps = 4\n[checkpoint]\nenable = true\ninterval = 2\n'
    path, folder = recipe(tmp_path, text), tmp_path / "r"
    done = run_cli("train", str(path), "--run-dir", str(folder))
    assert done.code == 0, done.stderr
    assert "rackio" not in done.stdout
    record = json.loads((folder / "run.json").read_text())
    project, name = record["name"], f"r-{record['run_id'][:8]}"
    before = rows(project, name)
    assert [row["step"] for row in before] == [1, 2, 3, 4]
    # As after a crash: it goes on from step 2, and steps 3 and 4 are logged once more.
    done = run_cli(
        "train", str(folder), "--resume", "--step", "2", "training.steps=5", "training.max_norm=0.01"
    )
    assert done.code == 0, done.stderr
    after = rows(project, name)
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5]
    assert after[:2] == before[:2] and after[3]["loss"] != before[3]["loss"]
    assert SQLiteStorage.get_runs(project) == [name]
    config = SQLiteStorage.get_run_config(project, name)
    assert config is not None and "torch" in config["environment"]["versions"]
    assert config["recipe.lock.toml"].startswith("#") or "[model]" in config["recipe.lock.toml"]


def test_two_at_once_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loggers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        loggers.append(build(Trackio(), run_folder=tmp_path / name, is_main=True))
        loggers[-1].run_start({"run_id": f"id{name}", "step": 0, "recipe": {"name": "two"}})
    for step in (1, 2):
        for number, logger in enumerate(loggers):
            logger.step_end(step, {"loss": float(number)})
    for logger in loggers:
        logger.run_end({"why": "finished"})
    assert capsys.readouterr().out == ""
    for number, name in enumerate("ab"):
        assert [(row["step"], row["loss"]) for row in rows("two", f"{name}-id{name}")] == [
            (1, number),
            (2, number),
        ]


def test_a_run_that_fails_keeps_its_rows_and_says_nothing_on_stdout(tmp_path: Path) -> None:
    code = (
        "import pathlib; from titan_trackio import Trackio; from titan_trackio.logger import build\n"
        "logger = build(Trackio(), run_folder=pathlib.Path.cwd(), is_main=True)\n"
        "logger.run_start({'run_id': 'f', 'step': 0, 'recipe': {'name': 'failing'}})\n"
        "logger.step_end(1, {'loss': 2.0}); raise SystemExit(1)"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert [row["loss"] for row in rows("failing", f"{tmp_path.name}-f")] == [2.0]


def test_it_writes_to_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    with pytest.raises(TitanError, match="TRACKIO_SPACE_ID is set"):
        build(Trackio(), run_folder=tmp_path, is_main=True)
    assert not hasattr(build(Trackio(), run_folder=tmp_path, is_main=False), "run_start")


def test_two_in_one_recipe_are_refused() -> None:
    with pytest.raises(RecipeError, match="same Trackio run"):
        load_recipe("llama3_debug", ['loggers=["trackio", "trackio"]'])
