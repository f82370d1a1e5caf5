"""The four hooks of a plugin. All are torch-free and run in the command, never in a worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click

    from titancli.registry.command import Command

hookspec = pluggy.HookspecMarker("titancli")
hookimpl = pluggy.HookimplMarker("titancli")


@hookspec
def titan_components() -> list[type]:  # type: ignore[empty-body]
    """Return the component classes (made by `@component`) that this plugin provides."""


@hookspec
def titan_recipes() -> Path:  # type: ignore[empty-body]
    """Return a folder of `*.toml` recipes, named by their stems: `plugin:name`."""


@hookspec
def titan_commands() -> list[Command | click.Command]:  # type: ignore[empty-body]
    """Return commands for `titan`; a `titancli.Command` names a click command, imported when it runs."""


@hookspec
def titan_checks(recipe: Any) -> list[tuple[str, str]]:  # type: ignore[empty-body]
    """Return the problems of a bound `titancli.Recipe` as a whole: `(dotted key, message)` pairs."""


class SPECS:
    """The hooks alone: pluggy looks at each name of what it is given, for each plugin once more."""

    titan_components = staticmethod(titan_components)
    titan_recipes = staticmethod(titan_recipes)
    titan_commands = staticmethod(titan_commands)
    titan_checks = staticmethod(titan_checks)


__all__ = ["SPECS", "hookimpl", "hookspec"]
