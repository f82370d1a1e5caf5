"""The options that stand before or after any command: `-p`, `--traceback`, `--version`.

They are taken out before click sees the arguments, because `-p` decides which commands there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titancli.errors import UsageError


@dataclass(frozen=True)
class Common:
    """What they said; a command gets it with `@click.pass_obj`."""

    plugin_files: tuple[Path, ...] = ()
    """Absolute."""
    blocked: tuple[str, ...] = ()
    traceback: bool = False
    version: bool = False


def split_common(arguments: Sequence[str]) -> tuple[list[str], Common]:
    """The arguments without the common options, and what these say. Nothing after `--` is one of them.

    Raises:
        UsageError: `-p` without a value, or with one that is neither `no:NAME` nor a `.py` file.
    """
    rest: list[str] = []
    files: list[Path] = []
    blocked: list[str] = []
    flags = {"--traceback": False, "--version": False}
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            rest += [argument, *waiting]
        elif argument in flags:
            flags[argument] = True
        elif argument.startswith("-p"):
            value = argument[2:] or next(waiting, "")
            if value.startswith("no:") and value != "no:":
                blocked.append(value.removeprefix("no:"))
            elif value.endswith(".py"):
                files.append(Path(value).absolute())
            else:
                raise UsageError(
                    f"-p {value}: not a plugin".replace(" :", ":"),
                    hint="-p no:NAME leaves an installed plugin out, -p ./FILE.py adds one",
                )
        else:
            rest.append(argument)
    return rest, Common(tuple(files), tuple(blocked), flags["--traceback"], flags["--version"])


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipes, and overrides `KEY=VALUE`. A `/` before the `=` makes a path of it: `runs/lr=3e-4`."""
    recipes: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        is_path = "/" in key and not key.startswith(("'", '"'))
        (overrides if equals and not is_path else recipes).append(argument)
    return recipes, overrides
