"""Find the files that a run reads: its weights, and the files in fields of its components. Torch-free."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.checkpoint import read_manifest
from titancli.checkpoint.format.manifest import DamagedCheckpoint, Verify, faults, is_checkpoint, newest_good
from titancli.checkpoint.hf.config_match import CONFIG
from titancli.checkpoint.start_from import start_from, still_needs_weights
from titancli.data import HFTokenizer, PythonStdlib
from titancli.data.hub import SCHEME, Hosted
from titancli.errors import EnvironmentProblem, TitanError
from titancli.recipe.assets import Assets
from titancli.recipe.find import url_of
from titancli.recipe.peft_folder import base_folder
from titancli.recipe.schema import Recipe
from titancli.registry.component import build, component_info, configs, is_config
from titancli.registry.fields import fields_of
from titancli.run.fit import check_adapters, check_weights
from titancli.runs import RunFolder

if TYPE_CHECKING:
    from titancli.recipe import Loaded

WRITERS = ("logger", "launcher")
"""Kinds of components whose paths are outputs."""


def missing_inputs(recipe: Recipe) -> list[str]:
    """Return the missing inputs of components, a line each.

    An input is a `Path`, or an absolute path in a text field marked as `LocalPath`; a pattern must match
    something.
    """
    return [
        f"{key}: no file matches {value}" if glob.has_magic(value) else f"{key}: {value} does not exist"
        for key, value in _inputs(recipe)
        if not (os.path.exists(value) or (glob.has_magic(value) and _matches(value)))
    ]


def require_inputs(
    loaded: Loaded,
    checkpoint: Path | None = None,
    *,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Check that the weights, the tokenizer and the files of a recipe exist, and that they belong to its
    model. `titan validate`, dry runs and starts make the same checks.

    Weights at a URL, and repositories that are named instead of folders, are downloaded first, except in a
    dry run, which checks of them what is in the cache.

    Args:
        checkpoint: the run's own checkpoint to continue from; weights that are then not needed are not
            checked.

    Returns:
        The missing files, a line each; always empty except in a dry run.

    Raises:
        EnvironmentProblem: files are missing, all of them are listed; or one cannot be read.
        RecipeError: the weights belong to another model.
    """
    recipe, start = loaded.recipe, start_from(loaded.recipe)
    missing = missing_inputs(recipe)
    if not dry_run and (hosted := Hosted.of(tokenizer_folder(recipe))) is not None:
        hosted.fetch(weights=False)
    why = None if checkpoint is None else _still_needed(recipe, checkpoint)
    needed = start.kind != "nothing" and (checkpoint is None or why is not None)
    wanted = needed and not (dry_run and start.is_remote)
    if wanted:
        because = f", but {why}" if why else ""
        try:
            start.fetch(say)
        except TitanError as error:
            raise type(error)(f"{error.message}{because}", hint=error.hint) from error
        if not start.folder.exists():
            missing.append(f"weights: {start.folder} does not exist{because}")
    if missing:
        if not dry_run:
            raise missing_error(missing, recipe)
        return missing
    if wanted:
        if start.kind == "state":
            read_manifest(start.folder)  # only a checkpoint has more than weights
        _refuse_other_folders(start.folder)
        check_weights(loaded)
        check_adapters(loaded, start.folder)
        _require_whole(start.folder, recipe.checkpoint.verify)
    if checkpoint is not None and checkpoint.is_dir():  # in a dry run it may be in an object store alone
        with suppress(EnvironmentProblem):  # it is damaged: the ranks look for another one
            check_adapters(loaded, checkpoint, own=True)
    _look_at_data(recipe, _check_tokenizer(recipe))
    return missing


def _require_whole(folder: Path, verify: Verify) -> None:
    """Check that the files of weights are there and have their sizes; only a run reads all bytes.

    Raises:
        EnvironmentProblem: one is missing or damaged.
    """
    if not is_checkpoint(folder):
        from titancli.checkpoint.hf.stored_files import require_stored

        require_stored(folder)
    elif found := faults(folder, read_manifest(folder), verify="off" if verify == "off" else "size"):
        raise DamagedCheckpoint(folder, "; ".join(found))


def _look_at_data(recipe: Recipe, tokenizer: Any) -> None:
    """
    Raises:
        TitanError: the first files of a dataset cannot be read as its type says.
    """
    datasets = (recipe.dataset, *recipe.validation.datasets.values())
    if all(one is None or isinstance(one, PythonStdlib) for one in datasets):
        return
    from titancli.data.first_look import look  # imports numpy

    if recipe.dataset is not None:
        look(recipe.dataset, tokenizer)
    for name, config in recipe.validation.datasets.items():
        try:
            look(config, tokenizer)
        except TitanError as error:
            raise type(error)(f"validation.datasets.{name}: {error.message}", hint=error.hint) from error


def missing_error(missing: list[str], recipe: Recipe) -> EnvironmentProblem:
    """Return the error about missing inputs."""
    return EnvironmentProblem("\n".join(missing), hint=how_to_get(missing, recipe))


def _refuse_other_folders(folder: Path) -> None:
    """
    Raises:
        EnvironmentProblem: weights are to come from a run as a whole, or from a folder without weights.
    """
    if is_checkpoint(folder) or (base_folder(folder) / CONFIG).is_file():
        return
    hint = "give a folder such as ./Llama-3.1-8B or RUN/checkpoints/step-N"
    if not RunFolder.is_run(folder):
        raise EnvironmentProblem(
            f"weights: {folder} is neither a Hugging Face folder (config.json and *.safetensors) "
            "nor a checkpoint (manifest.json)",
            hint=hint,
        )
    newest = newest_good(folder / "checkpoints", verify="size")
    raise EnvironmentProblem(
        f"weights: {folder} is a run, not one of its checkpoints",
        hint=hint if newest is None else f"give its newest checkpoint: weights={shlex.quote(str(newest))}",
    )


def _check_tokenizer(recipe: Recipe) -> Any:
    """Read the tokenizer's folder, if it is on this machine, and return the tokenizer, or None; code of
    plugins' tokenizers is not imported.

    Raises:
        TitanError: it cannot be read, or has more ids than the model.
    """
    folder = tokenizer_folder(recipe)
    if not isinstance(recipe.tokenizer, HFTokenizer) or folder is None:
        return None
    if (hosted := Hosted.of(folder)) is not None:
        try:
            hosted.folder  # noqa: B018 - raises
        except EnvironmentProblem:  # not downloaded yet
            return None
    tokenizer = build(recipe.tokenizer)
    rows = recipe.model.vocab_size
    if rows is not None and tokenizer.vocab_size > rows:
        from titancli.worker.data import check_vocabulary  # imports torch

        check_vocabulary(recipe, tokenizer)
    return tokenizer


def tokenizer_folder(recipe: Recipe) -> Path | None:
    """Return the folder of the recipe's tokenizer, or the repository that is named instead."""
    path = getattr(recipe.tokenizer, "path", None)
    return path if isinstance(path, Path) else None


def _still_needed(recipe: Recipe, checkpoint: Path) -> str | None:
    """Return why a run that continues from its own checkpoint needs its initial weights; None if it does
    not."""
    # In a dry run the checkpoint may only exist in an object store.
    if checkpoint.is_dir() and (why := still_needs_weights(recipe, checkpoint)):
        return why
    if recipe.loop.needs_reference(recipe):
        return f"the loop {component_info(recipe.loop).name} compares with the model that the run began with"
    return None


def how_to_get(missing: list[str], recipe: Recipe) -> str:
    """Return a hint about missing inputs: the command that downloads them, if the recipe has `assets`."""
    tokenizer = tokenizer_folder(recipe)
    lacks = any(line.startswith(("tokenizer.path:", "weights:")) for line in missing)
    if recipe.assets is None or tokenizer is None or not lacks:
        hub = f'; a repository of the Hugging Face Hub is written "{SCHEME}OWNER/NAME"' if lacks else ""
        return f"relative paths start at the current folder{hub}"
    return f"download it: {Assets(recipe.assets, tokenizer, recipe.weights == tokenizer).command}"


def _matches(pattern: str) -> bool:
    return next(glob.iglob(pattern, recursive=True), None) is not None


def _inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    owner: tuple[str | int, ...] | None = None
    for path, config in configs(recipe):
        if is_config(config):
            owner = None if component_info(config).kind in WRITERS else path
        if owner is None or path[: len(owner)] != owner:  # a section of the recipe itself
            continue
        kind: type = type(config)
        for name, field in fields_of(kind).items():
            value = getattr(config, name)
            for item in value if isinstance(value, (list, tuple)) else [value]:
                is_path = isinstance(item, Path) and url_of(item) is None
                if is_path or (field.type.local_path and isinstance(item, str) and os.path.isabs(item)):
                    yield ".".join(map(str, (*path, name))), str(item)
