"""Offers a command of titan's own name."""

from titancli import hookimpl


@hookimpl
def titan_commands():
    import click

    return [click.Command("train", callback=lambda: print("shadowed"))]
