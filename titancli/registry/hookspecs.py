"""The hooks of a plugin. All are torch-free and run in the command, never in a worker."""

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


@hookspec
def titan_foreign_keys() -> dict[str, str]:  # type: ignore[empty-body]
    """Return keys of other trainers, in lower case with underscores, for hints to a user of one in a recipe.

    A key in a section is dotted (`job.description`). Its value is titan's key, if a value means the same
    there, or `KEY: words`. Called only after an unknown key was found.
    """


@hookspec
def titan_foreign_config(text: str) -> tuple[str, str] | None:
    """Return the name of the trainer that a file is a config of, and the command that converts it, such as
    `recipe from-axolotl`; None for any other file. Called only if the file is not a recipe."""


class SPECS:
    """The hooks alone: pluggy looks at each name of what it is given, for each plugin once more."""

    titan_components = staticmethod(titan_components)
    titan_recipes = staticmethod(titan_recipes)
    titan_commands = staticmethod(titan_commands)
    titan_checks = staticmethod(titan_checks)
    titan_foreign_keys = staticmethod(titan_foreign_keys)
    titan_foreign_config = staticmethod(titan_foreign_config)


__all__ = ["SPECS", "hookimpl", "hookspec"]
