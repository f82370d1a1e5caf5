"""What a run leaves at its end beside its last checkpoint: the weights alone, for whoever needs no more."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from titancli.checkpoint import Checkpointer
    from titancli.engine import Engine
    from titancli.recipe.schema import Checkpoint

logger = logging.getLogger(__name__)


def export(section: Checkpoint, engine: Engine, checkpointer: Checkpointer, run_folder: Path) -> None:
    """Write `exports/step-N`, a checkpoint without optimizer, and `exports/step-N-hf`, as asked. Collective.

    The last checkpoint is on the disk already: whatever fails here loses nothing.

    Raises:
        EnvironmentProblem: the disk is full, or cannot be written.
        TitanError: the model has no Hugging Face form.
    """
    name = f"step-{engine.step}"
    if section.last_save_model_only:
        dtype = getattr(torch, section.export_dtype)
        tensors = {
            f"model.{parameter}": tensor.to(dtype) if tensor.is_floating_point() else tensor
            for parameter, tensor in engine.plain_parameters()
        }
        checkpointer.save_apart(run_folder / "exports" / name, tensors)
        logger.info("weights only: exports/%s", name)
    if section.last_save_in_hf:
        checkpointer.on_main(lambda: _to_hf(section, run_folder, name))


def _to_hf(section: Checkpoint, run_folder: Path, name: str) -> None:
    from titancli.checkpoint.hf.convert import to_hf

    target, number = run_folder / "exports" / f"{name}-hf", 1
    while target.exists():  # of the same step on another way, which may be what somebody uses
        number += 1
        target = target.with_name(f"{name}-hf-{number}")
    target.parent.mkdir(exist_ok=True)
    source = run_folder / "checkpoints" / name
    to_hf(source, target, dtype=section.export_dtype, say=logger.debug)
    logger.info("Hugging Face folder: exports/%s", target.name)
