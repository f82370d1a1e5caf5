"""What a run needs before its workers start costs no torch."""

from __future__ import annotations

import subprocess
import sys

MODULES = (
    "titancli.cli.train",
    "titancli.launch",
    "titancli.launchers",
    "titancli.launchers.agent",
    "titancli.launchers.local",
    "titancli.run.prepare",
    "titancli.run.preview",
    "titancli.run.start",
    "titancli.loggers",
    "titancli.observe.console",
    "titancli.observe.events",
    "titancli.observe.failures",
    "titancli.observe.metrics",
    "titancli.runs",
    "titancli.worker.rank",
)


def test_commands_and_launchers_import_no_torch() -> None:
    heavy = {"torch", "numpy", "transformers", "datasets", "rich", "pydantic"}
    code = f"for m in {MODULES}: importlib.import_module(m)\nprint({heavy} & set(sys.modules))"
    code = f"import sys, importlib\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
