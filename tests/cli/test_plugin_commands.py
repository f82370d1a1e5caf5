"""Commands of plugins: imported when they run, never in the place of titan's own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.cli.conftest import Titan

LAZY = """
from titancli import Command, hookimpl

@hookimpl
def titan_commands():
    return [Command("wave", "Wave to somebody.", "{target}")]
"""
CODE = """
import click

@click.command("wave")
@click.argument("name")
def wave(name):
    click.echo(f"waving to {name}")

no_command = 1
"""


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`lazy(target)`: a plugin file, beside it the module cli_wave_code."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cli_wave_code.py").write_text(dedent(CODE))

    def write(target: str) -> str:
        file = tmp_path / "cli_wave.py"
        file.write_text(dedent(LAZY).replace("{target}", target))
        return str(file)

    return write


def test_help_shows_a_command_without_importing_it(titan: Titan, lazy) -> None:
    done = titan("--help", "-p", lazy("cli_wave_code:wave"))
    assert "Wave to somebody. (cli_wave)" in done.out
    assert "cli_wave_code" not in sys.modules


def test_a_command_is_imported_when_it_runs(titan: Titan, lazy) -> None:
    assert titan("wave", "Ada", "-p", lazy("cli_wave_code:wave")) == (0, "waving to Ada\n", "")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("cli_wave_nowhere:wave", "No module named 'cli_wave_nowhere'"),
        ("cli_wave_code:no_command", "is 1, which is not a click command"),
    ],
)
def test_a_command_whose_code_is_bad_exits_4(titan: Titan, lazy, target: str, words: str) -> None:
    done = titan("wave", "Ada", "-p", lazy(target))
    assert (done.code, done.out) == (4, "")
    assert words in done.err and "cli_wave" in done.err


def test_missing_code_is_reported_by_plugins(titan: Titan, lazy) -> None:
    done = titan("plugin", "show", "cli_wave", "-p", lazy("cli_wave_nowhere:wave"))
    assert "cli_wave: broken" in done.out
    assert "command wave: the target 'cli_wave_nowhere:wave' does not exist" in done.out


def test_the_cores_own_commands_ask_no_plugin(titan: Titan, tmp_path: Path) -> None:
    file = tmp_path / "cli_claims.py"
    file.write_text("raise RuntimeError('loaded')\n")
    done = titan("plugin", "list", "-p", str(file))
    assert "RuntimeError: loaded" in done.out  # it is loaded where it is asked for
    done = titan("train", "--help", "-p", str(file))
    assert done.code == 0 and "RuntimeError" not in done.err
    assert "cli_claims" not in sys.modules


GROUPED = """
from titancli import Command, hookimpl

@hookimpl
def titan_commands():
    return [
        Command("recipe wave", "Wave at a recipe.", "cli_wave_code:wave"),
        Command("recipe new", "No.", "x:y"),
    ]
"""


def test_a_plugin_adds_a_command_to_a_group_and_takes_none(titan: Titan, lazy, tmp_path: Path) -> None:
    lazy("cli_wave_code:wave")
    file = tmp_path / "cli_grouped.py"
    file.write_text(GROUPED)
    told = titan("recipe", "--help", "-p", str(file)).out
    assert re.search(r"  wave +Wave at a recipe\.", told) and told.count("  new  ") == 1 and "No." not in told
    assert titan("recipe", "wave", "Ada", "-p", str(file)) == (0, "waving to Ada\n", "")
    assert "Create a recipe FILE" in titan("recipe", "new", "--help", "-p", str(file)).out
    assert titan("recipe", "wave").code == 2
    listed = titan("plugin", "show", "cli_grouped", "-p", str(file)).out
    assert "broken" in listed and "'recipe new', which is the name of a built-in command" in listed
    assert "wave" not in titan("--help", "-p", str(file)).out


def test_plugins_of_titan_and_of_others_are_listed_apart(titan: Titan, lazy) -> None:
    own, others = titan("plugin", "list", "-p", lazy("cli_wave_code:wave")).out.split("\nothers:\n")
    assert own.startswith("titan's own:\ntitan ") and "\ntitan-report " in own
    assert others.startswith("cli_wave ") and others.count("\n") == 1


def test_a_command_of_a_plugin_that_is_left_out_says_so(titan: Titan) -> None:
    done = titan("report", "RUN", "-p", "no:titan-report")
    assert (done.code, done.out) == (4, "")
    assert "titan report comes with titan-report, which is blocked" in done.err
