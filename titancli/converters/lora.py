"""The converter `lora`: linear layers get two small matrices, and nothing else is trained.

y = x·Wᵀ + b + alpha/rank · (x·Aᵀ)·Bᵀ, with A [rank, in] and B [out, rank]; B begins as zeros. Source: LoRA
(arXiv 2106.09685). Layers are changed in place and under their names; A and B are parameters of theirs,
`lora_a` and `lora_b`. Stacked experts: `titancli.converters.lora_experts`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from titancli.converters.lora_experts import MULTIPLE, AdaptedExperts, stacks_of
from titancli.distributed.collectives import Group
from titancli.distributed.local import local
from titancli.errors import RecipeError
from titancli.models.blocks.init import uniform_, zeros_
from titancli.models.blocks.moe import moe_layers
from titancli.models.blocks.state import named_state
from titancli.recipe.problems import nearest

if TYPE_CHECKING:
    from titancli.converters import LoRA
    from titancli.layout.degrees import Degrees

logger = logging.getLogger(__name__)

OWN = ("lora_a", "lora_b")
MERGED_ROWS = 1024
"""Rows of a weight that are merged at a time."""
STYLES = {
    # A whole, B cut as the weight's rows are: what comes out is this rank's part.
    "column": {"lora_a": "replicate", "lora_b": "column"},
    # A cut as the weight's columns are, B whole: what comes out is part of a sum, as the layer's output is.
    "row": {"lora_a": "row", "lora_b": "replicate"},
}


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float
    enabled = True
    """False: the layer is the base's."""
    _adds_bias = True

    @staticmethod
    def adapt(layer: Any, rank: int, scale: float) -> None:
        """Change a linear layer in place; its parameters are frozen already."""
        layer.__class__ = AdaptedLinear
        like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        layer.lora_a = nn.Parameter(torch.empty(rank, layer.in_features, **like))
        layer.lora_b = nn.Parameter(torch.empty(layer.out_features, rank, **like))
        layer.scale = scale

    def tensor_plan(self, style: str | None) -> Mapping[str, str]:
        """Return the sharding of A and B for a weight that is sharded in a style.

        Raises:
            RecipeError: the weight is whole on each rank.
        """
        if style not in STYLES:
            raise RecipeError(
                f"lora: a layer that tensor parallelism shards in the style {style!r} cannot have an adapter",
                hint="remove it from targets",
            )
        return STYLES[style]

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Called by the `decoder` plan, when the parameters have been cut over `group`."""
        self._adds_bias = group.rank == 0 or style != "row"

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] -> […, out]; under tensor parallelism of this rank's columns, or its part of the sum."""
        # A frozen bias needs no place in the graph where it is not added.
        bias = local(self.bias) if self.bias is not None and self._adds_bias else None
        out = self.base_product(x, bias)
        if not self.enabled:
            return out
        return out + self.scale * linear(linear(x, local(self.lora_a)), local(self.lora_b))

    def base_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x·Wᵀ + bias of the frozen weight; a base stored in another form has a product of its own."""
        return linear(x, self.base_weight(), bias)

    def base_weight(self) -> Tensor:
        """Return this rank's part of the frozen weight, [out, in], as values to compute with."""
        return local(self.weight)


class Adapters:
    """A Converter (see `titancli.protocols`) whose parameters are not the plain model's."""

    def __init__(self, config: LoRA) -> None:
        self._config = config
        self.scale = config.alpha / config.rank
        self.facts = {"form": "lora", "rank": config.rank, "alpha": config.alpha}
        """The description of the adapters in a checkpoint."""
        self._adapted: set[str] = set()

    def convert(self, model: Any) -> None:
        """Freeze the model, and put adapters beside the layers that are to have one.

        Raises:
            RecipeError: a target matches no linear layer, or one that cannot have an adapter; or something of
                the base moves without gradients.
        """
        if moving := _moving(model):
            raise RecipeError(
                f"lora: training changes {moving[0]} of the base without gradients",
                hint="disable the balancing of experts: with model.moe.freeze_expert_bias = true where the "
                "weights have such biases, with model.moe.load_balance_coeff = 0 where they have none",
            )
        whole = sum(parameter.numel() for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        chosen = _chosen(model, self._config.targets)
        if not chosen:
            raise RecipeError(
                "lora: no layer of this model can have an adapter",
                hint="adapters need plain linear layers of the blocks whose style in the tensor_plan is "
                "column or row",
            )
        stacks = [name for name in chosen if not name.endswith(".weight")]
        if stacks and self._config.rank % MULTIPLE:
            raise RecipeError(
                f"lora: {stacks[0]} cannot have an adapter of rank {self._config.rank}",
                hint=f"use a rank that is a multiple of {MULTIPLE} for experts",
            )
        self._adapted = set(chosen)
        for name in chosen:
            adapt(model, name, self._config.rank, self.scale)
        trained = sum(parameter.numel() for parameter in model.parameters()) - whole
        logger.info(
            "lora: %d layers, %s parameters in addition to %s", len(chosen), f"{trained:,}", f"{whole:,}"
        )

    def after_step(self, model: nn.Module) -> None:
        """Nothing follows from the weights."""

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def owns(self, name: str) -> bool:
        """Return whether a parameter belongs to an adapter."""
        return name.endswith(_ENDS)

    def initialise(self, model: nn.Module, generator_for: Callable[[str], torch.Generator]) -> None:
        """A uniform in ±1/√in, B zero: the model begins as its base; the same on every layout. Of stacks
        [in, out] it is B that has the inputs' side."""
        for path, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if not key.endswith(OWN):
                    continue
                transposed = isinstance(module, AdaptedExperts) and module.is_transposed
                if key.endswith(OWN[1] if transposed else OWN[0]):
                    bound = parameter.shape[1 if transposed else -1] ** -0.5
                    uniform_(parameter, bound, generator_for(f"{path}.{key}"))
                else:
                    zeros_(parameter)

    @contextmanager
    def disabled(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """The parts as the base is."""
        layers = [m for p in parts for m in p.modules() if isinstance(m, AdaptedLinear | AdaptedExperts)]
        before = [layer.enabled for layer in layers]
        for layer in layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer, enabled in zip(layers, before, strict=True):
                layer.enabled = enabled

    def merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The plain model's tensors out of all in the order of their modules, adapters added in and rounded
        once to the weight's dtype; one adapted layer is held at a time."""
        held: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if held or name in self._adapted:
                held[name] = tensor
            else:
                yield name, tensor
            if held and name.endswith(OWN[1]):  # the last of its layer
                weight = next(iter(held))  # a bias beside the weight is the base's
                a, b = adapter_names(weight)
                merged = merge(held[weight], held.pop(a), held.pop(b), self.scale)
                held[weight] = merged.to(held[weight].dtype)
                yield from held.items()
                held = {}


def adapt(model: nn.Module, weight: str, rank: int, scale: float) -> None:
    """Give a weight of a model its adapter, in place; see `AdaptedLinear` and `AdaptedExperts`."""
    path, _, own = weight.rpartition(".")
    if own == "weight":
        AdaptedLinear.adapt(model.get_submodule(path), rank, scale)
    else:
        AdaptedExperts.adapt(model.get_submodule(path), own, rank, scale)


_ENDS = tuple(f"{before}{own}" for own in OWN for before in "._")


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of a weight's A and B."""
    stem = weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}_"
    return f"{stem}{OWN[0]}", f"{stem}{OWN[1]}"


def weights_of(names: Iterable[str]) -> list[str]:
    """Return the weights whose adapters are among these names."""
    ends = {f".{OWN[0]}": ".weight", f"_{OWN[0]}": ""}
    return [name.removesuffix(end) + own for name in names for end, own in ends.items() if name.endswith(end)]


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B·A, rounded to fp32 alone: who writes it down in another dtype rounds it once more.

    The product is one of fp64, in blocks of rows: what fp32 products are computed in is the process's setting
    (`torch.set_float32_matmul_precision`). Of stacks [E, …], one after the other.
    """
    if weight.ndim == 3:
        whole = torch.empty_like(weight, dtype=torch.float32)
        for number, one in enumerate(whole):
            one.copy_(merge(weight[number], a[number], b[number], scale))
        return whole
    merged, whole_a = weight.to(torch.float32, copy=True), a.double()
    for rows, some_b in zip(merged.split(MERGED_ROWS), b.split(MERGED_ROWS), strict=True):
        rows.add_(some_b.double() @ whole_a, alpha=scale)
    return merged


def _moving(model: Any) -> list[str]:
    """Names of what training moves without gradients."""
    if not model.token_counts():
        return []
    held = {f"{name}.expert_bias" for name, layer in moe_layers(model).items() if layer.holds_bias}
    parameters = dict(model.named_parameters())
    return [name for name, _ in named_state(model) if name not in parameters and name not in held]


def _chosen(model: Any, targets: list[str] | None) -> list[str]:
    """Names of the weights that get an adapter."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    styles = {name: _style(name, model.tensor_plan) for name in linears}
    if targets is None:
        inside = {module for _, block in model.layers.items() for module in block.modules()}
        return [
            f"{name}.weight"
            for name, layer in linears.items()
            if _is_plain(layer) and styles[name] in STYLES and layer in inside
        ]
    stacks = stacks_of(model)
    found: dict[str, None] = {}
    for pattern in targets:
        # Experts are many: a pattern that does not name them means the layers beside them.
        experts = [n for n in stacks if n.split(".")[-2] in pattern]
        matched = [
            n for n in (*linears, *experts) if any(fnmatchcase(n, p) for p in (pattern, f"*.{pattern}"))
        ]
        if not matched:
            ends = {n.split(".", i)[-1]: None for n in (*linears, *stacks) for i in range(n.count(".") + 1)}
            hint = nearest(pattern, ends) or "see `titan show` of the model, and its tensor_plan"
            raise RecipeError(f"lora: targets = {pattern!r} matches no linear layer", hint=hint)
        for name in matched:
            if name in stacks:
                found[name] = None
                continue
            if not _is_plain(linears[name]) or styles[name] not in STYLES:
                what = type(linears[name]).__name__
                if "forward" in vars(linears[name]):
                    what += ", with a forward of its own"
                style = f", {styles[name]!r} in the tensor_plan" if styles[name] not in STYLES else ""
                raise RecipeError(
                    f"lora: {name} ({what}{style}) cannot have an adapter",
                    hint="targets are the plain linear layers of attention and feed-forward, and experts",
                )
            found[f"{name}.weight"] = None
    return list(found)


def _is_plain(layer: nn.Linear) -> bool:
    """Return whether the layer computes as torch's class does: a forward on the instance would never call an
    adapter."""
    return type(layer) is nn.Linear and "forward" not in vars(layer)


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    styles = (style for pattern, style in plan.items() if fnmatchcase(f"{name}.weight", pattern))
    return next(styles, None)


def build(config: LoRA, *, mesh: Degrees, compile: bool) -> Adapters:
    return Adapters(config)
