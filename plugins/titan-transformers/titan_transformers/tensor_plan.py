"""Tensor-parallel sharding of transformers' modules: by the plan that transformers declares, or by the usual
names of matrices.

A module with a `rowwise` child is a region, entered with whole rows and left with a sum over the ranks
(`titancli.parallel.tensor`). Modules outside of the plan are replicated: outside of regions they work on
single tokens, different ones on each rank; within one, their gradient on each rank is a partial sum.
Attention outside of regions is computed whole on each rank, which keeps its part of the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from titan_transformers.theirs import line_of
from titancli.distributed.collectives import gather
from titancli.distributed.local import SEQUENCE, local, with_local_parameters

if TYPE_CHECKING:
    from titancli.distributed.collectives import Group

GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
LOCAL = "local_params"
"""A module computes with its own parameters, which have styles of their own."""
STYLES = {
    "colwise": "column",
    "rowwise": "row",
    GATHERED: "column",
    SPLIT: "row",
    "replicated_with_grad_allreduce": "norm",
    "mla_kv_a_proj": "replicate",
    "replicate": "replicate",
}
"""titan's styles, by transformers'."""


USUAL = (
    {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"},
    {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "out_proj": "rowwise"},
    {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"},
    {"up_proj": "colwise", "down_proj": "rowwise"},
)
"""The matrices of attention and of feed-forward networks for which transformers declares no plan."""


class Sharded(NamedTuple):
    """How the modules of a base are sharded, by their names in it."""

    styles: dict[str, str]
    """transformers' style of modules, and of parameters outside of these."""
    regions: list[str]
    whole: list[str]
    """Attention that each rank computes whole."""


def sharded(config: Any, base: nn.Module, unlike: Collection[str] = ()) -> Sharded:
    """Return how tensor parallelism shards a base.

    Args:
        unlike: classes of regions whose shards do not add up to the whole; they are not sharded.
    """
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    styles: dict[str, str] = {}
    regions: list[str] = []
    within: set[nn.Module] = set()
    for path, parent in base.named_modules():
        prefix = f"{path}." if path else ""
        linears = {n: child for n, child in parent.named_children() if isinstance(child, nn.Linear)}
        own = {
            name: style
            for name in (*linears, *parent._parameters)
            if (style := _planned(plan, prefix + name)) in STYLES
        }
        rows = [name for name, style in own.items() if STYLES[style] == "row"]
        if not rows:
            own = _usual(parent, linears) or own
            rows = [name for name, style in own.items() if STYLES[style] == "row"]
        if rows and type(parent).__name__ not in unlike and parent not in within:
            regions.append(path)
            within |= set(parent.modules())
            styles |= {prefix + name: style for name, style in own.items()}
    whole = [path for path, module in base.named_modules() if attends(module) and module not in within]
    return Sharded(styles, regions, whole)


def _planned(plan: Mapping[str, str], place: str) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatchcase(place, pattern)), None)


def _usual(parent: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, str]:
    known = next((styles for styles in USUAL if styles.keys() == linears.keys()), None)
    if known is None or any(True for module in linears.values() if type(module) is not nn.Linear):
        return {}
    return {**known, **{name: "colwise" for name in parent._parameters if name == "sinks"}}


def attends(module: nn.Module) -> bool:
    """Return whether a module is an attention."""
    return hasattr(module, "core_attention") or hasattr(module, "is_causal")


def plan_fault(config: Any, found: Sharded) -> str | None:
    """Return why a model cannot be sharded by tensor parallelism; None if no reason is known."""
    kind = config.model_type
    plan = getattr(config, "base_model_tp_plan", None) or {}
    known = {*STYLES, LOCAL, *(s for p, s in plan.items() if "experts" in p.split(".")), None}
    if other := sorted({style for style in plan.values() if style not in known}):
        return f"transformers' plan for {kind} uses {', '.join(other)}, which titan does not support"
    if not found.regions and plan:
        return f"transformers' tensor parallel plan for {kind} shards no layer that titan could shard"
    if not found.regions:
        return f"transformers declares no tensor parallel plan for {kind}, and its layers have other names"
    return None


def parts_fault(module: nn.Module, styles: Mapping[str, str], args: Any, kwargs: Any) -> str | None:
    """Return why a region's two shards do not add up to the whole; None if they do."""
    meant = _first(module(*args, **kwargs)).detach()
    summed = torch.zeros_like(meant)
    try:
        for rank in range(2):
            part = copy.deepcopy(module)
            for name, style in styles.items():
                _take_part(part, name, style, rank)
            summed += _first(part(*args, **kwargs)).detach()
    except Exception as error:  # mismatched sizes
        return line_of(error)
    far = float((summed - meant).abs().max() / meant.abs().max())
    return None if far <= 1e-4 else f"parts differ by {far:.2g}"


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _take_part(module: Any, name: str, style: str, rank: int) -> None:
    """Shard a region's child or parameter as on one of two ranks."""
    child = getattr(module, name)
    if isinstance(child, nn.Parameter):
        setattr(module, name, nn.Parameter(child.chunk(2)[rank]))
    elif STYLES[style] == "column" and style != GATHERED:
        child.weight = nn.Parameter(child.weight.chunk(2)[rank])
        if child.bias is not None:
            child.bias = nn.Parameter(child.bias.chunk(2)[rank])
    elif STYLES[style] == "row":
        weight = child.weight.chunk(2, 1)[rank]
        if style == SPLIT:
            others = [x if n == rank else x * 0 for n, x in enumerate(child.weight.chunk(2, 1))]
            weight = torch.cat(others, 1)
        child.weight = nn.Parameter(weight.clone())
        if child.bias is not None and rank > 0:
            child.bias = nn.Parameter(torch.zeros_like(child.bias))


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes single tokens or heads; by its name, as transformers itself finds
    norms."""
    own = list(module.parameters(recurse=False))
    return "Norm" in type(module).__name__ and bool(own) and all(p.ndim == 1 for p in own)


def tensor_plan(
    model: nn.Module, base: Any, output: nn.Module, experts: Collection[nn.Module], found: Sharded
) -> dict[str, str]:
    """Return every parameter's style; without regions, only of those that need no sharding."""
    named: dict[str, str] = {}
    kinds = {module: found.styles.get(path, "replicate") for path, module in base.named_modules()}
    for path, module in model.named_modules():
        own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if module is output or isinstance(module, nn.Embedding):
            named |= dict.fromkeys(own, "vocab")
        elif module in experts:
            named |= dict.fromkeys(own, "expert")
        elif is_norm(module):
            named |= dict.fromkeys(own, "norm")
        elif found.regions:
            named |= dict.fromkeys(own, STYLES[kinds.get(module, "replicate")])
    if found.regions:
        start = next(path for path, module in model.named_modules() if module is base)
        sharded_ones = (path for path, _ in base.named_parameters() if path in found.styles)
        named |= {f"{start}.{path}": STYLES[found.styles[path]] for path in sharded_ones}
    return named


def prepare(
    base: Any, experts: Collection[nn.Module], found: Sharded, readers: Collection[nn.Module] = ()
) -> None:
    """Set the tensor-parallel method of modules whose class does not define it.

    Args:
        readers: blocks that use the weight of a Linear inside them directly, as some routers do.
    """
    whole = {base.get_submodule(path) for path in found.whole}
    for path, module in base.named_modules():
        style = found.styles.get(path, "replicate")
        if style in (GATHERED, SPLIT):
            module.tensor_parallel = partial(_cut, module, style)
        elif module in whole:
            module.tensor_parallel = partial(_on_whole_rows, module)
        elif module in readers:
            module.tensor_parallel = partial(_whole, module, linears=True)
        elif module in experts or next(module.parameters(recurse=False), None) is None:
            continue
        elif is_norm(module) or (
            style == "replicate" and type(module) is not nn.Linear and not isinstance(module, nn.Embedding)
        ):
            module.tensor_parallel = partial(_whole, module)


def _whole(module: nn.Module, group: Group, style: str | None, *, linears: bool = False) -> None:
    """Use local parameters; called by the `decoder` plan, since transformers has many classes of norms and
    routers."""
    with_local_parameters(module, linears=linears)


def _on_whole_rows(module: Any, group: Group, style: str | None) -> None:
    """Compute on whole rows; called by the `decoder` plan."""
    with_local_parameters(module)
    kind: Any = type(module)
    module.__class__ = _on_whole_rows_of(kind)
    module._tensor_group = group


@cache
def _on_whole_rows_of(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (_OnWholeRows, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _OnWholeRows(nn.Module):
    """Gathers its part of the sequence, computes all of it, and returns the same part."""

    _tensor_group: Group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group = self._tensor_group
        part = args[0] if args else kwargs["hidden_states"]
        rows = gather(part, SEQUENCE, group)
        # Some get the same tensor for queries, keys and values.
        args = tuple(rows if x is part else x for x in args)
        kwargs = {name: rows if x is part else x for name, x in kwargs.items()}
        out = super().forward(*args, **kwargs)
        mine = _first(out).chunk(group.size, SEQUENCE)[group.rank]
        return (mine, *out[1:]) if isinstance(out, tuple) else mine


def _cut(module: Any, declared: str, group: Group, style: str | None) -> None:
    """Shard the layer; called by the `decoder` plan."""
    module.__class__ = _Gathered if declared == GATHERED else _Split
    module._tensor_group = group


class _Gathered(nn.Linear):
    """Has some rows of the matrix, and gathers the outputs of all ranks."""

    _tensor_group: Group

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, local(self.weight), None if self.bias is None else local(self.bias))
        return gather(out, out.ndim - 1, self._tensor_group)


class _Split(nn.Linear):
    """Has some columns of the matrix, and uses its part of the replicated input."""

    _tensor_group: Group

    def forward(self, x: Tensor) -> Tensor:
        group = self._tensor_group
        part = x.chunk(group.size, -1)[group.rank]
        bias = None if self.bias is None else local(self.bias)
        if bias is not None and group.rank > 0:
            bias = bias * 0  # stays in the graph: its gradient here is zero, not missing
        return linear(part, local(self.weight), bias)
