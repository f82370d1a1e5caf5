"""The recipe of an engine: read from a path, or made from parts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist

from titancli.checkpoint.format.manifest import LOCK, is_checkpoint, names_and_sizes, newest_good
from titancli.checkpoint.start_from import start_from
from titancli.distributed import process_group
from titancli.distributed.together import Ranks
from titancli.engine.agreement import Call
from titancli.engine.ranks import rank_group
from titancli.errors import EnvironmentProblem, UsageError
from titancli.optimizers import ScheduleConfig, WarmupStableDecay
from titancli.recipe import load_recipe
from titancli.recipe.bind import absolute
from titancli.recipe.check import remarks
from titancli.recipe.schema import (
    BFLOAT16,
    ActivationCheckpoint,
    Comm,
    Compile,
    Debug,
    Mesh,
    Pipeline,
    Recipe,
    Stability,
    Training,
)
from titancli.registry import current
from titancli.registry.component import component_info, is_config
from titancli.registry.kinds import KINDS
from titancli.runs import RunFolder

if TYPE_CHECKING:
    from titancli.checkpoint.format.manifest import Verify

logger = logging.getLogger(__name__)

JOIN_SECONDS = Comm().init_timeout_seconds
"""Seconds that ranks wait for each other until a recipe sets `comm.init_timeout_seconds`."""


# ---------------------------------------------------------------------------------------------- recipes


class Parts(TypedDict, total=False):
    """Parts that an engine may be built from besides its model: component configs and recipe sections."""

    optimizer: Any
    loss: Any
    converters: Sequence[Any]
    parallelize: Any
    training: Training
    lr_scheduler: ScheduleConfig
    mesh: Mesh
    pipeline: Pipeline
    activation_checkpoint: ActivationCheckpoint
    compile: Compile
    stability: Stability
    debug: Debug
    comm: Comm
    tokenizer: Any
    weights: str | Path | None


SLOTS = {"model": "model", "optimizer": "optimizer", "loss": "loss", "parallelize": "parallelize"}
SLOTS |= {"converters": "converter", "lr_scheduler": "schedule", "tokenizer": "tokenizer"}
"""Parts that are components, and their kinds."""


BUILT: tuple[str, ...] = ("model", "mesh", "pipeline", "parallelize", "activation_checkpoint", "compile")
BUILT += ("optimizer", "loss", "lr_scheduler", "training", "stability", "comm")
"""Recipe sections that an engine is built from; they are the same on every rank."""


def recipe_from(recipe: Recipe | str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe, Path | None]:
    """Return a checked recipe; that of a run or checkpoint starts from its weights. Also return the run if
    its newest checkpoint was chosen here and not read yet.

    Args:
        recipe: a path, a bundled name, a run folder (its newest good checkpoint), a checkpoint; or a Recipe,
            which is taken as it is.
        overrides: as on the command line, `"optimizer.lr=1e-4"`.

    Raises:
        RecipeError: there is no such recipe, or it has problems, all of which are listed.
        EnvironmentProblem: a run without a good checkpoint, or a checkpoint without a recipe.
        UsageError: overrides beside a Recipe.
    """
    if isinstance(recipe, Recipe):
        if overrides:
            raise UsageError(
                "overrides cannot be combined with a Recipe object",
                hint="change it with dataclasses.replace",
            )
        return recipe, None
    if not isinstance(recipe, str | Path):
        raise UsageError(
            f"an engine must be built from a recipe, not from a {type(recipe).__name__}",
            hint='give a path, a name such as "llama3_debug", or a Recipe; or use Engine.of(model, ...)',
        )
    if isinstance(overrides, str):
        raise UsageError("overrides must be a list of strings", hint=f'use ["{overrides}"]')
    folder = Path(recipe)
    if is_checkpoint(folder) and not (folder / LOCK).is_file():
        raise EnvironmentProblem(
            f"the checkpoint {folder} contains no recipe",
            hint=f'give a recipe of its model, with the override "weights={folder}"',
        )
    loaded = load_recipe(recipe, overrides, runnable=False).recipe
    start_from(loaded).fetch(logger.info)
    _remark(loaded)
    own_weights = any(override.partition("=")[0].strip() == "weights" for override in overrides)
    if own_weights or not (is_checkpoint(folder) or RunFolder.is_run(folder)):
        return loaded, None
    weights = checkpoint_of(folder, verify=names_and_sizes(loaded.checkpoint.verify))
    run = None if is_checkpoint(folder) else folder
    return dataclasses.replace(weights_alone(loaded), weights=weights), run


def weights_alone(recipe: Recipe) -> Recipe:
    """Return the recipe with only the weights, and all of them, of its checkpoint."""
    checkpoint = dataclasses.replace(recipe.checkpoint, initial_load_model_only=True, exclude_from_loading=[])
    return dataclasses.replace(recipe, checkpoint=checkpoint)


def checkpoint_of(
    folder: Path, *, verify: Verify = "full", damaged: Mapping[Path, str] = MappingProxyType({})
) -> Path:
    """Return a checkpoint as it is, or the newest good one of a run, chosen by rank 0. Collective.

    Args:
        damaged: known damage of checkpoints of the run.

    Raises:
        EnvironmentProblem: the run has none.
    """

    def look() -> Path | None:
        if is_checkpoint(folder) or not RunFolder.is_run(folder):
            return None
        found = newest_good(
            folder.absolute() / "checkpoints", verify=verify, rejected=logger.warning, damaged=damaged
        )
        if found is None:
            raise EnvironmentProblem(
                f"the run {folder} has no good checkpoint to load weights from",
                hint=f"for its recipe and initial weights, give {folder / LOCK}",
            )
        return found

    ranks = Ranks(process_group.patient_group())
    return ranks.broadcast_call(f"reading {folder}", look) or folder.absolute()


def recipe_of(model: Any, parts: Parts, device: torch.device) -> Recipe:
    """Make a recipe from parts. Other values are the defaults, except as a script expects: the learning rate
    is constant, nothing is recomputed in backward, and a CPU computes in float32.

    Raises:
        UsageError: a part does not exist, is of another kind, or is a class instead of an instance.
    """
    if unknown := [name for name in parts if name not in Parts.__annotations__]:
        raise UsageError(
            f"Engine.of does not take {' or '.join(unknown)}",
            hint=f"its arguments are model, {', '.join(Parts.__annotations__)}",
        )
    training = parts.get("training", Training())
    endless = not isinstance(training, Training) or not training.steps
    if "lr_scheduler" in parts and endless and parts["lr_scheduler"].total_steps is None:
        raise UsageError(
            "a schedule needs a length",
            hint="pass training=Training(steps=...) with lr_scheduler, or set its total_steps",
        )
    converters: Any = parts.get("converters", ())
    if not isinstance(converters, Sequence) or isinstance(converters, str):
        raise UsageError(
            f"converters: got a {type(converters).__name__}, expected a list", hint="use converters=[...]"
        )
    given: dict[str, Any] = {"model": model, **parts}
    for name, kind in SLOTS.items():
        values = given.get(name, [])
        for value in values if name == "converters" else [values] if name in given else []:
            _check_kind(name, value, kind)
    given["converters"] = list(converters)
    for kind in ("optimizer", "loss", "parallelize"):
        given.setdefault(kind, _default(kind))
    given.setdefault(
        "training",
        Training(seq_len=min(2048, model.max_seq_len or 2048)),
    )
    given.setdefault("lr_scheduler", WarmupStableDecay(warmup_steps=0, decay_ratio=0.0, min_lr_factor=1.0))
    given.setdefault("activation_checkpoint", ActivationCheckpoint(mode="none"))
    training = given["training"]
    if not isinstance(training, Training):
        raise UsageError(
            f"training: got a {type(training).__name__}, expected Training",
            hint="use training=Training(...)",
        )
    given["training"] = training = dataclasses.replace(training, steps=training.steps or 1)
    if device.type == "cpu" and training.mixed_precision_param is BFLOAT16:
        given["training"] = dataclasses.replace(training, mixed_precision_param="float32")
    if (weights := parts.get("weights")) is not None:
        given["weights"] = absolute(Path(weights))
    given.setdefault("tokenizer", None)
    made = Recipe(dataset=None, loop=_default("loop"), launcher=_default("launcher"), **given)
    _remark(made)
    start_from(made).fetch(logger.info)
    return made


def _remark(recipe: Recipe) -> None:
    """Log the remarks on a valid recipe that commands print, once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        for line in remarks(recipe):
            logger.warning(line)


def _default(kind: str) -> Any:
    return current().find(kind, str(KINDS[kind].full_default))()


def _check_kind(name: str, value: Any, kind: str) -> None:
    info = component_info(value) if is_config(value) else None
    if info is None or info.kind != kind:
        what = f"a {info.kind}" if info else f"a {type(value).__name__}"
        raise UsageError(f"{name}: got {what}, expected the config of a {kind} component")
    if isinstance(value, type):
        raise UsageError(f"{name}: {value.__name__} is a class", hint=f"use {value.__name__}(...)")


# ------------------------------------------------------------------------------------------- between ranks


def call() -> Call:
    """Begin the collective building of an engine.

    Raises:
        TitanError: the ranks have lost each other.
    """
    rank_group().require("Engine.build")
    return Call(rank_group(), "Engine.build")


def compare(building: Call, recipe: Recipe, frozen: bool, checkpoint: Path | None) -> None:
    """Declare the build on this rank, field by field."""
    building.given("frozen" if frozen else "trainable")
    building.given(f"with checkpoint = {checkpoint and checkpoint.name}")
    for name in BUILT:
        section = getattr(recipe, name)
        building.given(f"with {name} = {type(section).__name__}")
        for field in dataclasses.fields(section):
            building.given(f"with {name}.{field.name} = {getattr(section, field.name)!r}")
    building.given(f"with converters = {recipe.converters!r}")


def limit(section: Comm) -> None:
    """Set the time limits of a recipe, in a process group that was created here."""
    if process_group.made_here():
        rank_group().wait_for_the_first_verb(section.init_timeout_seconds, section.train_timeout_seconds)
