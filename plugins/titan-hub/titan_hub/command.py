"""`titan hub push` and `titan hub card`."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import click

from titan_hub.card import card_of, recipe_file
from titan_hub.files import CARD, RECIPE, File, collect, without_local_paths
from titan_hub.push import Target, Unreachable, account, push, target_of
from titan_hub.secrets import refuse_secrets
from titan_hub.source import Source, find
from titancli.commands import note, out
from titancli.errors import ExitCode, UsageError

source_argument = click.argument("src", metavar="SRC", type=click.Path(path_type=Path))
license_option = click.option("--license", metavar="ID", help="License in the card, e.g. apache-2.0.")
base_option = click.option(
    "--base-model",
    metavar="OWNER/NAME",
    help="Repository of the base model.  [default: as the recipe says]",
)
to_option = click.option(
    "--to",
    type=click.Choice(["hf", "peft"]),
    default="hf",
    show_default=True,
    help="Of a run or a checkpoint: the whole model, with adapters merged, or the adapters alone.",
)


@click.group("hub", short_help="Push models to the Hugging Face Hub.")
def command() -> None:
    """Push models to the Hugging Face Hub, each with a model card."""


@command.command("push", short_help="Push a model and its card.")
@source_argument
@click.argument("repository", metavar="OWNER/NAME")
@to_option
@click.option("--private", is_flag=True, help="Create the repository as a private one.")
@click.option("--revision", metavar="BRANCH", default="main", show_default=True, help="Branch to push to.")
@click.option("--message", metavar="TEXT", help="Message of the commit.")
@license_option
@base_option
@click.option(
    "--include",
    metavar="PATTERN",
    multiple=True,
    help="Push further files of the folder, such as modeling.py; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be pushed, without asking the Hub.")
def push_command(
    src: Path,
    repository: str,
    to: str,
    private: bool,
    revision: str,
    message: str | None,
    license: str | None,
    base_model: str | None,
    include: tuple[str, ...],
    dry_run: bool,
) -> int:
    """Push a model to the Hugging Face Hub, as one commit, with a model card and its recipe.

    SRC is RUN (its newest good checkpoint), RUN/checkpoints/step-N, or a folder that titan
    convert-checkpoint has written, which is pushed as it is. Only files that a model's folder has by name are
    pushed: weights, configs, tokenizer, card and recipe; --include adds others. Nothing is pushed if a file
    looks as if it held credentials. Local paths are left out of the card and the recipe. A README.md in the
    folder is pushed in place of the card, and one that somebody wrote on the Hub is kept.

    The token is huggingface_hub's: hf auth login, or HF_TOKEN. Without a network the command prints what it
    would push, and exits with code 69.
    """
    target = target_of(repository, revision, private=private)
    source = find(src, to, note)
    missing: Unreachable | None = None
    if not dry_run:
        try:
            account(target)
        except Unreachable as error:
            missing = error
    with nullcontext() if source.exported else tempfile.TemporaryDirectory(prefix="titan-hub-") as own:
        folder = source.folder(Path(own) / "model" if own else None, note)
        files = _files(source, folder, target, license, base_model, include)
        _print_plan(target, files)
        if dry_run:
            return int(ExitCode.OK)
        if missing is not None:
            raise Unreachable(missing.message, hint=f"where there is a network: {_again()}")
        out(push(target, files, message or source.message, note))
    return int(ExitCode.OK)


@command.command("card", short_help="Print the model card.")
@source_argument
@to_option
@license_option
@base_option
def card_command(src: Path, to: str, license: str | None, base_model: str | None) -> int:
    """Print the model card of SRC, a run, a checkpoint or an exported folder, as titan hub push makes it."""
    source = find(src, to, note)
    out(card_of(source, license, base_model).rstrip("\n"))
    return int(ExitCode.OK)


def _files(
    source: Source,
    folder: Path,
    target: Target,
    license: str | None,
    base_model: str | None,
    include: Sequence[str],
) -> list[File]:
    """Return the files to push, in the order of their names: those of the folder, card and recipe.

    Raises:
        TitanError: the folder has no whole weights, or a file looks as if it held credentials.
    """
    files, left = collect(folder, include)
    if left:
        note(f"not pushed (--include adds a file): {', '.join(left)}")
    files = {**files, **without_local_paths(files, base_model or source.base_model, note)}
    if CARD in files:
        note(f"{folder / CARD} is pushed as it is, in place of a model card")
        if license or base_model:
            raise UsageError(
                f"--license and --base-model are for the card, but {folder / CARD} is pushed",
                hint="write them into it, or remove it",
            )
    else:
        text = card_of(source, license, base_model, name=target.name)
        files[CARD] = File(CARD, text.encode(), made=True)
    if RECIPE not in files and (recipe := recipe_file(source)) is not None:
        files[RECIPE] = File(RECIPE, recipe.encode())
    chosen = [files[name] for name in sorted(files)]
    refuse_secrets(chosen)
    return chosen


def _print_plan(target: Target, files: list[File]) -> None:
    kind = "private model" if target.private else "model"
    out(f"repository {target.repository} ({kind}), branch {target.revision}, at {target.endpoint}")
    width = max(len(f"{one.size:,}") for one in files)
    for one in files:
        out(f"  {one.size:>{width},}  {one.name}")
    out(f"{len(files)} files, {sum(one.size for one in files):,} bytes")


def _again() -> str:
    """Return this command, as it was typed."""
    import sys

    return shlex.join(["titan", *sys.argv[1:]])
