"""AdamW with moments of 8 bits.

A moment is an index into 256 values, times the largest absolute value of its block, as in torchao and
bitsandbytes; but blocks are parts of a row here, and not of a flattened shard, so that every layout has the
same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titan_optimizers import AdamW8bit
from titan_optimizers.elementwise import Skipping, Update, counted, kept, local
from titancli import TitanError
from titancli.distributed.local import sharded_as
from titancli.protocols import Role

BLOCK, LEAST = 256, 32
"""Largest and smallest number of elements in a block."""
SMALL = 4096
"""Elements below which moments are float32."""
EMPTY = 1e-12
"""Least scale of a block."""
CHUNK = 2**20
"""Elements that are float32 at a time."""


def block_of(shape: tuple[int, ...]) -> int | None:
    """Return the number of elements in a block of a parameter; None: its moments are float32.

    The largest power of two that divides a sixteenth of a row, so that sixteen ranks can share rows.
    """
    if len(shape) < 2 or math.prod(shape) < SMALL or shape[-1] % LEAST:
        return None
    size = LEAST
    while size < BLOCK and shape[-1] % (size * 2 * 16) == 0:
        size *= 2
    return size


class AdamW8bitOptimizer(Skipping):
    """See `titan_optimizers.AdamW8bit`.

    Args:
        names: each parameter's name, for errors.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], names: Mapping[nn.Parameter, str]) -> None:
        super().__init__(params, defaults)
        self._block = {parameter: _checked(parameter, name) for parameter, name in names.items()}
        # Of this optimizer alone: those of a dry run have no values.
        self._values = cache(values_of)

    def update(self, at: Update) -> None:
        parameter, weight, grad, wrong, group = at
        state, block = self.state[parameter], self._block[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state.update(_begun(parameter, name, block))
        step, (beta1, beta2) = counted(state, wrong).double(), group["betas"]
        size, correction = (group["lr"] / (1 - beta1**step)).float(), (1 - beta2**step).float()
        if not weight.numel():
            return  # sharded over more ranks than it has rows

        def updated(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
            first = first.lerp(grad, 1 - beta1)
            second = (second * beta2).addcmul_(grad, grad, value=1 - beta2)
            denominator = (second / correction).sqrt_().add_(group["eps"])
            decayed = weight * (1 - group["lr"] * group["weight_decay"])
            return decayed.sub_((first * size).div_(denominator)), first, second

        if block is None:
            old = (weight, local(state["exp_avg"]), local(state["exp_avg_sq"]))
            for tensor, new in zip(old, updated(weight, grad, *old[1:]), strict=True):
                kept(tensor, new, wrong)
            return
        kinds = ("exp_avg", True), ("exp_avg_sq", False)
        codes = [local(state[name]).view(-1, block) for name, _ in kinds]
        scales = [local(state[f"{name}_scale"]).view(-1) for name, _ in kinds]
        flat, grads = weight.reshape(-1, block), grad.reshape(-1, block)
        rows = max(1, CHUNK // block)
        for start in range(0, len(flat), rows):
            part = slice(start, start + rows)
            moments = [
                self._values(signed, weight.device)[code[part].int()] * scale[part, None]
                for code, scale, (_, signed) in zip(codes, scales, kinds, strict=True)
            ]
            new, *moments = updated(flat[part], grads[part], *moments)
            kept(flat[part], new, wrong)
            for moment, code, scale, (_, signed) in zip(moments, codes, scales, kinds, strict=True):
                largest = moment.abs().amax(-1).clip(EMPTY)
                nearest = _nearest(moment / largest[:, None], self._values(signed, weight.device))
                kept(scale[part], largest, wrong)
                kept(code[part], nearest, wrong)
        if not weight.is_contiguous():  # reshape made a copy
            weight.copy_(flat.view(weight.shape))


def build(
    config: AdamW8bit,
    *,
    named_parameters: list[tuple[str, nn.Parameter]],
    roles: Mapping[str, Role] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer.

    Raises:
        TitanError: tensor parallelism leaves parts of rows that no blocks fill.
    """
    shared = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    names = {parameter: name for name, parameter in named_parameters}
    return AdamW8bitOptimizer(list(names), shared, names)


def _checked(parameter: nn.Parameter, name: str) -> int | None:
    block = block_of(tuple(parameter.shape))
    if block is not None and local(parameter).shape[-1] % block:
        raise TitanError(
            f"adamw_8bit: a rank has {local(parameter).shape[-1]} of the {parameter.shape[-1]} columns of "
            f"{name}, which blocks of {block} do not fill",
            hint="use a smaller mesh.tp, or the optimizer adamw",
        )
    return block


def _begun(parameter: nn.Parameter, name: str, block: int | None) -> dict[str, Tensor]:
    """Return a moment of zeros."""
    if block is None:
        return {name: torch.zeros_like(parameter)}
    own = local(parameter)
    zero = numbers(name == "exp_avg").index(0)
    codes = torch.full(own.shape, zero, dtype=torch.uint8, device=own.device)
    scales = torch.full((*own.shape[:-1], own.shape[-1] // block), EMPTY, device=own.device)
    whole = (*parameter.shape[:-1], parameter.shape[-1] // block)
    return {
        name: sharded_as(parameter, codes, parameter.shape),
        f"{name}_scale": sharded_as(parameter, scales, whole),
    }


@cache
def numbers(signed: bool) -> list[float]:
    """Return the 256 values of a code, in order: dynamic tree quantization (arXiv 1511.04561).

    Below 1 there are seven decades, the largest with most values: middles of as many equal parts of it. With
    a sign, each has half as many, and both signs.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / count) for part in range(count)]
        found += [*middles, *(-value for value in middles if signed)]
    return sorted(found)


def values_of(signed: bool, device: torch.device) -> Tensor:
    """Return the same, fp32 on a device."""
    return torch.tensor(numbers(signed), device=device)


def _nearest(x: Tensor, values: Tensor) -> Tensor:
    """Return the code of the value nearest to each element, uint8."""
    below = (torch.bucketize(x, values, right=True) - 1).clamp_(0, len(values) - 2)
    low, high = values[below], values[below + 1]
    return (below + (x - low >= (high - low) * 0.5)).to(torch.uint8)
