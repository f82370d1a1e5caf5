"""A weight that FSDP2 gathers in float8.

FSDP2 calls a parameter's local tensor for what to send (`fsdp_pre_all_gather`) and how to use what arrived
(`fsdp_post_all_gather`). torchao's tensor class sends float8 tensors, which gloo does not support, and
requires rows to be divisible by the ranks. This class sends bytes, and pads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from titan_float8.ao import (
    Float8TrainingTensor,
    GemmInputRole,
    WeightWithDynamicFloat8CastTensor,
    amax_to_scale,
    hp_tensor_and_scale_to_float8,
    tensor_to_amax,
)
from titancli.distributed.collectives import Group, all_reduce

_aten = torch.ops.aten
_STAYS_A_WEIGHT = {
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
    _aten.detach.default,
}
"""FSDP2's operators for sharding, padding and moving a parameter. All others return plain tensors."""


class GatheredWeight(WeightWithDynamicFloat8CastTensor):
    """A weight shard in its own dtype; computes like a plain tensor, and is sent as float8."""

    _group: Group | None = None
    """The ranks that hold the weight's other shards under tensor parallelism."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        settings = None

        def unwrap(weight: GatheredWeight) -> Tensor:
            nonlocal settings
            settings = weight
            return weight._tensor

        args, kwargs = tree_map_only(GatheredWeight, unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func not in _STAYS_A_WEIGHT or settings is None:
            return out
        return tree_map_only(Tensor, settings._around, out)

    def _around(self, tensor: Tensor) -> GatheredWeight:
        """Return another tensor as a weight of the same kind."""
        weight = GatheredWeight(tensor, self._linear_mm_config, self._dtype)
        weight._group = self._group
        return weight

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        inner, settings = super().__tensor_flatten__()
        return inner, {**settings, "group": self._group}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], settings: Any, size: Any, stride: Any
    ) -> GatheredWeight:
        scale = inner.get("_precomputed_scale")
        weight = GatheredWeight(inner["_tensor"], settings["mm_config"], settings["dtype"], scale)
        weight._group = settings["group"]
        return weight

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Return this rank's shard as bytes, padded to a common size, and its scale.

        Args:
            mesh: ranks over which FSDP2 shards the weight.
            size: size of the tensor that FSDP2 shards: the weight, or this rank's tensor-parallel shard of
                it.
        """
        shard = self._tensor
        missing = -(-size[0] // mesh.size()) - shard.shape[0]
        if missing:
            # Zeros change no maximum, so the scale is the weight's.
            shard = torch.cat((shard, shard.new_zeros(missing, *size[1:])))
        scale = self._precomputed_scale
        if scale is None:
            largest = tensor_to_amax(shard, reduce_amax=True, device_mesh=mesh)
            if self._group is not None:
                largest = all_reduce(largest, "max", self._group)
            scale = amax_to_scale(largest, self._dtype)
        cast = hp_tensor_and_scale_to_float8(
            shard, scale, self._dtype, self._linear_mm_config, GemmInputRole.WEIGHT
        )
        return (cast._data.view(torch.uint8),), (cast._scale,)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight in float8, computing as `param_dtype`; into `out` if it is given."""
        (data,), (scale,) = all_gather_outputs, metadata
        if out is not None:
            made: Any = out._local_tensor if isinstance(out, DTensor) else out
            made._scale = scale
            return None
        weight = Float8TrainingTensor(
            data.view(self._dtype), scale, param_dtype, self._linear_mm_config, GemmInputRole.WEIGHT
        )
        return weight, (data,)


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor that a weight wraps, in the same memory; any other tensor unchanged."""
    return tensor._tensor if isinstance(tensor, WeightWithDynamicFloat8CastTensor) else tensor


def whole_over(weight: Tensor, group: Group) -> None:
    """Compute the scale of a weight that is gathered in float8 over the ranks of `group` too; in place."""
    part = weight._local_tensor if isinstance(weight, DTensor) else weight
    if isinstance(part, GatheredWeight):
        part._group = group
