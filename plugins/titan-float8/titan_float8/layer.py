"""The linear layer that takes the place of `nn.Linear`: torchao's, and under tensor parallelism its own.

A scale is made from the largest value of a tensor, or of each of its rows. Tensor parallelism cuts some of
these tensors, so that a rank sees a part and would scale it by another number. Here the largest values are
shared first: each operand is cast as on one rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_float8.ao import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    ScalingGranularity,
    ScalingType,
    amax_to_scale,
    hp_tensor_and_scale_to_float8,
    tensor_to_amax,
)
from titan_float8.weight import whole_over
from titancli.distributed.collectives import Group, all_reduce
from titancli.distributed.local import local
from titancli.errors import TitanError


class Cut(NamedTuple):
    """The axis along which each matrix is cut over the ranks; None: all ranks have the same, whole."""

    input: int | None
    """Of [tokens, in]."""
    weight: int | None
    """Of the transposed weight, [in, out]."""
    grad_output: int | None
    """Of [tokens, out]."""


CUTS = {"column": Cut(None, -1, -1), "row": Cut(-1, 0, None)}
"""Styles of a `tensor_plan` under which every operand is whole, or a part whose scale can be had. Where a
linear is whole on every rank, its output's gradient is part of a sum, and the sum is never cast."""


class Linear(Float8Linear):
    """torchao's layer; on a part of its matrix it gives that part of what the whole one gives."""

    _group: Group | None = None
    _style = ""

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Called by the `decoder` plan, when the weight has been cut over `group`.

        Raises:
            TitanError: the style is neither "column" nor "row".
        """
        if style not in CUTS:
            raise TitanError(
                f"a float8 linear layer cannot be sharded in the style {style!r}", hint="skip it"
            )
        self._group, self._style = group, style
        whole_over(self.weight, group)

    def forward(self, input: Tensor) -> Tensor:
        """[…, in] -> […, out]; under tensor parallelism of the columns, or part of the sum, of this rank."""
        if self._group is None:
            return super().forward(input)
        weight_t = local(self.weight).t()
        out = _Product.apply(input, weight_t, self.linear_mm_config, self.config, self._group, self._style)
        if self.bias is None:
            return out
        bias = local(self.bias).to(out.dtype)
        # Added once to what the ranks sum; times zero, it keeps its place in the graph elsewhere.
        return out + (bias if self._style == "column" or self._group.rank == 0 else bias * 0)


class _Casts:
    """How one layer's operands are cast. All are matrices; an axis is 0 or -1."""

    def __init__(
        self, products: LinearMMConfig, config: Float8LinearConfig, group: Group, style: str
    ) -> None:
        self.products, self.config, self.group, self.cut = products, config, group, CUTS[style]

    def input(self, x: Tensor, how: CastConfig, axis: int, scale: Tensor | None = None) -> Tensor:
        return self._cast(x, how, axis, scale, GemmInputRole.INPUT, self.cut.input)

    def weight(self, x: Tensor, how: CastConfig, axis: int, scale: Tensor | None = None) -> Tensor:
        return self._cast(x, how, axis, scale, GemmInputRole.WEIGHT, self.cut.weight)

    def grad_output(self, x: Tensor, how: CastConfig, axis: int, scale: Tensor | None = None) -> Tensor:
        return self._cast(x, how, axis, scale, GemmInputRole.GRAD_OUTPUT, self.cut.grad_output)

    def _cast(
        self,
        x: Tensor,
        how: CastConfig,
        axis: int,
        scale: Tensor | None,
        role: GemmInputRole,
        cut: int | None,
    ) -> Tensor:
        """In float8, or as it is where the recipe says so or FSDP2 has gathered it in float8.

        Args:
            axis: along which the largest value of a row is looked for, where there is a scale a row.
            scale: of an earlier cast of the same tensor; taken where there is one a tensor.
            cut: the axis along which x is cut over the ranks.
        """
        if isinstance(x, Float8TrainingTensor) or how.scaling_type is ScalingType.DISABLED:
            return x
        tensorwise = how.scaling_granularity is ScalingGranularity.TENSORWISE
        along = None if tensorwise else axis
        if scale is None or not tensorwise:
            largest = tensor_to_amax(x, scaling_granularity=how.scaling_granularity, axiswise_dim=along)
            if cut is not None and (tensorwise or along == cut):
                largest = all_reduce(largest, "max", self.group)
            scale = amax_to_scale(largest, how.target_dtype, self.config.round_scales_to_power_of_2)
        return hp_tensor_and_scale_to_float8(x, scale, how.target_dtype, self.products, role, along)


def _scale_of_all(x: Tensor) -> Tensor | None:
    """The scale of a tensor that was cast with one; None for any other."""
    return x._scale if isinstance(x, Float8TrainingTensor) and x._axiswise_dim is None else None


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """`input @ weight_t`, as torchao's `matmul_with_hp_or_float8_args`, on what a rank has of both."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight_t: Tensor,
        products: LinearMMConfig,
        config: Float8LinearConfig,
        group: Group,
        style: str,
    ) -> Tensor:
        casts = _Casts(products, config, group, style)
        rows = input.reshape(-1, input.shape[-1])
        cast_rows = casts.input(rows, config.cast_config_input, -1)
        cast_weight = casts.weight(weight_t, config.cast_config_weight, 0)
        ctx.casts = casts
        ctx.save_for_backward(input, weight_t, _scale_of_all(cast_rows), _scale_of_all(cast_weight))
        return torch.mm(cast_rows, cast_weight).reshape(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        casts, config = ctx.casts, ctx.casts.config
        input, weight_t, input_scale, weight_scale = ctx.saved_tensors
        rows, grad = input.reshape(-1, input.shape[-1]), grad.reshape(-1, grad.shape[-1])

        cast_grad = casts.grad_output(grad, config.cast_config_grad_output, -1)
        cast_weight = casts.weight(weight_t, config.cast_config_weight_for_grad_input, -1, weight_scale)
        grad_input = torch.mm(cast_grad, cast_weight.t()).reshape(input.shape)

        grad_scale = _scale_of_all(cast_grad)
        cast_grad = casts.grad_output(grad, config.cast_config_grad_output_for_grad_weight, 0, grad_scale)
        cast_rows = casts.input(rows, config.cast_config_input_for_grad_weight, 0, input_scale)
        grad_weight = torch.mm(cast_grad.t(), cast_rows)
        return grad_input, grad_weight.t(), None, None, None, None
