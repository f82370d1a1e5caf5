"""`titan list-components`: what a recipe can name."""

from __future__ import annotations

import click

from titancli.cli.group import note_broken
from titancli.cli.output import print_json, table
from titancli.registry import current
from titancli.registry.component import component_info
from titancli.registry.fields import summary
from titancli.registry.kinds import KINDS


@click.command("list-components", short_help="List the components that a recipe can use.")
@click.argument("kind", required=False, metavar="[KIND]", type=click.Choice(list(KINDS)))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(kind: str | None, as_json: bool) -> None:
    """List the components that a recipe can use: kind, full name and summary.

    The part of a name after the slash is sufficient if only one plugin provides it.
    """
    rows = [(component_info(c).kind, name, summary(c)) for name, c in current().components(kind)]
    if as_json:
        named = [dict(zip(("kind", "name", "summary"), row, strict=True)) for row in rows]
        print_json("components", {"components": named})
    else:
        table(("kind", "name", "summary"), rows)
    note_broken()
