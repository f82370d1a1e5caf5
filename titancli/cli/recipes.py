"""`titan recipe list`: the recipes that can be used by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from titancli.cli.group import note_broken
from titancli.cli.output import print_json, table
from titancli.registry import current
from titancli.registry.kinds import BUILTIN


@click.command("list", short_help="List the bundled recipes and those of plugins.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> None:
    """List the bundled recipes, used by NAME, and those of plugins, used by PLUGIN:NAME."""
    recipes = [
        _recipe(plugin, file)
        for plugin, folder in current().recipe_folders()
        for file in sorted(folder.rglob("*.toml"), key=lambda file: file.stem)
    ]
    recipes.sort(key=lambda recipe: recipe["plugin"] != BUILTIN)  # titan's own first
    if as_json:
        print_json("recipes", {"recipes": recipes})
    else:
        table(
            ("recipe", "description", "plugin"), [(r["name"], r["description"], r["plugin"]) for r in recipes]
        )
    note_broken()


def _recipe(plugin: str, file: Path) -> dict[str, Any]:
    name = file.stem if plugin == BUILTIN else f"{plugin}:{file.stem}"
    return {"name": name, "description": _description(file), "plugin": plugin, "path": str(file)}


def _description(file: Path) -> str:
    """Return the description in the file itself; a base that it extends is not read."""
    import tomli

    try:
        described = tomli.loads(file.read_text(encoding="utf-8-sig")).get("description", "")
    except (OSError, ValueError) as error:
        return f"(cannot be read: {error})"
    return str(described)
