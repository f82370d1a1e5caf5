"""A plugin for tests: kills the process with -9 before the n-th change of a file after the last step.

`KILLER` is STEP:N; with N = 0 nothing is killed, and the changes are listed in the file `moments`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

CHANGES = {"os.rename", "os.mkdir", "os.symlink", "os.remove", "os.rmdir"}

last, count = (int(number) for number in os.environ["KILLER"].split(":"))
seen: list[str] = []
begun = False


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Count changes once the last checkpoint has its name; the link of a symlink stands second."""
    global begun
    if event not in CHANGES:
        return
    path = os.fspath(arguments[1 if event in ("os.rename", "os.symlink") else 0])
    if not begun:
        begun = event == "os.rename" and str(path).endswith(f"checkpoints/step-{last}")
        return
    seen.append(f"{event} {path}")
    if count == 0:
        with open("moments", "a") as file:
            file.write(f"{seen[-1]}\n")
    elif len(seen) == count:
        os.kill(os.getpid(), signal.SIGKILL)


if not hasattr(sys, "killer"):  # a plugin's file may be loaded more than once
    sys.killer = watch  # type: ignore[attr-defined]
    sys.addaudithook(watch)
