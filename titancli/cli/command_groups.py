"""Groups of commands (`titan recipe new`).

Only names and help stand here: a command is imported when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import click

from titancli.cli.plugin_commands import offered, offers, short_help
from titancli.errors import nearest_name


class Place(NamedTuple):
    """The module of a command; its help is kept here so that listing it imports nothing."""

    help: str
    module: str
    attribute: str = "command"

    def load(self) -> click.Command:
        command: click.Command = getattr(
            importlib.import_module(f"titancli.cli.{self.module}"), self.attribute
        )
        return command


class Lazy(click.Group):
    """A group that imports only the command that is used. Plugins may add to it: `group name`."""

    def __init__(self, *args: Any, places: Mapping[str, Place], **options: Any) -> None:
        super().__init__(*args, **options)
        self.places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.places, *self._added()]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return self.places[name].load() if name in self.places else offered(f"{self.name} {name}")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            self.unknown(ctx, name, rest=args[1:])
        return super().resolve_command(ctx, args)

    def unknown(self, ctx: click.Context, name: str, more: str = "", *, rest: Sequence[str] = ()) -> NoReturn:
        """Refuse a command that does not exist, with the one that was probably meant.

        Raises:
            UsageError: always.
        """
        near = nearest_name(name, self.list_commands(ctx))
        message = f"unknown command {name!r}." + (f" Did you mean {near!r}?" if near else "")
        raise click.UsageError(message + more, ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, place.help) for name, place in self.places.items()]
        with formatter.section("Commands"):
            formatter.write_dl([*rows, *self._added().items()])

    def _added(self) -> dict[str, str]:
        """Return the commands that plugins add, with their help."""
        begin = f"{self.name} "
        return {
            name.removeprefix(begin): short_help(found[0][1])
            for name, found in sorted(offers().items())
            if name.startswith(begin) and name.removeprefix(begin) not in self.places
        }


recipe = Lazy(
    "recipe",
    help="List, write, show and compare recipes; `titan validate` checks them.",
    places={
        "list": Place("List the bundled recipes and those of plugins.", "recipes"),
        "new": Place("Create a recipe file to start from.", "new_recipe"),
        "show": Place("Print a recipe with all defaults filled in.", "config"),
        "diff": Place("Print what differs between two recipes or runs.", "config", "diff"),
        "extend": Place("Show ways to continue a run beyond its end.", "extend"),
        "schema": Place("Print the JSON Schema of recipes, for editors.", "schema"),
    },
)
data = Lazy(
    "data",
    help="Tokenize text into shards for training; show and verify them.",
    places={
        "tokenize": Place("Tokenize text into shards for training.", "tokenize"),
        "show": Place("Show token shards, or rows as a model sees them.", "data", "show"),
        "verify": Place(
            "Read every byte of token shards, or of the data of a run or recipe.", "data", "verify"
        ),
    },
)
plugin = Lazy(
    "plugin",
    help="List, show and write plugins.",
    places={
        "list": Place("List the plugins and their status.", "plugins", "list_"),
        "show": Place("Show one plugin: its components, its status and its error.", "plugins", "show"),
    },
)
checkpoint = Lazy(
    "checkpoint",
    help="""List, show and verify checkpoints, on disk or by URL (`s3://…`).

    These neither import torch nor change any file. `titan convert-checkpoint` converts one.
    """,
    places={
        "list": Place("List the checkpoints of a run.", "checkpoint", "list_"),
        "show": Place("Show the contents of a checkpoint.", "checkpoint", "show"),
        "verify": Place("Verify every checksum of checkpoints.", "checkpoint", "verify"),
    },
)

GROUPED = frozenset(
    f"{group.name} {name}" for group in (recipe, data, plugin, checkpoint) for name in group.places
)
