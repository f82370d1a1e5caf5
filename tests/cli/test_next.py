"""The lines after a run: what to type next."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from tests.cli.conftest import Titan
from titancli.cli import group
from titancli.cli.train import EXTENDS, _say_next
from titancli.recipe import load_recipe
from titancli.registry import first_party
from titancli.run.request import Request
from titancli.terminal import COMMANDS, GROUPS, own_command, pasteable

EXPORT = "export:    titan convert-checkpoint r/checkpoints/step-5 OUT"


def said(capsys: pytest.CaptureFixture[str], recipe: Any, *plugin_files: str, **other: Any) -> list[str]:
    outcome = {"why": "finished", "step": 5, "checkpoint": "checkpoints/step-5", **other}
    folder: Any = SimpleNamespace(path=Path.cwd() / "r", outcome=lambda: outcome)
    files = [Path(file) for file in plugin_files]
    asked = Request("r", plugin_files=files, env={"CXX": "g++ -O1"})
    plan: Any = SimpleNamespace(loaded=SimpleNamespace(recipe=recipe), request=asked)
    request: Any = SimpleNamespace(folder=folder, plugin_files=files, nnodes=1, rdzv=None)
    _say_next(plan, request)
    return capsys.readouterr().err.splitlines()


def test_both_lines_have_the_plugin_files(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, load_recipe("llama3_debug").recipe, "/x/my lab.py")
    flags = " -p '/x/my lab.py'"
    assert lines[1] == f"continue:  titan recipe extend r --steps 10{flags}{EXTENDS}"
    assert lines[2] == f"{EXPORT}{flags} --to hf"


def test_adapters_are_exported_as_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, load_recipe("llama3_debug", ["converters=[{type='lora'}]", "weights=/w"]).recipe)
    assert lines[2] == f"{EXPORT} --to peft    # the adapters; --to hf merges them"


def test_a_model_without_a_hugging_face_form_is_not_exported(capsys: pytest.CaptureFixture[str]) -> None:
    class Bare:
        __component__ = SimpleNamespace(hf=None)

    recipe = SimpleNamespace(model=Bare(), converters=[], training=SimpleNamespace(epochs=None))
    assert [line[:9] for line in said(capsys, recipe)] == ["finished ", "continue:"]


@pytest.mark.parametrize(("step", "where"), [(0, "at step 0"), (None, "before a step")])
def test_a_run_that_was_stopped_at_step_0_is_continued_too(
    capsys: pytest.CaptureFixture[str], step: int | None, where: str
) -> None:
    lines = said(capsys, load_recipe("llama3_debug").recipe, why="interrupted", step=step, checkpoint=None)
    assert lines[0] == f"stopped {where}; run folder: r"
    assert lines[1:] == ["continue:  titan train r --resume --env 'CXX=g++ -O1'"]
    lines = said(capsys, load_recipe("llama3_debug").recipe, why="stopped", step=3, checkpoint=None)
    assert [line[:9] for line in lines] == ["stopped a"]  # what it did was not saved


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `titan` in an environment that is not on the PATH, which this process says it is."""
    script = tmp_path / "my env" / "bin" / "titan"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m titancli "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return script


def test_what_is_printed_can_be_pasted_where_titan_is_not_on_the_path(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, load_recipe("llama3_debug").recipe)
    assert lines[1] == f"continue:  'my env/bin/titan' recipe extend r --steps 10{EXTENDS}"
    assert lines[2].startswith("export:    'my env/bin/titan' convert-checkpoint r/checkpoints/step-5 OUT")
    done = subprocess.run(["sh", "-c", pasteable("titan recipe list")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "llama3_debug" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "nonesuch"], "`'my env/bin/titan' recipe list` lists them"),  # one problem of a recipe
        (["runs", "compare", "r"], "'my env/bin/titan' runs compare RUN RUN..."),  # an error
        (["recipe", "new", "f.toml", "--from", "llama3_debug"], "next:  'my env/bin/titan' train f.toml"),
    ],
)
def test_hints_can_be_pasted_too(
    titan: Titan, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], hint: str
) -> None:
    assert hint in titan(*arguments).err


def test_the_shortest_words_that_start_this_titan(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(elsewhere.parent))
    assert own_command() == "titan"
    link = elsewhere.parents[2] / "links"
    link.mkdir()
    (link / "titan").symlink_to(elsewhere)
    monkeypatch.setenv("PATH", str(link))
    assert own_command() == "titan"  # another name of the same program
    shutil.copy(elsewhere, link / "other")
    (link / "titan").unlink()
    (link / "other").rename(link / "titan")
    assert own_command() == "'my env/bin/titan'"  # another installation comes first
    monkeypatch.chdir(elsewhere.parent)
    assert own_command() == "./titan"
    monkeypatch.chdir("/usr/bin")
    assert own_command() == shlex.quote(str(elsewhere))  # not ../../…, which is longer
    monkeypatch.setattr(sys, "argv", [str(link / "__main__.py")])
    monkeypatch.setattr(sys, "executable", "/opt/python3")
    assert own_command() == "/opt/python3 -m titancli"
    assert pasteable("pip install 'titancli[zstd]'") == "/opt/python3 -m pip install 'titancli[zstd]'"


def test_prose_and_other_names_are_left_alone(elsewhere: Path) -> None:
    for text in (
        "titan runs on torch 2.11",
        "it is not a titan checkpoint: it has no manifest.json",
        "./titan train r",
        "new-titan train",
        "titan trains models",
        "titan new-plugins",
    ):
        assert pasteable(text) == text


def test_every_command_is_known() -> None:
    context = click.Context(group.titan)
    names = group.PLACES.keys() | {name for name in first_party.COMMANDS if " " not in name}
    found = {name: group.titan.get_command(context, name) for name in names}
    groups = {
        name: sorted(one.list_commands(context))
        for name, one in found.items()
        if isinstance(one, click.Group)
    }
    assert {name: sorted(names.split()) for name, names in GROUPS.items()} == groups
    assert sorted(COMMANDS.split()) == sorted(set(found) - set(groups))
