"""Which component of a plugin, and which line of it, an error came through."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from titancli import registry
from titancli.errors import EnvironmentProblem, TitanError, causes
from titancli.registry.component import build
from titancli.registry.error_source import Blame, blame

PLUGIN = """\
import json
from titancli import TitanError, component, hookimpl

@component("loss", "by_class", target="blamed_lab:ByClass")
class A:
    "A."

@component("loss", "by_closure", target="blamed_lab:build_closure")
class B:
    "B."

@component("optimizer", "by_object", target="blamed_lab:build_object")
class C:
    "C."

class ByClass:
    def __init__(self, config): pass
    def __call__(self, what): return helper(what)

def helper(what):
    return WAYS[what]()

def own(): raise TitanError("what the plugin has to say")
def library(): json.loads("{")
def key(): {}["x"]
def chained():
    try:
        key()
    except KeyError as error:
        raise TitanError("another") from error

WAYS = {"own": own, "library": library, "key": key, "chained": chained}

def build_closure(config):
    def loss(): return {}["x"]
    return loss

def build_object(config): return Odd()

class Odd:
    def __call__(self): return {}["x"]

def of_nobody(): return {}["x"]

@hookimpl
def titan_components(): return [A, B, C]
"""


def line(words: str) -> int:
    """The line of the plugin that has these words."""
    (found,) = [number for number, text in enumerate(PLUGIN.splitlines(), 1) if words in text]
    return found


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "blamed_lab.py"
    file.write_text(PLUGIN)
    registry.configure(files=[file])
    registry.current().names("loss")
    yield file
    sys.modules.pop("blamed_lab", None)
    registry.configure()


def made(kind: str, name: str):
    return build(registry.current().find(kind, name)())


def raised(function, *arguments) -> BaseException:
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def test_the_last_line_of_the_plugin_and_the_component_that_it_is_of(lab: Path) -> None:
    loss = made("loss", "by_class")
    assert str(blame(raised(loss, "key"))) == f"the loss blamed_lab/by_class, blamed_lab.py:{line('def key')}"
    assert (
        str(blame(raised(loss, "library")))
        == f"the loss blamed_lab/by_class, blamed_lab.py:{line('def library')}"
    )
    closure = made("loss", "by_closure")
    assert str(blame(raised(closure))) == f"the loss blamed_lab/by_closure, blamed_lab.py:{line('def loss')}"
    odd = made("optimizer", "by_object")
    assert (
        str(blame(raised(odd)))
        == f"the optimizer blamed_lab/by_object, blamed_lab.py:{line('def __call__(self): return')}"
    )


def test_code_of_no_component_is_the_plugins(lab: Path) -> None:
    made("loss", "by_class")
    of_nobody = sys.modules["blamed_lab"].of_nobody
    assert str(blame(raised(of_nobody))) == f"the plugin blamed_lab, blamed_lab.py:{line('def of_nobody')}"


def test_what_a_plugin_itself_says_needs_no_place_but_its_cause_does(lab: Path) -> None:
    loss = made("loss", "by_class")
    assert blame(raised(loss, "own")) is None
    assert blame(raised(loss, "chained")).place == f"blamed_lab.py:{line('def key')}"


def test_nobody_is_blamed_for_what_came_through_no_plugin(lab: Path) -> None:
    assert blame(raised(int, "x")) is None
    assert blame(raised(registry.current().find, "loss", "zzz")) is None


def test_a_file_elsewhere_has_its_whole_path(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = made("loss", "by_class")
    (lab.parent / "other").mkdir()
    monkeypatch.chdir(lab.parent / "other")
    assert blame(raised(loss, "key")).place == f"{lab}:{line('def key')}"


def test_what_is_said_of_an_error_in_another_process_goes_with_it() -> None:
    error = TitanError("the batch has no 'x'", hint="did you mean 'y'?")
    error.blamed = Blame("the dataset lab/rows", "lab.py:3")  # type: ignore[attr-defined]
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), blame(sent)) == (str(error), error.blamed)  # type: ignore[attr-defined]
    assert blame(pickle.loads(pickle.dumps(TitanError("x")))) is None


def test_an_error_that_was_raised_from_itself_is_looked_at_once() -> None:
    error = EnvironmentProblem("text.txt does not exist")
    error.__cause__ = error
    assert blame(error) is None
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert list(causes(first)) == [first, second] and list(causes(None)) == []
