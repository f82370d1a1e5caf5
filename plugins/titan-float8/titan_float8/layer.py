"""The linear layer that replaces `nn.Linear`: torchao's, and under tensor parallelism its own.

A scale is computed from the largest value of a tensor, or of each of its rows. Tensor parallelism shards some
of these tensors, so a rank would compute another scale from its shard. Here the largest values are reduced
over the ranks first, so that each operand is cast as on a single rank.
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
    """The axis along which each matrix is sharded over the ranks; None: all ranks have the whole matrix."""

    input: int | None
    """Axis of [tokens, in]."""
    weight: int | None
    """Axis of the transposed weight, [in, out]."""
    grad_output: int | None
    """Axis of [tokens, out]."""


CUTS = {"column": Cut(None, -1, -1), "row": Cut(-1, 0, None)}
"""Styles of a `tensor_plan` under which every operand is whole, or is a shard with a known scale. Where a
linear layer is replicated, its output's gradient is a partial sum, and the whole sum is never cast."""


class Linear(Float8Linear):
    """torchao's layer; on a shard of its matrix, it computes the same as that part of the whole layer."""

    _group: Group | None = None
    _style = ""

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Shard the layer; called by the `decoder` plan after sharding the weight over `group`.

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
        """Map […, in] to […, out]; under tensor parallelism to this rank's columns, or its part of the
        sum."""
        if self._group is None:
            return super().forward(input)
        weight_t = local(self.weight).t()
        out = _Product.apply(input, weight_t, self.linear_mm_config, self.config, self._group, self._style)
        if self.bias is None:
            return out
        bias = local(self.bias).to(out.dtype)
        # Added by one rank only, since ranks are summed; times zero elsewhere, to stay in the graph.
        return out + (bias if self._style == "column" or self._group.rank == 0 else bias * 0)


class _Casts:
    """Casts one layer's operands. All are matrices; an axis is 0 or -1."""

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
        """Cast to float8, unless the recipe disables it or FSDP2 has already gathered float8.

        Args:
            axis: axis along which the largest value of a row is computed, with one scale per row.
            scale: scale of an earlier cast of the same tensor; used with one scale per tensor.
            cut: axis along which x is sharded over the ranks.
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
    """Return the scale of a tensor cast with a single one; None for any other."""
    return x._scale if isinstance(x, Float8TrainingTensor) and x._axiswise_dim is None else None


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """`input @ weight_t` on a rank's shards, like torchao's `matmul_with_hp_or_float8_args`."""

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
