"""`titan download`: the tokenizer, and weights, that a recipe reads, from the Hugging Face Hub."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from titancli.cli.completion import RecipeOrOverride
from titancli.cli.output import note
from titancli.errors import EXIT_OK, UsageError


@click.command("download", short_help="Download the tokenizer and weights of a recipe.")
@click.argument("source", metavar="RECIPE|REPO", type=RecipeOrOverride())
@click.option("--weights", is_flag=True, help="Also download the weights.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit.  [default: main]")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Output folder.  [default: where RECIPE reads it, or assets/NAME]",
)
def command(source: str, weights: bool, revision: str | None, folder: Path | None) -> int:
    """Download the tokenizer and config of a model from the Hugging Face Hub.

    A RECIPE names its repository in `assets`; the files go where it reads them, with the weights if it starts
    from them. A REPO is OWNER/NAME. Interrupted downloads continue; tokens and mirrors are set as for
    huggingface_hub (hf auth login, HF_TOKEN, HF_ENDPOINT).
    """
    from titancli.data.hub import download
    from titancli.recipe.assets import REPOSITORY, Assets, assets_of
    from titancli.recipe.load import read_tree

    if REPOSITORY.match(source) and not source.endswith(".toml") and not Path(source).exists():
        assets = Assets(source, Path("assets", source.partition("/")[2]), weights)
    else:
        found = assets_of(read_tree(source))
        if found is None:
            raise UsageError(
                f"{source} names no repository of its tokenizer and weights",
                hint='titan download OWNER/NAME --dir DIR, or write assets = "OWNER/NAME" in the recipe',
            )
        assets = found
    folder = folder or assets.folder
    for path in download(assets.repository, folder, weights=weights or assets.weights, revision=revision):
        print(path)
    note(f"downloaded {assets.repository} into {shlex.quote(str(folder))}")
    return EXIT_OK
