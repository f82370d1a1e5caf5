"""`titan plugin new`: create a plugin."""

from __future__ import annotations

from pathlib import Path

import click

from titancli.commands import note
from titancli.registry.kinds import KINDS


@click.command("new", short_help="Create the package of a new plugin.")
@click.argument("name")
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(list(KINDS)),
    required=True,
    multiple=True,
    help="Kind of component that it provides; may be repeated.",
)
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), metavar="DIR", help="Output folder.  [default: NAME]"
)
def command(name: str, kinds: tuple[str, ...], folder: Path | None) -> None:
    """Create the package of a new plugin: a working component of each kind, and its tests.

    NAME names both the package and the plugin, for example titan-lab.
    """
    from titan_testing.scaffold import new_plugin

    folder = folder or Path(name)
    for file in new_plugin(name, kinds, folder):
        print(file)
    note(f"next: pip install -e {folder} && pytest {folder}")
