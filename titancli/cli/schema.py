"""`titan schema`: the JSON Schema of recipes, for editors."""

from __future__ import annotations

import json

import click

from titancli.cli.group import note_broken
from titancli.registry import current


@click.command("schema", short_help="Print the JSON Schema of recipes, for editors.")
def command() -> None:
    """Print the JSON Schema (2020-12) of recipes, with everything that the installed plugins offer.

    \b
    titan schema > titan.schema.json

    A recipe whose first line is `#:schema ./titan.schema.json` is then completed and checked by editors that
    know Taplo or Even Better TOML. Write the file anew after installing a plugin.
    """
    from titancli.recipe.editor import recipe_schema

    print(json.dumps(recipe_schema(current()), indent=2, ensure_ascii=False))
    note_broken()
