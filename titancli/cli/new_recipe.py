"""`titan recipe new`: a recipe file to begin with, from another recipe or from a torchtitan job config."""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

import click

from titancli.cli.completion import RecipeOrOverride
from titancli.cli.failures import print_error
from titancli.cli.output import note
from titancli.errors import EXIT_OK, EnvironmentProblem, PluginError, TitanError, UsageError
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
@click.option(
    "--from-torchtitan",
    "job",
    type=click.Path(path_type=Path),
    metavar="JOB.toml",
    help="Convert a job config of torchtitan 0.2.2 or earlier.",
)
def command(file: Path, base: str | None, full: bool, hf: Path | None, job: Path | None) -> int:
    """Create a recipe FILE to start from. An existing FILE is never overwritten.

    --from-torchtitan reports every field that could not be converted, with its line and the reason, and
    appends the same report to FILE.
    """
    if [base, hf, job].count(None) != 2:
        raise UsageError(
            "it needs exactly one of --from, --from-hf and --from-torchtitan",
            hint="titan recipe new FILE --from RECIPE, or titan recipe new FILE --from-hf FOLDER",
        )
    if full and base is None:
        raise UsageError("--full needs --from")
    if file.suffix != ".toml":
        raise UsageError(f"{file}: the file name of a recipe must end in .toml")
    if file.exists():
        raise UsageError(f"{file} exists", hint="give another name, or remove it")
    if not file.absolute().parent.is_dir():
        raise EnvironmentProblem(
            f"folder {file.parent} does not exist", hint=f"mkdir -p {_path(file.parent)}"
        )
    if job is not None:
        return _translate(file, job)
    if hf is not None:
        return _finetune(file, hf)
    return _extend(file, str(base), full)


def _finetune(file: Path, folder: Path) -> int:
    from titancli.recipe.finetune import finetune_text

    _write(file, finetune_text(folder, _name(file), current()))
    note(f"{file}: set dataset.paths to your text, and then the learning rate and the number of steps")
    note(f"next:  titan train {_path(file)} --dry-run")
    return EXIT_OK


def _extend(file: Path, base: str, full: bool) -> int:
    from titancli.recipe.editor import template

    loaded = load_recipe(base)
    beside = file.parent / SCHEMA_NAME
    missing = None if beside.exists() else _schema_for(beside)
    schema = f"./{SCHEMA_NAME}" if missing or beside.exists() else None
    _write(file, template(loaded, _reference(base, file), _name(file), schema, full=full))
    if missing:
        with suppress(FileExistsError):  # another command has just written it
            _write(beside, missing)
        note(f"{beside}: for editors; after a plugin is installed: titan recipe schema > {_path(beside)}")
    more = "" if full else "; --full lists every key"
    note(f"{file}: uncomment a key to change it{more}")
    note(f"next:  titan train {_path(file)}")
    return EXIT_OK


def _schema_for(beside: Path) -> str | None:
    """Return the text of the schema for a folder that has none; None where a plugin leaves none to be had."""
    from titancli.recipe.editor import recipe_schema

    try:
        return json.dumps(recipe_schema(current()), indent=2, ensure_ascii=False) + "\n"
    except PluginError as error:  # of a plugin that the recipe may not need
        note(f"there is no {beside} for editors: {error.message}")
        return None


def _translate(file: Path, job: Path) -> int:
    from titancli.migrate import translate

    found = translate(job, _name(file), current())
    _write(file, found.text)
    for line in found.lines(str(job)):
        print(line)
    lost = [remark for remark in found.lost if remark.line is not None]
    note(f"{file}: {len(found.moved)} fields carried over, {len(lost)} not")
    try:
        load_recipe(file)
    except TitanError as error:
        note(f"{file} is not valid yet:")
        return print_error(error)
    note(f"next:  titan train {_path(file)} --dry-run")
    return EXIT_OK


def _reference(base: str, file: Path) -> str:
    """What FILE writes in `extends`: a path from its own folder, or a name with its plugin."""
    path = find_recipe(base)
    for plugin, folder in current().recipe_folders():
        if path.parent == folder and "/" not in base and not base.endswith(".toml"):
            return f"{plugin}:{path.stem}"
    relative = os.path.relpath(path.absolute(), file.absolute().parent)
    return relative if os.path.isabs(relative) or relative.startswith(".") else f"./{relative}"


def _name(file: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem).strip("-._") or "run"


def _path(file: Path) -> str:
    return shlex.quote(str(file))


def _write(file: Path, text: str) -> None:
    with file.open("x", encoding="utf-8") as opened:
        opened.write(text)
