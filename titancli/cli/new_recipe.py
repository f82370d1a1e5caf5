"""`titan recipe new`: a recipe file to begin with, from another recipe or from a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from pathlib import Path

import click

from titancli.cli.completion import RecipeOrOverride
from titancli.cli.new_file import next_step, recipe_name, refuse_file, write_new
from titancli.cli.output import note
from titancli.errors import EXIT_OK, PluginError, UsageError
from titancli.recipe import find_recipe, load_recipe
from titancli.registry import current

SCHEMA_NAME = "titan.schema.json"


@click.command("new", short_help="Create a recipe file to start from.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "base",
    type=RecipeOrOverride(),
    metavar="RECIPE",
    help="Extend this recipe; the keys that it sets are listed as comments.",
)
@click.option("--full", is_flag=True, help="With --from: list every key, with its default.")
@click.option(
    "--from-hf",
    "hf",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Fine-tune the model in this Hugging Face folder.",
)
def command(file: Path, base: str | None, full: bool, hf: Path | None) -> int:
    """Create a recipe FILE to start from. An existing FILE is never overwritten."""
    if (base is None) == (hf is None):
        raise UsageError(
            "it needs exactly one of --from and --from-hf",
            hint="titan recipe new FILE --from RECIPE, or titan recipe new FILE --from-hf FOLDER",
        )
    if full and base is None:
        raise UsageError("--full needs --from")
    refuse_file(file)
    if hf is not None:
        return _finetune(file, hf)
    return _extend(file, str(base), full)


def _finetune(file: Path, folder: Path) -> int:
    from titancli.cli.finetune import finetune_text

    write_new(file, finetune_text(folder, recipe_name(file), current()))
    note(f"{file}: set dataset.paths to your text, and then the learning rate and the number of steps")
    note(next_step(file))
    return EXIT_OK


def _extend(file: Path, base: str, full: bool) -> int:
    from titancli.recipe.editor import template

    loaded = load_recipe(base)
    beside = file.parent / SCHEMA_NAME
    missing = None if beside.exists() else _schema_for(beside)
    schema = f"./{SCHEMA_NAME}" if missing or beside.exists() else None
    write_new(file, template(loaded, _reference(base, file), recipe_name(file), schema, full=full))
    if missing:
        with suppress(FileExistsError):  # another command has just written it
            write_new(beside, missing)
        note(f"{beside}: for editors; after a plugin is installed: titan recipe schema > {_path(beside)}")
    more = "" if full else "; --full lists every key"
    note(f"{file}: uncomment a key to change it{more}")
    note(f"next:  titan train {_path(file)}")
    return EXIT_OK


def _schema_for(beside: Path) -> str | None:
    """Return the text of the schema for a folder without one; None if a broken plugin prevents it."""
    from titancli.recipe.editor import recipe_schema

    try:
        return json.dumps(recipe_schema(current()), indent=2, ensure_ascii=False) + "\n"
    except PluginError as error:  # of a plugin that the recipe may not need
        note(f"there is no {beside} for editors: {error.message}")
        return None


def _reference(base: str, file: Path) -> str:
    """Return the value of `extends` in FILE: a path relative to its folder, or a plugin's recipe by name."""
    path = find_recipe(base)
    for plugin, folder in current().recipe_folders():
        if path.parent == folder and "/" not in base and not base.endswith(".toml"):
            return f"{plugin}:{path.stem}"
    relative = os.path.relpath(path.absolute(), file.absolute().parent)
    return relative if os.path.isabs(relative) or relative.startswith(".") else f"./{relative}"


def _path(file: Path) -> str:
    return shlex.quote(str(file))
