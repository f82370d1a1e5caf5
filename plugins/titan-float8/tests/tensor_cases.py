"""What the ranks run: one linear layer, cut by a style, and what its three products multiply."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

from titan_float8 import Float8Linear
from titan_float8.ao import Float8TrainingTensor
from titan_float8.linear import build
from titancli.distributed.collectives import Group
from titancli.layout.degrees import Degrees

TOKENS, INPUTS, OUTPUTS = (2, 8), 32, 64
PARTS = {"column": (None, -1), "row": (-1, None)}
"""Along what input and output are cut."""


class Operand(NamedTuple):
    values: Tensor
    """float8, as numbers."""
    scale: Tensor
    """As large as `values`."""


class Seen(NamedTuple):
    """What a layer did with a batch: this rank's part of it."""

    operands: list[Operand]
    """Left and right of each product that is computed in float8."""
    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor


def data() -> dict[str, Tensor]:
    """Halves of every matrix differ in their largest value, by a factor that is no power of two."""
    generator = torch.Generator().manual_seed(0)
    ramp = lambda n: torch.linspace(0.1, 3.0, n)  # noqa: E731
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return {
        "input": draw(*TOKENS, INPUTS) * ramp(INPUTS),
        "weight": draw(OUTPUTS, INPUTS) * ramp(OUTPUTS)[:, None] * ramp(INPUTS),
        "bias": draw(OUTPUTS),
        "grad": draw(*TOKENS, OUTPUTS) * ramp(OUTPUTS),
    }


def layer(recipe: str, tp: int = 1) -> Any:
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    build(Float8Linear(recipe=recipe, emulate=True), mesh=Degrees(tp=tp), compile=False).convert(model)
    return model[0]


def whole(recipe: str) -> Seen:
    """Compute one rank's by torchao."""
    given, linear = data(), layer(recipe)
    linear.weight.data.copy_(given["weight"])
    linear.bias.data.copy_(given["bias"])
    return _watched(linear, given["input"], given["grad"])


def cut(recipe: str, style: str, alone: bool = False) -> Seen:
    """Compute a tensor parallel rank's; `alone`: without the largest values of the others."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    group = Group.of(mesh.get_group())
    given, linear = data(), layer(recipe, group.size)
    place = [Shard(0 if style == "column" else 1)]
    linear.weight = nn.Parameter(distribute_tensor(given["weight"], mesh, place))
    linear.bias = nn.Parameter(part(given["bias"], -1 if style == "column" else None, group))
    linear.tensor_parallel(group, style)
    inputs, outputs = PARTS[style]
    x, grad = part(given["input"], inputs, group), part(given["grad"], outputs, group)
    if not alone:
        return _watched(linear, x, grad)
    with patch("titan_float8.layer.all_reduce", lambda largest, op, group: largest):
        return _watched(linear, x, grad)


def part(x: Tensor, dim: int | None, group: Group) -> Tensor:
    return x if dim is None else x.chunk(group.size, dim)[group.rank].contiguous()


def _watched(linear: Any, x: Tensor, grad: Tensor) -> Seen:
    operands: list[Operand] = []
    product = FLOAT8_OPS_TABLE[torch.ops.aten.mm.default]

    def watching(op: Any, args: Any, kwargs: Any = None) -> Tensor:
        operands.extend(map(_operand, args))
        return product(op, args, kwargs)

    x.requires_grad_()
    with patch.dict(FLOAT8_OPS_TABLE, {torch.ops.aten.mm.default: watching}):
        out = linear(x)
        out.backward(grad)
    local = lambda t: t.to_local() if isinstance(t, DTensor) else t  # noqa: E731
    return Seen(operands, out.detach(), x.grad, local(linear.weight.grad), local(linear.bias.grad))


def _operand(x: Float8TrainingTensor) -> Operand:
    return Operand(x._data.float(), x._scale.expand(x.shape).clone())
