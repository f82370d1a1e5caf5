"""Every `--json` prints one document with a schema, whatever plugins say meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests import absent
from tests.cli.conftest import Titan
from titancli.cli import group
from titancli.registry.first_party import COMMANDS

LOUD = """
import warnings

from titancli import hookimpl

print("a banner")
warnings.warn("this plugin is old")


@hookimpl
def titan_components():
    print("{}")
    raise ValueError("broken as well")
"""
DOCUMENTS = {
    "list-components": (["list-components", "--json"], "titan.components"),
    "recipe list": (["recipe", "list", "--json"], "titan.recipes"),
    "show": (["show", "adamw", "--json"], "titan.component"),
    "plugin list": (["plugin", "list", "--json"], "titan.plugins"),
    "recipe show": (["recipe", "show", "llama3_debug", "--json", "--origin"], "titan.config"),
    "recipe diff": (["recipe", "diff", "llama3_debug", "llama3_8b", "--json"], "titan.config-diff"),
    "plugin show": (["plugin", "show", "titan", "--json"], "titan.plugins"),
    "validate": (["validate", "llama3_debug", "--format", "json"], "titan.validation"),
    "train": (["train", "llama3_debug", "--dry-run", "--json"], "titan.plan"),
    "sweep": (
        ["sweep", "llama3_debug", "--set", "optimizer.lr=1e-3,3e-3", "--dry-run", "--json"],
        "titan.sweep",
    ),
    "launch": (["launch", "slurm", "llama3_debug", "--nodes", "2", "--dry-run", "--json"], "titan.launch"),
    "plan": (["plan", "llama3_debug", "--json"], "titan.estimate"),
    "doctor": (["doctor", "--json"], "titan.doctor"),
}


@pytest.mark.filterwarnings("ignore:this plugin is old")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_stdout_is_one_document(titan: Titan, tmp_path: Path, name: str) -> None:
    absent.need_command(name)
    arguments, schema = DOCUMENTS[name]
    file = tmp_path / "cli_loud.py"
    file.write_text(LOUD)
    done = titan(*arguments, "-p", str(file))
    document = json.loads(done.out)
    assert next(iter(document)) == "schema"
    assert (document["schema"], document["version"]) == (schema, 1)


def names_of(of: click.Group, *above: str) -> Iterator[str]:
    """The commands of a group and of the groups in it, as they are typed."""
    context = click.Context(of)
    for name in of.list_commands(context):
        found = of.get_command(context, name)
        if isinstance(found, click.Group):
            yield from names_of(found, *above, name)
        else:
            yield " ".join((*above, name))


def test_a_command_that_can_print_json_is_among_these(titan: Titan) -> None:
    # They need a model, or a run: tests/generate, tests/run, titan-proof, tests/docs.
    # Token shards: tests/data. Jobs: plugins/titan-slurm. Checkpoints: tests/cli/test_checkpoint.py.
    elsewhere = {
        "recipe extend",
        "runs",
        "launch",
        "checkpoint",
        "data",
        "generate",
        "rollouts",
        "eval",
        "lm-eval",
        "report",
        "profile",
        "reproduce",
        "replay",
        "bisect",
        "prove",
    }
    own = [name for name in names_of(group.titan) if name.split()[0] in group.PLACES.keys() | COMMANDS.keys()]
    offering = [name for name in own if "--json" in titan(*name.split(), "--help").out]
    assert [
        name for name in offering if name not in DOCUMENTS and not {name, name.split()[0]} & elsewhere
    ] == []
    assert len(offering) > 30


def test_color_is_always_or_never(titan: Titan, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.setenv(name, "")
    assert "\x1b[1;31m" in titan("trian", "--color", "always").err
    assert os.environ["FORCE_COLOR"] == "1"  # for what the command starts
    assert "\x1b[" not in titan("trian", "--color=never").err
    assert titan("trian", "--color", "blue").code == 2


def test_v_tells_what_is_loaded(titan: Titan) -> None:
    assert "plugin titan: ok, components: " in titan("list-components", "loss", "-v").err
    assert "plugin titan" not in titan("list-components", "loss").err


def test_q_keeps_notes_to_itself(titan: Titan, tmp_path: Path) -> None:
    file = tmp_path / "cli_sick.py"
    file.write_text("1 / 0\n")
    assert "cli_sick" in titan("list-components", "-p", str(file)).err
    assert titan("list-components", "-q", "-p", str(file)).err == ""
    assert "error" in titan("trian", "-q").err


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["recipe", "show", "llama3_debug", "training.stpes=1", "--json"], 3, "unknown-key"),
        (["train", "llama3_debug", "training.stpes=1", "--json"], 3, "unknown-key"),
        (["plan", "llama3_debug", "--json", "--gpu", "Abacus"], 2, "usage"),
        (["show", "loss/nothing", "--json"], 4, "plugin"),
        (["checkpoint", "show", "nowhere", "--json"], 5, "environment"),
        (["train", "llama3_debug", "weights=/nowhere", "--json"], 5, "environment"),
        (["validate", "--format=json", "training.steps=1"], 2, "usage"),
        (["--json"], 2, "usage"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_an_error_is_a_document_too(titan: Titan, arguments: list[str], code: int, kind: str) -> None:
    done = titan(*arguments)
    assert done.code == code and done.err
    [line] = done.out.splitlines()
    document = json.loads(line)
    assert (document["schema"], document["version"]) == ("titan.error", 1)
    assert document["exit_code"] == code
    assert [problem["code"] for problem in document["problems"]] == [kind]
    assert document["problems"][0]["message"]


def test_without_json_an_error_leaves_stdout_alone(titan: Titan) -> None:
    assert titan("recipe", "show", "llama3_debug", "training.stpes=1").out == ""
