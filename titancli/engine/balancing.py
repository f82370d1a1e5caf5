"""Whether experts are balanced by biases where weights were given that know of none."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titancli.models.blocks.moe import moe_layers

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

# Not the module's own name: below titan's logger it is printed, and an event of the run.
logger = logging.getLogger("titancli.experts")


def begins_unbalanced(hf_form: Any, recipe: Recipe) -> bool:
    """Whether the recipe would balance, after weights are read, a model whose Hugging Face form has no place
    for the biases. The same on every rank."""
    balanced = bool(getattr(getattr(recipe.model, "moe", None), "load_balance_coeff", None))
    lost = bool(getattr(hf_form, "loses_biases", False))
    return balanced and lost and recipe.weights is not None


def hold_biases(parts: Iterable[Any], device: torch.device, held_before: bool) -> bool:
    """Let biases that are zero stay so: moved, they would send tokens elsewhere than the export does, whose
    folder has no place for them. Where some are not, the weights have been balanced before, and go on to be.
    Collective.

    Returns:
        Whether they are held.
    """
    layers = [layer for part in parts for layer in moe_layers(part).values()]
    biases = [layer.expert_bias for layer in layers if layer.expert_bias is not None]
    moved = torch.stack([bias.any() for bias in biases]).any() if biases else torch.zeros(())
    anywhere = moved.to(device, torch.float32)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    held = not bool(anywhere)
    for layer in layers:
        layer.holds_bias = held
    if held != held_before and dist.get_rank() == 0:
        logger.warning(
            "model.moe.load_balance_coeff is taken as 0: the weights have no balancing biases, and a Hugging "
            "Face folder of this model has no place for them"
            if held
            else "model.moe.load_balance_coeff applies: the checkpoint has balancing biases"
        )
    return held
