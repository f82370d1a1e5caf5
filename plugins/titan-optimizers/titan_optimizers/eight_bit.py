"""AdamW with moments of 8 bits.

A moment is an index into 256 values, times the largest absolute value of its block. torchao has the map and
the rounding; blocks are parts of a row here, and not of a flattened shard, so that every layout has the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_optimizers import AdamW8bit
from titan_optimizers.elementwise import Elementwise, local
from titancli import TitanError
from titancli.errors import EnvironmentProblem
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


class AdamW8bitOptimizer(Elementwise):
    """See `titan_optimizers.AdamW8bit`.

    Args:
        names: each parameter's name, for errors.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], names: Mapping[nn.Parameter, str]) -> None:
        super().__init__(params, defaults)
        self._block = {parameter: _checked(parameter, name) for parameter, name in names.items()}

    def _update(self, parameter: nn.Parameter, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, block = self.state[parameter], self._block[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state.update(_begun(parameter, name, block))
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        size, correction = group["lr"] / (1 - beta1**step), 1 - beta2**step

        def updated(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
            first.lerp_(grad, 1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(first, (second / correction).sqrt_().add_(group["eps"]), value=-size)

        if block is None:
            updated(weight, grad, local(state["exp_avg"]), local(state["exp_avg_sq"]))
            return
        kinds = ("exp_avg", True), ("exp_avg_sq", False)
        codes = [local(state[name]).view(-1, block) for name, _ in kinds]
        scales = [local(state[f"{name}_scale"]).view(-1) for name, _ in kinds]
        flat, grads = weight.reshape(-1, block), grad.reshape(-1, block)
        rows = max(1, CHUNK // block)
        for start in range(0, len(flat), rows):
            part = slice(start, start + rows)
            moments = [
                _values(signed, weight.device)[code[part].int()] * scale[part, None]
                for code, scale, (_, signed) in zip(codes, scales, kinds, strict=True)
            ]
            updated(flat[part], grads[part], *moments)
            for moment, code, scale, (_, signed) in zip(moments, codes, scales, kinds, strict=True):
                scale[part] = moment.abs().amax(-1).clip(EMPTY)
                code[part] = _nearest(moment / scale[part, None], _values(signed, weight.device))
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
        EnvironmentProblem: torchao is not installed.
    """
    _values(True, torch.device("cpu"))  # before the first step
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
    signed = name == "exp_avg"
    zero = int(_values(signed, torch.device("cpu")).abs().argmin())
    codes = torch.full(own.shape, zero, dtype=torch.uint8, device=own.device)
    scales = torch.full((*own.shape[:-1], own.shape[-1] // block), EMPTY, device=own.device)
    whole = (*parameter.shape[:-1], parameter.shape[-1] // block)
    return {
        name: _like(parameter, codes, tuple(parameter.shape)),
        f"{name}_scale": _like(parameter, scales, whole),
    }


def _like(parameter: nn.Parameter, own: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return this rank's shard as a tensor of `shape` that is sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return own
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of a code, in order, fp32."""
    try:
        from torchao.optim.quant_utils import create_dynamic_map
    except ImportError as error:
        raise EnvironmentProblem(
            "the optimizer adamw_8bit needs torchao", hint='pip install "torchao>=0.17,<0.19"'
        ) from error
    return torch.tensor(create_dynamic_map(signed), device=device)


def _nearest(x: Tensor, values: Tensor) -> Tensor:
    """Return the code of the value nearest to each element, uint8."""
    below = (torch.bucketize(x, values, right=True) - 1).clamp_(0, len(values) - 2)
    low, high = values[below], values[below + 1]
    return (below + (x - low >= (high - low) * 0.5)).to(torch.uint8)
