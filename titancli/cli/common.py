"""The options that stand before or after any command: `-p`, `--color`, `-v`, `-q`, `--traceback`, …

They are taken out before click sees the arguments, because `-p` decides which commands there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titancli.errors import UsageError

VERBOSITY = {"-v": 1, "--verbose": 1, "-q": -1, "--quiet": -1}


@dataclass(frozen=True)
class Common:
    """The values of the common options; a command gets them with `@click.pass_obj`."""

    plugin_files: tuple[Path, ...] = ()
    """Absolute paths."""
    blocked: tuple[str, ...] = ()
    color: str | None = None
    """`always`, `never`, or None: follow the terminal and NO_COLOR."""
    verbosity: int = 0
    """1 for each `-v`, -1 for each `-q`."""
    traceback: bool = False
    version: bool = False


def split_common(arguments: Sequence[str]) -> tuple[list[str], Common]:
    """Return the arguments without the common options, and the values of these. Words after `--` are left
    alone.

    Raises:
        UsageError: `-p` without a value, or with one that is neither `no:NAME` nor a `.py` file; `--color`
            with anything but auto, always, never.
    """
    rest: list[str] = []
    files: list[Path] = []
    blocked: list[str] = []
    flags = {"--traceback": False, "--version": False}
    color: str | None = None
    verbosity = 0
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            rest += [argument, *waiting]
        elif argument in flags:
            flags[argument] = True
        elif argument in VERBOSITY:
            verbosity += VERBOSITY[argument]
        elif argument.partition("=")[0] == "--color":
            color = _color(argument.partition("=")[2] or next(waiting, ""))
        elif argument.startswith("-p"):
            value = argument[2:] or next(waiting, "")
            if value.startswith("no:") and value != "no:":
                blocked.append(value.removeprefix("no:"))
            elif value.endswith(".py"):
                files.append(Path(value).absolute())
            else:
                raise UsageError(
                    f"-p {value}: not a valid plugin argument".replace(" :", ":"),
                    hint="-p no:NAME disables an installed plugin, -p ./FILE.py loads one from a file",
                )
        else:
            rest.append(argument)
    return rest, Common(
        tuple(files), tuple(blocked), color, verbosity, flags["--traceback"], flags["--version"]
    )


def _color(word: str) -> str | None:
    if word not in ("auto", "always", "never"):
        raise UsageError(f"--color {word}: expected auto, always or never".replace(" :", ":"))
    return None if word == "auto" else word


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into recipes and overrides `KEY=VALUE`. With a `/` before its `=` a word is a path:
    `runs/lr=3e-4`."""
    recipes: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        is_path = "/" in key and not key.startswith(("'", '"'))
        (overrides if equals and not is_path else recipes).append(argument)
    return recipes, overrides
