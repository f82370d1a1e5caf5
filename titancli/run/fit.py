"""Check that a recipe fits its ranks, its devices, its initial weights and its code.

A recipe alone does not have these facts, so they are checked when a run starts, and errors point at the
recipe's own lines. Torch-free, except for `import_components`, which imports the recipe's components.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from titancli.checkpoint.format.manifest import adapter_record, is_checkpoint, read_manifest
from titancli.checkpoint.start_from import start_from
from titancli.converters import LoRA
from titancli.errors import EXIT_PLUGIN, Problem, RecipeError
from titancli.layout.degrees import Degrees
from titancli.optimizers.schedule import schedule_of
from titancli.parallel.programs import check_programs
from titancli.recipe.check import component_checks, components
from titancli.recipe.layout import check_layout, on, takes
from titancli.recipe.load import Loaded
from titancli.recipe.toml import dotted
from titancli.recipe.vocabulary import GROW
from titancli.registry import current
from titancli.registry.component import component_info, load_target


def check_world(loaded: Loaded, world: int) -> tuple[Degrees, int]:
    """Return the mesh on this many ranks, and the number of micro-batches in a step.

    Raises:
        RecipeError: the degrees or the batch do not fit the ranks, or the model does not fit the degrees.
    """
    recipe = loaded.recipe
    try:
        degrees = recipe.mesh.resolve(world, lambda name, degree: takes(recipe, name, degree))
    except RecipeError as error:
        raise _problem(loaded, "mesh", error.message, error.hint) from error
    known = on(recipe, degrees)
    found = [*check_layout(known), *component_checks(known)]
    if beyond := [rank for rank in recipe.profiling.ranks if rank >= world]:
        message = f"there is no rank {beyond[0]}: ranks are numbered from 0 to {world - 1}"
        found.append((("profiling", "ranks"), message, None))
    if found:
        raise RecipeError(
            [p for path, words, hint in found for p in _problem(loaded, dotted(path), words, hint).problems]
        )
    return degrees, recipe.accumulation(degrees)


def check_worlds(loaded: Loaded, nproc: int, least: int | None, most: int) -> None:
    """Check a recipe on every number of nodes that a run may have, and that its batch is the same on all.

    Args:
        nproc: ranks on each node.
        least: the smallest number of nodes with which the run continues; None if the number is fixed.

    Raises:
        RecipeError: it does not fit some of them; the message lists the numbers of nodes that it fits.
    """
    if least is None:
        check_world(loaded, nproc * most)
        return
    nodes = range(least, most + 1)
    if loaded.recipe.training.global_batch_size is None:
        message = f"on {least}:{most} nodes a step needs a size that does not depend on their number"
        raise _problem(loaded, "training.global_batch_size", message, "set training.global_batch_size")
    if not loaded.recipe.checkpoint.enable:
        message = f"on {least}:{most} nodes the ranks start again when a node joins or is lost: at step 0"
        hint = "remove it, or give --nnodes one number"
        raise _problem(loaded, "checkpoint.enable", f"{message}, without checkpoints", hint)
    wrong: dict[int, RecipeError] = {}
    for number in nodes:
        try:
            check_world(loaded, number * nproc)
        except RecipeError as error:
            wrong[number] = error
    if not wrong:
        return
    fits = ", ".join(str(number) for number in nodes if number not in wrong) or "none of them"
    first = min(wrong)
    message = f"with {first} of {least}:{most} nodes: {wrong[first].message}"
    raise _problem(
        loaded,
        "training.global_batch_size",
        message,
        f"numbers of nodes that fit: {fits}; every number in {least}:{most} must fit",
    )


def check_devices(loaded: Loaded, gpus: int, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what this machine cannot run: components and settings that need a GPU if there is none, and
    compiling for a CPU without a compiler.

    Args:
        environ: the environment that ranks will have.

    Raises:
        RecipeError: lists every component and setting.
        EnvironmentProblem: names the programs that compiling needs.
    """
    problems: list[Problem] = []
    for path, config in components(loaded.recipe) if not gpus else ():
        info = component_info(config)
        if info.device == "cuda":
            message = f"the {info.kind} {info.name} needs a GPU, but none is visible"
            problems += _problem(loaded, dotted((*path, "type")), message, None).problems
        for key, reason in config.needs_gpu():
            message = f"{reason}, but no GPU is visible"
            problems += _problem(loaded, dotted((*path, key)), message, "remove it").problems
    if problems:
        raise RecipeError(problems)
    section = loaded.recipe.compile
    if section.enable and section.backend == "inductor" and not gpus:
        check_programs(environ)


def check_weights(loaded: Loaded) -> None:
    """Refuse weights that were made by another model. Whether they are whole is checked elsewhere.

    Raises:
        RecipeError: the message lists the fields that differ.
        EnvironmentProblem: a config.json cannot be read, or has features that the recipe's model lacks.
    """
    recipe, start = loaded.recipe, start_from(loaded.recipe)
    if start.kind == "nothing":
        return
    from titancli.checkpoint.hf.config_match import complaint

    differs, grows = recipe.checkpoint.model_differs, recipe.weights_vocab == GROW
    found = complaint(recipe.model, start.folder, differs, grows=grows)
    if found is not None:
        raise _problem(loaded, "weights", *found)


def check_adapters(loaded: Loaded, folder: Path, *, own: bool = False) -> None:
    """Refuse weights that are adapters of another kind than the recipe's, or whose base is missing. Whether
    they are of the same layers, only the built model shows.

    Args:
        own: they are a checkpoint of the run itself, whose base is the recipe's, wherever it was before.

    Raises:
        RecipeError: they differ from the recipe's, at the line of its converter.
        EnvironmentProblem: titan has no such adapters, or their base is missing.
    """
    from titancli.checkpoint.adapters import complaint, recorded_base

    converters = loaded.recipe.converters
    number, facts = next(((n, c.facts) for n, c in enumerate(converters) if isinstance(c, LoRA)), (0, None))
    if facts is None and converters:
        return  # a plugin's converter may have adapters of its own
    if (found := complaint(folder, facts)) is not None:
        key = f"converters.{number}.{found.key or 'type'}" if facts else "weights"
        raise _problem(loaded, key, found.message, found.hint)
    if own or not is_checkpoint(folder):
        return
    if (record := adapter_record(read_manifest(folder))) is not None:
        recorded_base(record, folder)


def _problem(loaded: Loaded, key: str, message: str, hint: str | None) -> RecipeError:
    """Return the error at the line of a key, or else of a neighboring key, or of the degrees."""
    sections = (f"{key.partition('.')[0]}.", "mesh.")
    beside = [
        other for section in sections for other in reversed(loaded.origins) if other.startswith(section)
    ]
    places = (loaded.origins[k].location() for k in (key, *beside) if k in loaded.origins)
    return RecipeError([Problem("check", message, next(filter(None, places), None), hint)])


# ---------------------------------------------------------------------------------------------------- imports


class NotImportable(RecipeError):
    """Components of a recipe whose code cannot be imported, with a problem for each."""

    exit_code = EXIT_PLUGIN


def import_components(loaded: Loaded) -> None:
    """Import the code of each component of a recipe, including those in slots of others; and have configs
    check (`try_out()`) facts that only that code knows.

    Raises:
        NotImportable: some cannot be imported: the message lists each with its plugin and the error.
        RecipeError: a config's `try_out` says why it cannot be built.
        PluginError: the schedule gives no factor at some step.
    """
    problems, tried = [], set()
    for path, config in components(loaded.recipe):
        info = component_info(config)
        full = current().full_name(config)
        for target in filter(None, (info.target, info.hf)):
            if target in tried:
                continue
            tried.add(target)
            try:
                load_target(target)
            except (Exception, SystemExit) as error:  # a plugin's module may raise anything
                cause = error.__cause__ or error
                plugin = full.partition("/")[0]
                origin = loaded.origins.get(dotted((*path, "type")))
                message = (
                    f"{info.kind}/{info.name} of the plugin {plugin}: {target!r} cannot be imported: "
                    f"{type(cause).__name__}: {cause}"
                )
                hint = f"repair or reinstall {plugin}, or use another {info.kind} in {dotted(path)}"
                problems.append(
                    Problem("import", message, origin.location("value") if origin else None, hint)
                )
    if problems:
        raise NotImportable(problems)
    for _, config in components(loaded.recipe):
        config.try_out()
    schedule_of(loaded.recipe)
