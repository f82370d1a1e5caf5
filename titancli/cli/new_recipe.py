"""`titan recipe new`: a recipe file to begin with, from another recipe or from a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import cast

import click

from titancli.cli.completion import RecipeOrOverride
from titancli.cli.finetune_data import Kind, Task, task_of
from titancli.cli.new_file import next_step, recipe_name, refuse_file, write_new
from titancli.cli.output import note
from titancli.errors import EXIT_OK, PluginError, UsageError
from titancli.observe.peaks import DEVICES
from titancli.recipe import find_recipe, load_recipe
from titancli.registry import current

SCHEMA_NAME = "titan.schema.json"
GPUS = sorted(DEVICES.keys() - {"cpu"})
GPU = "Find the largest batch that fits this GPU, by titan plan.  [default: the one here]"


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
@click.option("--pretrain", metavar="DATA", help="With --from-hf: go on training on text. [default]")
@click.option("--sft", metavar="DATA", help="With --from-hf: learn the answers of conversations.")
@click.option("--dpo", metavar="DATA", help="With --from-hf: learn preferences from pairs.")
@click.option("--grpo", metavar="DATA", help="With --from-hf: learn from rewards for answers to prompts.")
@click.option(
    "--lora",
    metavar="[DATA]",
    is_flag=False,
    flag_value="",
    help="With one of these: train adapters (LoRA). Alone, with DATA: --sft DATA.",
)
@click.option(
    "--qlora",
    metavar="[DATA]",
    is_flag=False,
    flag_value="",
    help="The same, on a base in 4 bits (QLoRA, of the plugin titan-qlora).",
)
@click.option(
    "--gpu",
    type=click.Choice(GPUS, case_sensitive=False),
    metavar=f"[{'|'.join(GPUS)}]",
    help=GPU,
)
@click.option(
    "--world-size",
    metavar="N",
    type=click.IntRange(min=1),
    help="Number of GPUs.  [default: those here, or 1]",
)
def command(
    file: Path,
    base: str | None,
    full: bool,
    hf: Path | None,
    lora: str | None,
    qlora: str | None,
    gpu: str | None,
    world_size: int | None,
    **tasks: str | None,
) -> int:
    """Create a recipe FILE to start from. An existing FILE is never overwritten."""
    if (base is None) == (hf is None):
        raise UsageError(
            "it needs exactly one of --from and --from-hf",
            hint="titan recipe new FILE --from RECIPE, or titan recipe new FILE --from-hf FOLDER",
        )
    if full and base is None:
        raise UsageError("--full needs --from")
    given = {kind: data for kind, data in tasks.items() if data is not None}
    adapters = {name: data for name, data in (("lora", lora), ("qlora", qlora)) if data is not None}
    given |= {f"sft (--{name} DATA)": data for name, data in adapters.items() if data}
    if hf is None and (given or adapters or gpu or world_size):
        raise UsageError("what the model learns, and on which GPU, is asked for with --from-hf")
    if len(adapters) > 1:
        raise UsageError("it is either --lora or --qlora")
    if len(given) > 1:
        raise UsageError(
            f"it learns one thing, not {' and '.join(given)}",
            hint="--lora without DATA goes with each of the others: titan recipe new FILE --from-hf FOLDER "
            "--dpo PAIRS --lora",
        )
    refuse_file(file)
    if hf is not None:
        task = Task("pretrain", None)
        for kind, data in given.items():
            task = task_of(cast(Kind, kind.partition(" ")[0]), data)
        return _finetune(file, hf, task, next(iter(adapters), None), gpu, world_size)
    return _extend(file, str(base), full)


def _finetune(
    file: Path, folder: Path, task: Task, adapters: str | None, gpu: str | None, world: int | None
) -> int:
    from titancli.cli.finetune import as_toml, changed, finetune_sections
    from titancli.cli.sizing import device_here, size

    made = finetune_sections(folder, recipe_name(file), current(), task, adapters)
    device, gpus = device_here() if gpu is None else (DEVICES[gpu], 1)
    said = "no GPU is known here: it has the smallest batch; --gpu NAME finds the largest that fits"
    if device is not None:
        found = size(
            lambda overrides: as_toml(changed(made, overrides)),
            task.rows,
            task.rows_of_step,
            device,
            world or gpus,
            adapters=adapters is not None,
        )
        made, said = changed(made, found.overrides), found.said
    write_new(file, as_toml(made))
    note(f"{file}: {said}")
    if task.data is None:
        note("set dataset.paths to your text, and then the learning rate and the number of epochs")
    note(next_step(file))
    return EXIT_OK


def _extend(file: Path, base: str, full: bool) -> int:
    from titancli.recipe.json_schema import template

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
    from titancli.recipe.json_schema import recipe_schema

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
