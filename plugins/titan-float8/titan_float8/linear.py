"""The converter `float8_linear`: replaces linear layers by torchao's, in place and under the same names."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
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
from titan_float8.layer import CUTS, Linear
from titan_float8.weight import GatheredWeight, plain
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.recipe import nearest

if TYPE_CHECKING:
    from titan_float8 import Float8Linear as Config
    from titancli.layout.degrees import Degrees

# Below titan's own logger, so that its warnings reach users and the run's events.
logger = logging.getLogger("titancli.plugins.titan_float8")

MULTIPLE = 16
"""Both sides of a matrix must be multiples of this for the hardware's float8 products."""


def build(config: Config, *, mesh: Degrees, compile: bool) -> Float8:
    """Build the converter.

    Raises:
        EnvironmentProblem: `emulate = false` on a GPU without float8.
    """
    hardware = has_float8()
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


def has_float8() -> bool:
    """Return whether the current GPU multiplies float8 matrices."""
    if not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability()
    if torch.version.hip:  # gfx942, gfx950 and gfx12 support it; gfx90a and gfx11 do not
        return (9, 4) <= capability < (10, 0) or capability >= (12, 0)
    return capability >= (8, 9)


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
        rest = _without(linears, self.config.skip)
        plan = getattr(model, "tensor_plan", {})
        reasons = {name: self._unfit(linear, _split(name, plan)) for name, linear in rest.items()}
        chosen = {name for name, reason in reasons.items() if reason is None}
        left = {name: reason for name, reason in reasons.items() if reason is not None}
        if not chosen:
            raise RecipeError(
                "float8_linear converts nothing: " + (_listed(left) if left else "skip matches every layer"),
                hint="remove the converter from the recipe",
            )
        if left:
            logger.warning("float8_linear does not convert these layers: %s", _listed(left))
        if self.tp > 1:
            _refuse_uncut({name: _split(name, plan) for name in sorted(chosen)})
        for name in chosen:
            linear = Linear.from_float(linears[name], config=self.torchao)
            if self.config.enable_fsdp_float8_all_gather:
                self._gather(linear, _split(name, plan))
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


def _without(linears: Mapping[str, nn.Linear], skip: Iterable[str]) -> dict[str, nn.Linear]:
    """Return the layers that no name in `skip` matches.

    Raises:
        RecipeError: a name matches none.
    """
    rest = dict(linears)
    for pattern in skip:
        matched = [n for n in linears if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")]
        if not matched:
            ends = {n.split(".", i)[-1]: None for n in linears for i in range(n.count(".") + 1)}
            hint = nearest(pattern, ends) or f"linear layers: {', '.join(_families(linears))}"
            raise RecipeError(f"float8_linear: skip = {pattern!r} matches no linear layer", hint=hint)
        for name in matched:
            rest.pop(name, None)
    return rest


def _split(name: str, plan: Mapping[str, str]) -> str | None:
    """Return how the model's tensor plan shards a layer."""
    styles = (style for pattern, style in plan.items() if fnmatchcase(f"{name}.weight", pattern))
    return next(styles, None)


def _refuse_uncut(styles: Mapping[str, str | None]) -> None:
    """Check that tensor parallelism shards all converted layers.

    Raises:
        RecipeError: a layer is replicated under tensor parallelism.
    """
    whole = [name for name, style in styles.items() if style not in (None, *CUTS)]
    if whole:
        names = _families(whole)
        raise RecipeError(
            f"float8_linear: with mesh.tp each rank has all of {', '.join(names)}, but only a part of "
            f"the sum that is the gradient of its output; casting the parts differs from casting the sum",
            hint=f"add {', '.join(map(repr, names))} to skip",
        )


def _listed(reasons: Mapping[str, str]) -> str:
    """Format as `names (reason); …`, with layers that differ only by their index combined."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(_families(names))} ({reason})" for reason, names in by_reason.items())


def _families(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
