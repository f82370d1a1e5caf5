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
    ExitCode.OK: lambda folder: ["list-recipes"],
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
