"""A store of a plugin: the example of docs/plugins.md, from an upload to a resume on another machine."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.run.conftest import Finished, here, train
from titan_testing import run_cli
from titancli import registry
from titancli.checkpoint.remote.requests import Unreachable
from titancli.checkpoint.remote.store import at
from titancli.errors import PluginError

__all__ = ["here", "train"]

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"


@pytest.fixture
def shelf(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The plugin's file, and the database in the environment."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = re.search(r"<!-- file: shelf.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    file = here / "shelf.py"
    file.write_text(code[1])
    monkeypatch.setenv("SHELF", str(here / "shelf.db"))
    yield file
    registry.configure()
    for name in ("shelf", "shelf2"):
        sys.modules.pop(name, None)


def keys(database: Path) -> set[str]:
    with sqlite3.connect(database) as connection:
        return {key for (key,) in connection.execute("SELECT key FROM objects")}


def test_a_run_goes_on_from_a_plugins_store(train: Callable[..., Finished], here: Path, shelf: Path) -> None:
    fields = ("checkpoint.interval=2", "checkpoint.keep_latest_k=2")
    more = ("-p", "./shelf.py", "checkpoint.remote=shelf://a/b", *fields)
    assert train("llama3_debug", "--run-dir", "r", "training.steps=6", *more).code == 0
    names = {key.split("/")[3] for key in keys(here / "shelf.db")}
    assert {"step-4", "step-6"} <= names and "step-2" not in names, names
    (here / "r").rename(here / "lost")
    shown = run_cli("checkpoint", "show", "shelf://a/b/r/step-6", "-p", "./shelf.py", cwd=here)
    assert shown.code == 0 and "step" in shown.stdout, shown.stderr
    done = train("llama3_debug", "--run-dir", "r", "--resume", "training.steps=8", *more)
    assert done.code == 0 and "downloading shelf://a/b/r/step-6" in done.err, done.err
    assert any("/step-8/" in key for key in keys(here / "shelf.db"))


def test_what_a_plugins_store_raises_names_the_place(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.configure(files=[shelf])
    place = at("shelf://a/b", patience=0.01)
    assert not place.is_dir() and str(place) == "shelf://a/b"
    (place / "x").write_bytes(b"12")
    assert [path.name for path in place.iterdir()] == ["x"] and (place / "x").read_bytes() == b"12"
    Path(shelf.parent, "shelf.db").write_bytes(b"no database" * 100)
    with pytest.raises(Unreachable, match=r"shelf://a/b/x cannot be reached: DatabaseError"):
        (place / "x").read_bytes()
    monkeypatch.delenv("SHELF")
    with pytest.raises(KeyError):
        at("shelf://a/b")


def test_two_plugins_of_one_protocol_are_refused(shelf: Path) -> None:
    other = shelf.with_name("shelf2.py")
    other.write_text(shelf.read_text().replace("shelf:Shelf", "shelf2:Shelf"))
    registry.configure(files=[shelf, other])
    with pytest.raises(PluginError, match="store 'shelf' is provided by more than one plugin"):
        at("shelf://a/b")
