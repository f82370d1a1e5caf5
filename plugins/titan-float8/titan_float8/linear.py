"""The converter `float8_linear`: replaces linear layers by torchao's, in place and under the same names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_float8.ao import (
    Float8Linear,
    Float8LinearConfig,
    WeightWithDynamicFloat8CastTensor,
    precompute_float8_dynamic_scale_for_fsdp,
)
from titan_float8.block_linear import BlockLinear
from titan_float8.hardware import has, kernel_for
from titan_float8.layer import Linear
from titan_float8.scheme import Scheme
from titan_float8.selection import choose, logger, refuse_uncut, split
from titan_float8.weight import GatheredWeight, plain
from titancli.errors import EnvironmentProblem

if TYPE_CHECKING:
    from titan_float8 import Float8Linear as Config
    from titancli.layout.degrees import Degrees
    from titancli.observe.peaks import Device

MULTIPLE = 16
"""Both sides of a matrix must be multiples of this for the hardware's float8 products."""


def build(
    config: Config, *, mesh: Degrees, compile: bool, planned: Device | None = None
) -> Float8 | BlockLinear:
    """Build the converter.

    Args:
        planned: the device that a plan of memory and time is made for; it counts FSDP2's all-gathers in the
            weights' own dtype.

    Raises:
        EnvironmentProblem: `emulate = false` on a GPU without float8.
    """
    if planned is not None:
        if kernel_for("float8_linear", "float8", config.emulate, "planned", planned) == "emulated":
            # Which operators torchao's emulation runs, a trace cannot see: those of rows are alike.
            return BlockLinear("float8_linear", Scheme("rowwise"), config.skip, mesh)
        return Float8(replace(config, enable_fsdp_float8_all_gather=False), mesh, emulate=False)
    hardware = has("float8")
    emulate = not hardware if config.emulate is None else config.emulate
    if not emulate and torch.cuda.is_available() and not hardware:
        raise EnvironmentProblem(
            f"float8_linear: emulate = false, but {torch.cuda.get_device_name()} does not support float8",
            hint="remove emulate, or run on a GPU of compute capability 8.9 or later",
        )
    if not emulate and hardware and not compile:
        logger.warning("without compile, float8 is slower than bf16: set compile.enable = true")
    if compile and config.recipe != "tensorwise":
        # Fused code may recompute a scale with another precision than in forward, and then overflow to NaN:
        # pytorch issue 150859, torchtitan pull request 1108.
        from torch._inductor import config as inductor

        inductor.emulate_precision_casts = True
    return Float8(config, mesh, emulate=emulate)


class Float8:
    """A Converter (see `titancli.protocols`)."""

    def __init__(self, config: Config, mesh: Degrees, *, emulate: bool) -> None:
        self.config = config
        self.tp = mesh.tp
        self.shards = mesh.dp_shard * mesh.cp
        self.torchao = replace(
            Float8LinearConfig.from_recipe_name(config.recipe),
            enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
            emulate=emulate,
        )

    def convert(self, model: nn.Module) -> None:
        """Replace every eligible linear layer that is not skipped.

        Raises:
            RecipeError: a name in `skip` matches no linear layer, nothing is left to convert, or tensor
                parallelism does not shard a layer.
        """
        linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        plan = getattr(model, "tensor_plan", {})
        chosen = choose(
            "float8_linear",
            linears,
            self.config.skip,
            lambda name, linear: self._unfit(linear, split(name, plan)),
            "linear layer",
        )
        if self.tp > 1:
            refuse_uncut("float8_linear", {name: split(name, plan) for name in sorted(chosen)})
        for name, plain_linear in chosen.items():
            linear = Linear.from_float(plain_linear, config=self.torchao)
            if self.torchao.enable_fsdp_float8_all_gather:
                self._gather(linear, split(name, plan))
            model.set_submodule(name, linear)

    def _unfit(self, linear: nn.Linear, split: str | None) -> str | None:
        """Return why a layer cannot be converted; None if it can."""
        if "forward" in vars(linear):
            return "it has its own forward"
        if type(linear) is not nn.Linear:
            already = isinstance(linear, Float8Linear)
            own = f"its class {type(linear).__name__} has its own forward"
            return "float8 already" if already else own
        rows, columns = self._local_shape(linear, split)
        if rows % MULTIPLE or columns % MULTIPLE:
            return f"[{rows}, {columns}] is not divisible by {MULTIPLE}"
        return None

    def _local_shape(self, linear: nn.Linear, split: str | None) -> tuple[int, int]:
        """Return the shape of a rank's matrix under tensor parallelism, as its hardware sees it."""
        rows = linear.out_features // (self.tp if split == "column" else 1)
        return rows, linear.in_features // (self.tp if split == "row" else 1)

    def _gather(self, linear: Linear, split: str | None) -> None:
        """Replace torchao's weight class by ours, or by a plain tensor if a rank would hold no row to
        scale."""
        weight: Any = linear.weight
        rows, _ = self._local_shape(linear, split)
        tensor = plain(weight.detach())
        if -(-rows // self.shards) * (self.shards - 1) < rows:
            tensor = GatheredWeight(tensor, weight._linear_mm_config, weight._dtype)
        linear.weight = nn.Parameter(tensor, requires_grad=weight.requires_grad)

    def after_step(self, model: nn.Module) -> None:
        """Compute the scales of the updated weights for the next gathers."""
        if self.config.precompute_float8_dynamic_scale_for_fsdp:
            precompute_float8_dynamic_scale_for_fsdp(model)

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter without our tensor class, in the same memory."""
        if not isinstance(tensor, DTensor):
            return plain(tensor)
        local = tensor.to_local().detach()
        if not isinstance(local, WeightWithDynamicFloat8CastTensor):
            return tensor
        return DTensor.from_local(
            plain(local),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
