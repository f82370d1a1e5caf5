"""The converter `lora`: linear layers get two small matrices, and nothing else is trained.

y = x·Wᵀ + b + alpha/rank · (x·Aᵀ)·Bᵀ, with A [rank, in] and B [out, rank]; B begins as zeros. Source: LoRA
(arXiv 2106.09685). Layers are changed in place and under their names; A and B are parameters of theirs,
`lora_a` and `lora_b`; with DoRA (arXiv 2402.09353) the rows of the sum have trained norms, `lora_magnitude`.
Stacked experts: `titancli.converters.lora_experts`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm
from torch.nn.functional import linear, pad

from titancli.converters.dora import MAGNITUDE, Magnitudes
from titancli.converters.lora_experts import MULTIPLE, AdaptedExperts, stacks_of
from titancli.distributed.collectives import Group
from titancli.distributed.local import call_with, local
from titancli.errors import RecipeError
from titancli.models.blocks.head import Output
from titancli.models.blocks.init import fill, normal_, uniform_, zeros_
from titancli.models.blocks.moe import moe_layers
from titancli.models.blocks.state import named_state
from titancli.parallel.fsdp import reshard
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
    "column": {"lora_a": "replicate", "lora_b": "column", MAGNITUDE: "column"},
    "vocab": {"lora_a": "replicate", "lora_b": "vocab", MAGNITUDE: "vocab"},
    # A cut as the weight's columns are, B whole: what comes out is part of a sum, as the layer's output is.
    "row": {"lora_a": "row", "lora_b": "replicate", MAGNITUDE: "replicate"},
}


class Adapted(Magnitudes):
    """A frozen layer with an adapter of its weight, [out, in]; of an embedding [words, width]."""

    weight: Tensor
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    enabled = True
    """False: the layer is the base's."""

    @classmethod
    def adapt(cls, layer: Any, rank: int, scale: float, dora: bool = False) -> None:
        """Change a layer in place; its parameters are frozen already."""
        layer.__class__ = cls
        out, inner = layer.weight.shape
        # FSDP2 wants one dtype of all that is trained.
        dtype = torch.float32 if dora else layer.weight.dtype
        like: dict[str, Any] = {"dtype": dtype, "device": layer.weight.device}
        layer.lora_a = nn.Parameter(torch.empty(rank, inner, **like))
        layer.register_parameter(MAGNITUDE, nn.Parameter(torch.empty(out, **like)) if dora else None)
        layer.lora_b = nn.Parameter(torch.empty(out, rank, **like))  # the last: see `Adapters.merged`
        layer.lora_scale = scale

    def tensor_plan(self, style: str | None) -> Mapping[str, str]:
        """Return the sharding of an adapter's parameters for a weight that is sharded in a style."""
        return STYLES[style or ""]

    def whole_weight(self) -> Tensor:
        """Return the whole frozen weight, outside of a forward. Collective."""
        return self.weight.full_tensor() if isinstance(self.weight, DTensor) else self.weight


class AdaptedLinear(Adapted, nn.Linear):
    """A linear layer of a block."""

    _adds_bias = True

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Called by the `decoder` plan, when the parameters have been cut over `group`."""
        self._adds_bias = group.rank == 0 or style != "row"
        self._columns, self._rows = (group, None) if style == "row" else (None, group)

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] -> […, out]; under tensor parallelism of this rank's columns, or its part of the sum."""
        # A frozen bias needs no place in the graph where it is not added.
        bias = local(self.bias) if self.bias is not None and self._adds_bias else None
        if not self.enabled:
            return self.base_product(x, bias)
        a, b = local(self.lora_a), local(self.lora_b)
        if self.lora_magnitude is None:
            return self.base_product(x, bias) + self.lora_scale * linear(linear(x, a), b)
        out = self.base_product(x, None) + self.lora_scale * linear(linear(x, a), b)
        out = (out * self.ratio(a, b)).to(out.dtype)
        return out if bias is None else out + bias

    def base_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x·Wᵀ + bias of the frozen weight; a base stored in another form has a product of its own."""
        return linear(x, self.base_weight(), bias)


class AdaptedOutput(Adapted, Output):
    """The output projection: its loss multiplies with one matrix, of which B is further columns."""

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Called by the `decoder` plan, see `Output.tensor_parallel`."""
        super().tensor_parallel(group, style)
        self._rows = self.tensor_group

    def matrix(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.base_weight()
        if not self.enabled:
            return hidden, weight
        a, b = local(self.lora_a), local(self.lora_b)
        low, more = self.lora_scale * linear(hidden, a), -a.shape[0] % 8  # rows of whole 16 bytes
        weight = torch.cat((weight, pad(b, (0, more))), 1)
        if self.lora_magnitude is not None:
            weight = (weight * self.ratio(a, b)[:, None]).to(weight.dtype)
        return torch.cat((hidden, pad(low, (0, more))), -1), weight


class AdaptedEmbedding(Adapted, nn.Embedding):
    """The embedding of tokens: B has a row of each word."""

    def forward(self, tokens: Tensor) -> Tensor:
        found = super().forward(tokens)
        if not self.enabled:
            return found
        # Its forward again, which may be that of tensor parallelism, with another table.
        table = [(self._parameters, "weight", self.weight)]
        low = call_with(table, lambda _: self.lora_b, super().forward, tokens)
        return found + self.lora_scale * (low @ local(self.lora_a))


ADAPTED: dict[Any, Any] = {nn.Linear: AdaptedLinear, Output: AdaptedOutput, nn.Embedding: AdaptedEmbedding}


class Adapters:
    """A Converter (see `titancli.protocols`) whose parameters are not the plain model's."""

    def __init__(self, config: LoRA) -> None:
        self._config = config
        self.facts = config.facts
        """The description of the adapters in a checkpoint."""
        self.scale = scale_of(self.facts)
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
            adapt(model, name, self._config.rank, self.scale, self._config.dora)
        trained = sum(parameter.numel() for parameter in model.parameters()) - whole
        logger.info(
            "lora: %d layers, %s parameters in addition to %s", len(chosen), f"{trained:,}", f"{whole:,}"
        )

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Renew the magnitudes that layers keep where FSDP2 gathers parameters. Collective."""
        if not self._config.dora or not any(isinstance(one, FSDPModule) for one in model.modules()):
            return
        reshard(model)
        for layer in model.modules():
            if isinstance(layer, Adapted) and layer.lora_magnitude is not None:
                layer.renew_magnitudes()

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    @property
    def weights(self) -> frozenset[str]:
        """The names of the weights that have adapters."""
        return frozenset(self._adapted)

    def owns(self, name: str) -> bool:
        """Return whether a parameter belongs to an adapter."""
        return name.endswith(_ENDS)

    def initialise(self, model: nn.Module, generator_for: Callable[[str], torch.Generator]) -> None:
        """Draw A uniformly in ±1/√in (for embeddings normally) and set B to zero: the model begins as its
        base, the same on every layout. In stacks [in, out], B has the inputs' side."""
        for path, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if not key.endswith(OWN):
                    continue
                transposed = isinstance(module, AdaptedExperts) and module.is_transposed
                if key.endswith(OWN[1] if transposed else OWN[0]):
                    normal = isinstance(module, AdaptedEmbedding)
                    bound = 1.0 if normal else parameter.shape[1 if transposed else -1] ** -0.5
                    (normal_ if normal else uniform_)(parameter, bound, generator_for(f"{path}.{key}"))
                else:
                    zeros_(parameter)

    @torch.no_grad()
    def base_loaded(self, model: nn.Module) -> None:
        """Let the magnitudes begin as the norms of the base's rows, the same on every layout. Collective."""
        for layer in model.modules():
            if isinstance(layer, Adapted) and layer.lora_magnitude is not None:
                norms = layer.whole_weight().float().norm(dim=1)
                fill(layer.lora_magnitude, lambda whole, norms=norms: whole.copy_(norms))  # type: ignore[misc]
        Adapters.after_step(self, model)

    @contextmanager
    def disabled(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """Let the parts compute as the base inside the block."""
        layers = [m for p in parts for m in p.modules() if isinstance(m, Adapted | AdaptedExperts)]
        before = [layer.enabled for layer in layers]
        for layer in layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer, enabled in zip(layers, before, strict=True):
                layer.enabled = enabled

    def merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the plain model's tensors from all tensors in the order of their modules, with adapters added
        and the sum rounded once to the weight's dtype. Holds one adapted layer at a time."""
        held: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if held or name in self._adapted:
                held[name] = tensor
            else:
                yield name, tensor
            if held and name.endswith(OWN[1]):  # the last of its layer
                weight = next(iter(held))  # a bias beside the weight is the base's
                a, b = adapter_names(weight)
                magnitude = held.pop(magnitude_name(weight), None)
                merged = merge(held[weight], held.pop(a), held.pop(b), self.scale, magnitude)
                held[weight] = merged.to(held[weight].dtype)
                yield from held.items()
                held = {}


def scale_of(facts: Mapping[str, Any]) -> float:
    """Return the factor of B·A: alpha / rank, or alpha / √rank (rsLoRA, arXiv 2312.03732)."""
    return float(facts["alpha"] / (facts["rank"] ** 0.5 if facts["rslora"] else facts["rank"]))


def adapt(model: nn.Module, weight: str, rank: int, scale: float, dora: bool = False) -> None:
    """Give a weight of a model its adapter, in place; see `Adapted` and `AdaptedExperts`."""
    path, _, own = weight.rpartition(".")
    layer: Any = model.get_submodule(path)
    kind = ADAPTED[type(layer)] if own == "weight" else None
    if dora and kind in (None, AdaptedEmbedding):
        raise RecipeError(f"lora: {weight} cannot have magnitudes", hint="remove it from targets, or dora")
    if kind is None:
        AdaptedExperts.adapt(layer, own, rank, scale)
    else:
        kind.adapt(layer, rank, scale, dora)


_ENDS = (*(f"{before}{own}" for own in OWN for before in "._"), f".{MAGNITUDE}")


def magnitude_name(weight: str) -> str:
    """Return the name of a weight's magnitudes (DoRA)."""
    return weight.removesuffix("weight") + MAGNITUDE


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of a weight's A and B."""
    stem = weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}_"
    return f"{stem}{OWN[0]}", f"{stem}{OWN[1]}"


def weights_of(names: Iterable[str]) -> list[str]:
    """Return the weights whose adapters are among these names."""
    ends = {f".{OWN[0]}": ".weight", f"_{OWN[0]}": ""}
    return [name.removesuffix(end) + own for name in names for end, own in ends.items() if name.endswith(end)]


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """W + scale · B·A, rounded to fp32 alone: who writes it down in another dtype rounds it once more; with
    magnitudes (DoRA) as the norms of its rows.

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
    if magnitude is not None:
        merged.mul_((magnitude / vector_norm(merged, dim=1, dtype=torch.float64)).float()[:, None])
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
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
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
                    hint="targets are plain linear layers, experts, the embedding and the output",
                )
            if shared := [n for n, m in linears.items() if n != name and m.weight is linears[name].weight]:
                why = f"lora: {name} and {shared[0]} share a weight, which cannot have an adapter"
                raise RecipeError(why, hint="remove it from targets")
            found[f"{name}.weight"] = None
    return list(found)


def _is_plain(layer: nn.Module) -> bool:
    """Return whether the layer computes as torch's class does: a forward on the instance would never call an
    adapter."""
    return type(layer) in ADAPTED and "forward" not in vars(layer)


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    styles = (style for pattern, style in plan.items() if fnmatchcase(f"{name}.weight", pattern))
    return next(styles, None)


def build(config: LoRA, *, mesh: Degrees, compile: bool) -> Adapters:
    return Adapters(config)
