"""The command `titan` itself: its commands, each imported only when it is used."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

import click

from titancli import registry
from titancli.cli.command_groups import GROUPED, Lazy, Place
from titancli.cli.common import split_common
from titancli.cli.output import note
from titancli.cli.plugin_commands import offered, offers, own_commands, short_help
from titancli.errors import UsageError


class Row(NamedTuple):
    """A line of `titan --help`: commands with their modules, and one help text."""

    section: str
    modules: dict[str, str | None]
    """The module is None for a command of one of titan's own plugins, which is shown only if that is
    installed."""
    help: str
    """One text; if a plugin brings one of the commands, one for each command, separated by semicolons."""

    def shown(self, installed: Collection[str]) -> tuple[str, str, str] | None:
        """Return section, names and help if these plugins' commands are installed; names are empty if none
        is."""
        names = [name for name, module in self.modules.items() if module is not None or name in installed]
        if len(names) == len(self.modules):
            return self.section, ", ".join(names), self.help
        texts = dict(zip(self.modules, self.help.split("; "), strict=True))
        return (self.section, ", ".join(names), "; ".join(texts[name] for name in names)) if names else None


HERE = "command_groups"
ROWS = [
    Row("Train", {"train": "train"}, "Train a model from a recipe, or resume a run"),
    Row("Train", {"generate": "generate", "plan": "plan"}, "Generate text; estimate memory and speed"),
    Row("Train", {"eval": "evaluate", "lm-eval": None}, "Measure loss, perplexity; run benchmarks"),
    Row("Train", {"sweep": None, "launch": None}, "Train all combinations; as jobs of a cluster"),
    Row("Look", {"runs": "runs", "report": None}, "List, watch, compare, remove runs; as a page"),
    Row("Look", {"profile": "profile", "rollouts": None}, "Trace steps; samples and rewards"),
    Row("Look", {"checkpoint": HERE, "hub": None}, "List, show, verify checkpoints; push models"),
    Row("Look", {"convert-checkpoint": "convert"}, "Write a Hugging Face folder, or read one"),
    Row("Prove", {"prove": None, "reproduce": None}, "Prove that layouts agree; that a run repeats"),
    Row("Prove", {"replay": None, "bisect": None}, "A step in detail; where two runs diverge"),
    Row("Recipes", {"recipe": HERE, "validate": "validate"}, "List, new, show, diff, extend, schema; check"),
    Row("Recipes", {"data": HERE, "download": "download"}, "Token shards; a recipe's tokenizer, weights"),
    Row("Recipes", {"flux-encode": None}, "Encode images and texts to shards of latents"),
    Row("Plugins", {"plugin": HERE, "doctor": "doctor"}, "List, show, new; check the installation"),
    Row(
        "Plugins",
        {"list-components": "components", "show": "show"},
        "What recipes can name; its fields",
    ),
]
PLACES = {
    name: Place(row.help, module, name if module == HERE else "command")
    for row in ROWS
    for name, module in row.modules.items()
    if module is not None
}
RESERVED = frozenset(PLACES) | GROUPED
"""Names that no plugin can take."""
FROM_PLUGINS = "Plugins'"
BEGIN = (
    ("titan train llama3_debug", "train a small model"),
    ("titan recipe new my.toml --from llama3_debug", "begin a recipe"),
    ("titan doctor", "check this machine"),
)


class Titan(Lazy):
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
        return [*self.places, *sorted(name for name in offers(RESERVED) if " " not in name)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return self.places[name].load() if name in self.places else offered(name, RESERVED)

    def unknown(self, ctx: click.Context, name: str, more: str = "", *, rest: Sequence[str] = ()) -> NoReturn:
        from titancli.cli.override_hints import command_hint

        if hint := command_hint(name, rest):
            raise UsageError(f"unknown command {name!r}", hint=f"in titan: {hint}")
        if broken := _broken():
            more = f" (A broken plugin may provide it: {', '.join(broken)}; see `titan plugin list`.)"
        super().unknown(ctx, name, more)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one screen: click would give each command and each option a line."""
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...")
        formatter.write(f"{self.help} To begin with:\n")
        formatter.write_dl([(f"  {line}", text) for line, text in BEGIN], col_max=60)
        formatter.write("\n")
        others = {name: found for name, found in offers(RESERVED, own=False).items() if " " not in name}
        own = own_commands()
        rows = [shown for row in ROWS if (shown := row.shown(own))]
        for name in sorted(others):
            plugins = ", ".join(plugin for plugin, _ in others[name])
            rows.append((FROM_PLUGINS, name, f"{short_help(others[name][0][1])} ({plugins})".strip()))
        rows += [
            ("Options", "-p FILE.py|no:NAME", "Load a plugin from a file, or disable one"),
            ("", "-v, -q, --traceback", "Say more; less; where an error was raised"),
            ("", "--color, --version", "Before or after a command, as --help is"),
        ]
        above = ""
        lines = []
        for section, names, text in rows:
            lines.append((f"{'' if section == above else section:<9}{names}", text))
            above = section
        formatter.write_dl(lines, col_max=60)


def _broken() -> list[str]:
    from titancli.registry import current

    return current().broken


def note_broken() -> None:
    """Print a note that names broken plugins, whose entries a list lacks."""
    if names := _broken():
        note(f"note: broken plugins (see `titan plugin show NAME`): {', '.join(names)}")


@click.group(
    cls=Titan,
    context_settings={"help_option_names": ["-h", "--help"]},
    places=PLACES,
    help="Train language models from a recipe: one TOML file.",
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
    """Run the click group of all commands."""
