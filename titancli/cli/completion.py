"""Shell completion of recipes, overrides, runs, KIND/NAME and plugins. Enable it with click's own line:

    eval "$(_TITAN_COMPLETE=bash_source titan)"

Errors are never printed here: they would appear in the middle of the line that is being typed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from titancli.errors import TitanError


class RecipeOrOverride(click.ParamType):
    """A RECIPE, or several, followed by KEY=VALUE."""

    name = "recipe"

    def __init__(self, recipes: int = 1) -> None:
        self.recipes = recipes

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        given = [str(word) for word in ctx.params.get(param.name or "") or ()]
        try:
            return _recipe(incomplete) if len(given) < self.recipes else _override(given, incomplete)
        except TitanError:
            return []


class RunName(click.Path):
    """RUN, the folder of a run: completed from the runs folder, and as any path."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from titancli.cli.output import short_path
        from titancli.runs import RunFolder, runs_root

        try:
            found = [short_path(path) for path in sorted(runs_root().iterdir()) if RunFolder.is_run(path)]
        except OSError:
            found = []
        return _beginning(incomplete, found) or [CompletionItem(incomplete, type="dir")]


class ComponentName(click.ParamType):
    """KIND/NAME."""

    name = "component"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from titancli.registry import current
        from titancli.registry.component import component_info
        from titancli.registry.fields import summary

        found = []
        for full, config in current().components():
            label = f"{component_info(config).kind}/{full.rpartition('/')[2]}"
            if incomplete in ("", label[: len(incomplete)]):
                found.append(CompletionItem(label, help=summary(config)))
        return found


class PluginName(click.ParamType):
    """The name of a plugin."""

    name = "plugin"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from titancli.registry import current

        return _beginning(incomplete, (plugin.name for plugin in current().plugins))


def _recipe(incomplete: str) -> list[CompletionItem]:
    """Complete names of recipes; files are completed by the shell itself."""
    from titancli.registry import current
    from titancli.registry.kinds import BUILTIN

    folders = current().recipe_folders()
    names = [
        file.stem if plugin == BUILTIN else f"{plugin}:{file.stem}"
        for plugin, folder in folders
        for file in sorted(folder.rglob("*.toml"))
    ]
    return [*_beginning(incomplete, names), CompletionItem(incomplete, type="file")]


def _override(given: list[str], incomplete: str) -> list[CompletionItem]:
    from titancli.recipe import load_recipe
    from titancli.recipe.json_schema import override_keys
    from titancli.registry import current

    recipe, *overrides = given
    try:
        data: dict[str, Any] = load_recipe(recipe, [word for word in overrides if "=" in word]).data
    except TitanError:  # half of a line need not be right
        data = {}
    keys = override_keys(data, current())
    if given[-1] == "=" and len(given) > 1:  # bash makes three words of KEY=VALUE
        return _beginning(incomplete, keys.get(given[-2], []))
    key, equals, value = incomplete.partition("=")
    if equals:
        return [CompletionItem(f"{key}={choice}") for choice in keys.get(key, []) if choice.startswith(value)]
    return _beginning(incomplete, (f"{key}=" for key in keys))


def _beginning(incomplete: str, words: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]
