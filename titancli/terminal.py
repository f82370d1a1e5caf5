"""Text for a terminal: what comes from files that anybody may have written, and commands to be pasted there.
Torch-free."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Sequences that set a colour, move the cursor or set a title (ECMA-48: control sequences, and those of
xterm)."""


def printable(text: str, keep: str = "") -> str:
    """Return a text without what a terminal would obey: whole sequences go, and other characters that cannot
    be printed become `?`, but those to `keep`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "?" for char in _SEQUENCE.sub("", text))


def clean(value: T) -> T:
    """Return the same of plain JSON, and of a text of several lines."""
    if isinstance(value, str):
        return printable(value, "\n\t")  # type: ignore[return-value]
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}  # type: ignore[return-value]
    return [clean(item) for item in value] if isinstance(value, list) else value  # type: ignore[return-value]


# ------------------------------------------------------------------------------------ commands to be pasted

GROUPS = {
    "runs": "list show compare logs watch note rm",
    "checkpoint": "list show verify",
    "recipe": "list new show diff extend schema"
    " from-axolotl from-llamafactory from-torchtitan from-torchtune",
    "data": "tokenize show verify",
    "hub": "card push",
    "plugin": "list show new",
    "launch": "slurm status logs cancel",
}
COMMANDS = """
bisect convert-checkpoint doctor download eval flux-encode generate list-components lm-eval plan profile prove
replay report reproduce rollouts show sweep train validate"""
"""titan's commands, and those of its groups, without which one may be prose: `titan runs on torch 2.11`."""


def _alternatives(names: str) -> str:
    return f"(?:{'|'.join(map(re.escape, names.split()))})"


_NAMED = "|".join(
    [_alternatives(COMMANDS), *(f"{group} {_alternatives(names)}" for group, names in GROUPS.items())]
)
_COMMAND = re.compile(rf"(?<![\w./'\"-])titan(?= (?:{_NAMED})(?![\w-]))")
_INSTALL = re.compile(r"(?<![\w./'\"-])(?<!-m )pip(?= install )")


def _started_from() -> Path | None:
    """Return the script `titan` of this very installation; None if it has none."""
    script = Path(sys.argv[0])
    if script.name != "titan" or not script.is_file():  # another program, or `python -m titancli`
        script = Path(sys.executable).with_name("titan")
    return script if script.is_file() else None


def shell_path(path: Path) -> str:
    """Return a path from the current folder, if that is shorter, quoted for a shell."""
    whole = os.path.abspath(path)
    short = os.path.relpath(whole)
    return shlex.quote(min(whole, short if "/" in short else f"./{short}", key=len))


def own_command() -> str:
    """Return the command that starts this very titan in the current shell: `titan` if the PATH leads to
    it."""
    script, found = _started_from(), shutil.which("titan")
    if script is None:
        return f"{shell_path(Path(sys.executable))} -m titancli"
    return "titan" if found is not None and os.path.samefile(found, script) else shell_path(script)


def pasteable(text: str) -> str:
    """Return a text in which the commands of titan, and `pip install`, can be pasted into the shell that
    started this titan: where it is not the one on the PATH, they name the environment that it is in."""
    own = own_command()
    if own == "titan":
        return text
    text = _INSTALL.sub(lambda _: f"{shell_path(Path(sys.executable))} -m pip", text)
    return _COMMAND.sub(lambda _: own, text)
