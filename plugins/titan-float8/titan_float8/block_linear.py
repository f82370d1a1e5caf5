"""The converters `mxfp8_linear` and `nvfp4_linear`: linear layers whose operands share scales by blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from titan_float8 import blackwell
from titan_float8.hardware import kernel_for
from titan_float8.layer import CUTS
from titan_float8.products import product
from titan_float8.scheme import Cut, Scheme
from titan_float8.selection import choose, refuse_uncut, split
from titancli.distributed.collectives import Group
from titancli.distributed.local import local
from titancli.errors import RecipeError, TitanError

if TYPE_CHECKING:
    from titan_float8 import MXFP8Linear, NVFP4Linear
    from titancli.layout.degrees import Degrees
    from titancli.observe.peaks import Device


def build_mxfp8(
    config: MXFP8Linear, *, mesh: Degrees, compile: bool, planned: Device | None = None
) -> BlockLinear:
    """Build the converter.

    Raises:
        EnvironmentProblem: `emulate = false` without the hardware.
    """
    kernel = kernel_for("mxfp8_linear", "MXFP8", config.emulate, "torchao", planned)
    scheme = Scheme("mxfp8", kernel, config.scale_calculation_mode == "floor", config.wgrad_with_hp)
    return BlockLinear("mxfp8_linear", scheme, config.skip, mesh)


def build_nvfp4(
    config: NVFP4Linear, *, mesh: Degrees, compile: bool, planned: Device | None = None
) -> BlockLinear:
    """Build the converter.

    Raises:
        EnvironmentProblem: `emulate = false` without the hardware.
        RecipeError: the hardware's kernels do not do what is asked for.
    """
    kernel = kernel_for("nvfp4_linear", "NVFP4", config.emulate, "torchao", planned)
    if kernel == "torchao":
        whole = config.stochastic_rounding and config.hadamard and not config.wgrad_with_hp
        if not whole or mesh.tp > 1:
            fault = "mesh.tp" if mesh.tp > 1 else "fields other than their defaults"
            raise RecipeError(
                f"nvfp4_linear: torchao's kernels are not used with {fault}",
                hint="remove them, or set emulate = true",
            )
    rounded = (config.wgrad_with_hp, config.stochastic_rounding, config.hadamard)
    return BlockLinear("nvfp4_linear", Scheme("nvfp4", kernel, False, *rounded), config.skip, mesh)


class BlockLinear:
    """A Converter (see `titancli.protocols`)."""

    def __init__(self, name: str, scheme: Scheme, skip: list[str], mesh: Degrees) -> None:
        self.name, self.scheme, self.skip, self.tp = name, scheme, skip, mesh.tp
        self.multiple = scheme.block
        if scheme.format == "nvfp4" and scheme.kernel == "torchao":
            self.multiple = blackwell.MULTIPLE

    def convert(self, model: nn.Module) -> None:
        """Replace the class of every eligible linear layer that is not skipped.

        Raises:
            RecipeError: a name in `skip` matches no linear layer, nothing is left to convert, or tensor
                parallelism does not shard a layer.
        """
        linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        plan = getattr(model, "tensor_plan", {})
        chosen = choose(
            self.name, linears, self.skip, lambda n, m: self._unfit(m, split(n, plan)), "linear layer"
        )
        if self.tp > 1:
            refuse_uncut(self.name, {name: split(name, plan) for name in sorted(chosen)})
        for linear in chosen.values():
            linear.__class__ = Linear
            linear.scheme = self.scheme  # type: ignore[assignment]

    def _unfit(self, linear: nn.Linear, style: str | None) -> str | None:
        if "forward" in vars(linear):
            return "it has its own forward"
        if type(linear) is not nn.Linear:
            return f"its class {type(linear).__name__} has its own forward"
        rows = linear.out_features // (self.tp if style == "column" else 1)
        columns = linear.in_features // (self.tp if style == "row" else 1)
        if rows % self.multiple or columns % self.multiple:
            return f"[{rows}, {columns}] is not divisible by {self.multiple}"
        return None

    def after_step(self, model: nn.Module) -> None:
        """Nothing follows from the weights: they are cast in each product."""

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return the parameter: it is of no class of its own."""
        return tensor


class Linear(nn.Linear):
    """A linear layer whose products are in low precision; of a shard, as of that part of the whole layer."""

    scheme: Scheme
    _cut: Cut | None = None
    _adds_bias = True

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Shard the layer; called by the `decoder` plan after sharding the weight over `group`.

        Raises:
            TitanError: the style is neither "column" nor "row".
        """
        if style not in CUTS:
            raise TitanError(
                f"a linear layer in low precision cannot be sharded in the style {style!r}", hint="skip it"
            )
        self._cut = Cut.of(group, style)
        self._adds_bias = group.rank == 0 or style == "column"

    def forward(self, x: Tensor) -> Tensor:
        """Map […, in] to […, out]; under tensor parallelism to this rank's columns, or its part of the
        sum."""
        out = product(x, local(self.weight), self.scheme, self._cut)
        bias: Any = self.bias
        if bias is None:
            return out
        bias = local(bias).to(out.dtype)
        # Added by one rank only where ranks are summed; times zero elsewhere, to stay in the graph.
        return out + (bias if self._adds_bias else bias * 0)
