"""The command `titan` itself: which commands there are, each imported only when it is used."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, NoReturn

import click

from titancli import registry
from titancli.cli.common import split_common
from titancli.cli.output import note
from titancli.errors import PluginError, nearest_name
from titancli.registry.command import Command


class Entry(NamedTuple):
    """A built-in command; its help stands here so that listing it imports nothing."""

    section: str
    name: str
    module: str
    help: str


COMMANDS = [
    Entry("Run", "train", "train", "Train a model from a recipe, or resume a run."),
    Entry("Run", "launch", "launch", "Train as a job of a cluster: submit, follow, cancel."),
    Entry("Run", "generate", "generate", "Generate text with a trained model."),
    Entry("Run", "plan", "plan", "Estimate memory, traffic and speed on N devices."),
    Entry("Run", "convert-checkpoint", "convert", "Convert a checkpoint to a Hugging Face folder, or back."),
    Entry("Runs", "runs", "runs", "List, show, watch, compare and remove runs."),
    Entry("Runs", "profile", "profile", "Record traces of the next steps of a running run."),
    Entry("Runs", "sweep", "sweep", "Train every combination of some values."),
    Entry("Runs", "report", "run_report", "Write a report of runs as one HTML page."),
    Entry("Runs", "eval", "evaluate", "Evaluate a trained model: loss, perplexity, bits per byte."),
    Entry("Runs", "reproduce", "reproduce", "Run a recorded run again and compare the numbers."),
    Entry("Runs", "checkpoint", "checkpoint", "List, show and verify checkpoints."),
    Entry("Runs", "rollouts", "rollouts", "Show the rollouts of a run, with rewards and advantages."),
    Entry("Proof", "prove", "prove", "Prove that every layout computes what one process does."),
    Entry("Proof", "replay", "replay", "Repeat a step of a run and look at it from inside."),
    Entry("Proof", "bisect", "bisect", "Find where two runs that should agree part."),
    Entry("Recipes", "validate", "validate", "Check recipes without running them."),
    Entry("Recipes", "config", "config", "Print a recipe with all defaults filled in."),
    Entry("Recipes", "list-recipes", "recipes", "List the bundled recipes and those of plugins."),
    Entry("Recipes", "new-recipe", "new_recipe", "Create a recipe file to start from."),
    Entry("Recipes", "download", "download", "Download the tokenizer and weights of a recipe."),
    Entry("Recipes", "tokenize", "tokenize", "Tokenize text into shards for training."),
    Entry("Recipes", "data", "data", "Show and verify token shards."),
    Entry("Recipes", "schema", "schema", "Print the JSON Schema of recipes, for editors."),
    Entry("Plugins", "list-components", "components", "List the components that a recipe can use."),
    Entry("Plugins", "show", "show", "Show the fields of a component or section."),
    Entry("Plugins", "plugins", "plugins", "List the plugins and their status, or show one."),
    Entry("Plugins", "doctor", "doctor", "Check the installation, the machine and the plugins."),
    Entry("Plugins", "new-plugin", "new_plugin", "Create the package of a new plugin."),
]
BUILTIN = {entry.name: entry for entry in COMMANDS}
FROM_PLUGINS = "From plugins"


class Titan(click.Group):
    """Finds built-in commands by the table above, all others through the plugins' `titan_commands`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Complete without the common options, which a shell leaves in, but with the plugins they add."""
        if not extra.get("resilient_parsing"):
            return super().make_context(info_name, args, parent, **extra)
        if args[-1:] == ["-p"]:  # what follows is a file
            file = click.Command("-p", params=[click.Argument(["file"], type=click.Path())])
            return file.make_context(info_name, [], parent, **extra)
        rest, common = split_common(args)
        registry.configure(files=common.plugin_files, blocked=common.blocked)
        return super().make_context(info_name, rest, parent, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*BUILTIN, *sorted(_from_plugins())]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in BUILTIN:
            return importlib.import_module(f"titancli.cli.{BUILTIN[name].module}").command
        offers = _from_plugins().get(name, [])
        if len(offers) > 1:
            plugins = [plugin for plugin, _ in offers]
            raise PluginError(
                f"the command {name!r} is provided by more than one plugin: {', '.join(plugins)}",
                hint=f"disable one of them: -p no:{plugins[-1]}",
            )
        return _load(*offers[0]) if offers else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            self._unknown(ctx, name)
        return super().resolve_command(ctx, args)

    def _unknown(self, ctx: click.Context, name: str) -> NoReturn:
        near = nearest_name(name, self.list_commands(ctx))
        message = f"unknown command {name!r}." + (f" Did you mean {near!r}?" if near else "")
        if broken := _broken():
            message += f" (A broken plugin may provide it: {', '.join(broken)}; see `titan plugins`.)"
        raise click.UsageError(message, ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for entry in COMMANDS:
            sections.setdefault(entry.section, []).append((entry.name, entry.help))
        for name, offers in sorted(_from_plugins().items()):
            plugins = ", ".join(plugin for plugin, _ in offers)
            told = f"{_help(offers[0][1])} ({plugins})".strip()
            sections.setdefault(FROM_PLUGINS, []).append((name, told))
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), told) for name, told in rows])


def _help(command: Command | click.Command) -> str:
    return command.help if isinstance(command, Command) else command.get_short_help_str(limit=60)


def _load(plugin: str, command: Command | click.Command) -> click.Command:
    """The click command.

    Raises:
        PluginError: the code that a plugin names cannot be imported, or is no click command.
    """
    if isinstance(command, click.Command):
        return command
    from titancli.registry.component import load_target
    from titancli.registry.plugins import own_traceback

    try:
        loaded = load_target(command.target)
    except PluginError as error:
        trace = own_traceback(error.__cause__ or error)
        raise PluginError(f"the command {command.name!r} of plugin {plugin!r} is broken:\n{trace}") from error
    if isinstance(loaded, click.Command):
        return loaded
    raise PluginError(
        f"the command {command.name!r} of plugin {plugin!r} is {loaded!r}, which is not a click command",
        hint="this is a bug in the plugin",
    )


def _from_plugins() -> dict[str, list[tuple[str, Command | click.Command]]]:
    """Commands by name, each with the plugins that offer it."""
    from titancli.registry import current

    offers: dict[str, list[tuple[str, Command | click.Command]]] = {}
    for plugin, command in current().commands(BUILTIN):
        offers.setdefault(str(command.name), []).append((plugin, command))
    return offers


def _broken() -> list[str]:
    from titancli.registry import current

    return [plugin.name for plugin in current().plugins if plugin.state == "broken"]


def note_broken() -> None:
    """Say which plugins are missing from a list because they are broken."""
    if names := _broken():
        note(f"note: broken plugins (see `titan plugins NAME`): {', '.join(names)}")


@click.group(
    cls=Titan,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train language models from a recipe: one TOML file.",
    epilog="RECIPE is a file, a run folder, or a name that list-recipes shows. "
    "KEY=VALUE overrides one of its values, for example training.steps=20. "
    "-p, --color, -v, -q, --traceback and --version work before or after the command.",
    params=[
        # Taken out before click parses (see titancli.cli.common); they stand here to be shown.
        click.Option(
            ["-p", "plugin"],
            metavar="FILE.py | no:NAME",
            multiple=True,
            help="Load a plugin from a file, or disable one.",
            expose_value=False,
        ),
        click.Option(
            ["--color"],
            type=click.Choice(["auto", "always", "never"]),
            help="When to use colors.  [default: auto]",
            expose_value=False,
        ),
        click.Option(["-v", "--verbose"], is_flag=True, help="Print debug messages.", expose_value=False),
        click.Option(["-q", "--quiet"], is_flag=True, help="Print errors only.", expose_value=False),
        click.Option(
            ["--traceback"], is_flag=True, help="Print the traceback of an error.", expose_value=False
        ),
        click.Option(["--version"], is_flag=True, help="Print the version and exit.", expose_value=False),
    ],
)
def titan() -> None:
    """The click group."""
