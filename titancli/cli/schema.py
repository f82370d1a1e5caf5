"""`titan recipe schema`: the JSON Schema of recipes, for editors."""

from __future__ import annotations

import json

import click

from titancli.cli.group import note_broken
from titancli.registry import current


@click.command("schema", short_help="Print the JSON Schema of recipes, for editors.")
def command() -> None:
    """Print the JSON Schema (2020-12) of recipes, including the components of installed plugins.

    \b
    titan recipe schema > titan.schema.json

    Editors with Taplo or Even Better TOML then complete and check any recipe whose first line is
    `#:schema ./titan.schema.json`. Regenerate the file after installing a plugin.
    """
    from titancli.recipe.json_schema import recipe_schema

    print(json.dumps(recipe_schema(current()), indent=2, ensure_ascii=False))
    note_broken()
