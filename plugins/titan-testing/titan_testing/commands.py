"""`run_cli`: the command `titan` inside of a test."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    """0 if all went well; the others are `titancli.errors.ExitCode`."""
    stdout: str
    stderr: str


def run_cli(*arguments: str | Path, cwd: str | Path | None = None) -> Done:
    """Run `titan ARGUMENTS` and return what it printed and its exit code.

    It runs in this process, so that torch is imported once for many runs. A run of several ranks starts
    processes, as ever; what they print goes to the logs of the run.

    Args:
        cwd: the folder to run in, since relative paths and `runs/` begin there; None: where the test runs.
    """
    from titancli.commands import main

    # --color leaves its mark on the environment, which here is the test's.
    environment = dict(os.environ)
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.chdir(cwd or Path.cwd()),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            code = main([str(argument) for argument in arguments])
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return Done(int(code), stdout.getvalue(), stderr.getvalue())
