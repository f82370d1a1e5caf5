"""titan-trackio: its database says the same, read with sqlite3, whatever the texts are."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from trackio.sqlite_storage import SQLiteStorage

from tests.security.writers import UTF8, Writer, check_comments, check_rows
from titan_trackio import Trackio
from titan_trackio.logger import build
from titancli.recipe import toml_text

WRITERS = [Writer("Trackio", "titan_trackio.logger:TrackioLogger", "titan_trackio.logger")]


def test_what_writes_has_a_row() -> None:
    check_rows("titan_trackio", WRITERS)
    check_comments("titan_trackio", {})


@pytest.mark.parametrize("text", UTF8)
def test_the_database_says_the_same(text: str, tmp_path: Path, database: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = toml_text({"x": text})
    (tmp_path / "run" / "recipe.lock.toml").write_bytes(lock.encode())
    logger = build(Trackio(project=text or "x", group=text), run_folder=tmp_path / "run", is_main=True)
    attempt = {"host": text, "argv": [text]}
    logger.run_start({"run_id": "id", "recipe": {"x": text, text: text}, "attempts": [attempt]})
    logger.step_end(1, {text: 1.5, "loss": 2.0})
    logger.step_end(2, {"loss": 1.0})
    logger.run_end({})
    assert {file.parent for file in database.rglob("*.db")} == {database}
    (file,) = database.glob("*.db")
    assert file == SQLiteStorage.get_project_db_path(text or "x")
    with closing(sqlite3.connect(file)) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
        ((config,),) = connection.execute("SELECT config FROM configs").fetchall()
    assert [(name, step, json.loads(metrics)) for name, step, metrics in rows] == [
        ("run-id", 1, {text: 1.5, "loss": 2.0}),
        ("run-id", 2, {"loss": 1.0}),
    ]
    found = {key: value for key, value in json.loads(config).items() if not key.startswith("_")}
    assert found == {"x": text, text: text, "environment": attempt, "recipe.lock.toml": lock}
