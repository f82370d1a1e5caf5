"""`run_cli`: run the command `titan` inside a test."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    """The result of a command."""

    code: int
    """0 on success; others are values of `titancli.errors.ExitCode`."""
    stdout: str
    stderr: str


def run_cli(*arguments: str | Path, cwd: str | Path | None = None) -> Done:
    """Run `titan ARGUMENTS` and return its output and exit code.

    It runs in this process, so that torch is imported once for many runs. A run of several ranks starts
    processes as usual; their output goes to the logs of the run.

    Args:
        cwd: folder to run in, where relative paths and `runs/` begin; None: the test's working directory.
    """
    from titancli.commands import main

    # --color changes the environment, which here is the test's.
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
