"""`titan new-plugin`: begin a plugin."""

from __future__ import annotations

from pathlib import Path

import click

from titancli.cli.output import note
from titancli.registry.kinds import KINDS


@click.command("new-plugin", short_help="Create the package of a new plugin.")
@click.argument("name")
@click.option(
    "--kind", type=click.Choice(list(KINDS)), required=True, help="Kind of component that it provides."
)
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), metavar="DIR", help="Output folder.  [default: NAME]"
)
def command(name: str, kind: str, folder: Path | None) -> None:
    """Create the package of a new plugin: a working component and its tests.

    NAME names both the package and the plugin, for example titan-lab. Kinds that are rarely implemented have
    no template; for these, the interface that the component must implement is printed instead.
    """
    from titancli.testing.protocols import told
    from titancli.testing.scaffold import KINDS_WITH_TEMPLATE, new_plugin

    if kind not in KINDS_WITH_TEMPLATE:
        print(told(kind))
        note(
            f"\nthere is no template for a {kind}; this is the protocol that it must implement "
            f"(titancli.protocols)"
        )
        return
    folder = folder or Path(name)
    for file in new_plugin(name, kind, folder):
        print(file)
    note(f"next: pip install -e {folder} && pytest {folder}")
