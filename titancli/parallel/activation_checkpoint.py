"""Activation checkpointing: what is recomputed in backward instead of kept.

A block's `forward` is replaced on the instance, so the module tree, and with it every parameter name, stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titancli.errors import RecipeError
from titancli.models.blocks import declared
from titancli.models.blocks.flash import attention_forward
from titancli.models.blocks.grouped import grouped_linear
from titancli.parallel.ring import ring_forward
from titancli.parallel.wrapped import parts, wrap
from titancli.recipe.schema import ActivationCheckpoint

_aten = torch.ops.aten
MATRIX_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, grouped_linear._opoverload}
KEPT = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    ring_forward._opoverload,
    attention_forward._opoverload,
    # What has come over the network does not travel again.
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    _aten.max.default,  # the scale of a float8 operand: one number for a pass over all of it
}

BY_OPERATION = {"products": 1, "op": 2}
"""Every nth matrix product whose result is kept, by `selective_ac_option`."""


def apply_activation_checkpoint(
    layers: nn.ModuleDict, section: ActivationCheckpoint, *, draws_alike: bool = True
) -> None:
    """Make the blocks that `section` chooses recompute.

    Args:
        draws_alike: whether what is run again draws the same random numbers, which a CUDA graph cannot.

    Raises:
        RecipeError: selective_ac_option is neither "op", "products" nor a positive number.
    """
    if section.mode in ("none", "memory_budget"):
        return  # within a budget it is the compiler that chooses: titancli.parallel.compile
    option = section.selective_ac_option
    if section.mode == "full":
        every, context = 1, None
    elif option in BY_OPERATION:
        every, context = 1, partial(_keep_products, option)  # torch may make a number symbolic
    elif option.isdecimal() and int(option) > 0:
        every, context = int(option), None
    else:
        raise RecipeError(
            f"activation_checkpoint.selective_ac_option = {option!r}",
            hint='use "products", "op", or "2" for every 2nd layer',
        )
    for number, block in enumerate(layers.values(), start=1):
        if number % every == 0:
            # By op, torch counts every one, and fails where FSDP2 gathers experts within what is run again.
            for module, name in parts(block) if context else [(block, "forward")]:
                wrap(module, name, _recomputing(getattr(module, name), context, draws_alike))


def runs_again_outside(block: nn.Module, section: ActivationCheckpoint) -> bool:
    """Return whether a block that is recomputed in backward is so around its compiled parts, not within
    them."""
    whole_blocks = section.mode == "full" or section.selective_ac_option not in BY_OPERATION
    return section.mode in ("full", "selective") and whole_blocks and parts(block) != [(block, "forward")]


def _recomputing(
    forward: Callable[..., Any], context: Callable[[], Any] | None, draws_alike: bool
) -> Callable[..., Any]:
    # A converter may have put dropout into any block: what is run again must draw the same numbers.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_alike}
    if context is not None:
        options["context_fn"] = context
    return partial(checkpoint, forward, **options)


def _keep_products(option: str) -> Any:
    """Return a policy that keeps attention and every nth matrix product. With "op", it keeps the costly half
    of a block for half of its memory; with "products", all that costs more to recompute than to read."""
    seen: dict[bool, int] = defaultdict(int)
    of_each = BY_OPERATION[option]

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # What draws runs again, so that what draws after it finds the generator where it was.
        if (op in KEPT or op in declared.KEPT) and not draws(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        if op in MATRIX_PRODUCTS:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % of_each == 1 % of_each:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an operator takes random numbers. Attention does if it has dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True
