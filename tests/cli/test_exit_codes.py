"""Each exit code, reached by a command that a user could give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Titan
from titancli.errors import ExitCode

COMMAND = """
from titancli import hookimpl

@hookimpl
def titan_commands():
    import click

    @click.command("act")
    @click.argument("how")
    def act(how):
        if how == "stop":
            from titancli.launchers.local import exit_code

            return exit_code({"why": "stopped"})
        raise KeyboardInterrupt if how == "interrupt" else ValueError("a bug")

    return [act]
"""


def act(how: str) -> Callable[[Path], list[str]]:
    """A command that ends in this way; signals in a real run are in tests/run/test_ranks.py."""

    def arguments(folder: Path) -> list[str]:
        file = folder / "cli_act.py"
        file.write_text(COMMAND)
        return ["act", how, "-p", str(file)]

    return arguments


REACHED: dict[ExitCode, Callable[[Path], list[str]]] = {
    ExitCode.OK: lambda folder: ["recipe", "list"],
    ExitCode.FAILED: act("fail"),
    ExitCode.USAGE: lambda folder: ["trian"],
    ExitCode.RECIPE: lambda folder: ["validate", "llama3_debug", "training.stpes=1"],
    ExitCode.PLUGIN: lambda folder: ["show", "loss/nothing"],
    ExitCode.ENVIRONMENT: lambda folder: ["convert-checkpoint", str(folder / "nothing"), "out", "--to", "hf"],
    ExitCode.STOPPED: act("stop"),
    ExitCode.INTERRUPTED: act("interrupt"),
}


@pytest.mark.parametrize("code", ExitCode, ids=lambda code: code.name)
def test_an_exit_code_is_reached(
    titan: Titan, tmp_path: Path, record_property: Callable[[str, object], None], code: ExitCode
) -> None:
    record_property("exit code", f"{code.value} {code.name}")
    done = titan(*REACHED[code](tmp_path))
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert bool(done.out) == (code is ExitCode.OK)


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "loss/nothing"],
        ["validate", "llama3_debug", "loss=nothing"],
        ["recipe", "show", "llama3_debug", "loss=nothing"],
        ["train", "llama3_debug", "loss=nothing"],
        ["validate", "llama3_debug", "requires.plugins=['titan-no-such-thing']"],
    ],
    ids=" ".join,
)
def test_a_missing_component_or_plugin_is_code_4_whoever_names_it(titan: Titan, arguments: list[str]) -> None:
    assert titan(*arguments).code == ExitCode.PLUGIN


def test_the_first_of_several_problems_gives_the_code(titan: Titan, tmp_path: Path) -> None:
    recipe = tmp_path / "wrong.toml"
    recipe.write_text('extends = "titan:llama3_debug"\nstpes = 1\nloss = "nothing"\n')
    assert titan("validate", str(recipe)).code == ExitCode.RECIPE
