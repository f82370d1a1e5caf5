"""How transformers' modules are cut by tensor parallelism: from the plan that transformers declares.

A module with a `rowwise` child is a region, entered with whole rows and left with a sum over the ranks
(`titancli.parallel.tensor`). What the plan says nothing of stays whole: outside of regions it works on single
tokens, of which each rank has others; within one, its gradient on each rank is a part of the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import linear

from titancli.distributed.collectives import gather
from titancli.distributed.local import local, with_local_parameters
from titancli.errors import RecipeError
from titancli.models.hf_causal_lm.theirs import hf_config

if TYPE_CHECKING:
    from titancli.distributed.collectives import Group

GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
STYLES = {
    "colwise": "column",
    "rowwise": "row",
    GATHERED: "column",
    SPLIT: "row",
    "replicated_with_grad_allreduce": "norm",
    "mla_kv_a_proj": "replicate",
    "replicate": "replicate",
}
"""transformers' ways to cut a module, by ours."""


def plan_fault(values: Mapping[str, Any]) -> str | None:
    """Why a model cannot be cut by tensor parallelism, as far as its config says; None: it may."""
    try:
        config = hf_config(values)
    except RecipeError as error:
        return error.message
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        return f"transformers declares no tensor parallel plan for {config.model_type}"
    of_experts = {pattern for pattern in plan if "experts" in pattern.split(".")}
    other = sorted({style for pattern, style in plan.items() if style not in STYLES} - {None})
    other = sorted({plan[pattern] for pattern in plan.keys() - of_experts} & set(other))
    if other:
        return (
            f"transformers' plan for {config.model_type} uses {', '.join(other)}, which titan does "
            f"not support"
        )
    return None


def modules_fault(config: Any, base: Any) -> str | None:
    """Why tensor parallelism would compute something else with these modules; None: nothing is known.

    Outside of regions each rank has a part of every row: attention there would see that part alone, and an
    embedding there would look up whole rows.
    """
    styles = _declared(getattr(config, "base_model_tp_plan", None) or {}, base)
    within: set[nn.Module] = set()
    for path, module in base.named_modules():
        if any(STYLES[styles.get(child, "replicate")] == "row" for child in module.children()):
            if module in within:
                return f"in transformers' plan for {config.model_type}, {path} is within what is sharded"
            within |= set(module.modules())
    for path, module in base.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Embedding) and module is not base.get_input_embeddings():
            return f"{config.model_type}: {path} ({kind}) is a second embedding, which titan does not shard"
        if (hasattr(module, "core_attention") or hasattr(module, "is_causal")) and module not in within:
            return f"transformers' plan for {config.model_type} does not shard its attention ({kind})"
    return None


def is_norm(module: nn.Module) -> bool:
    """Whether it norms single tokens, or heads; by its name, as transformers itself finds them."""
    own = list(module.parameters(recurse=False))
    return "Norm" in type(module).__name__ and bool(own) and all(p.ndim == 1 for p in own)


def tensor_plan(
    config: Any, model: nn.Module, base: Any, output: nn.Module, experts: Collection[nn.Module]
) -> dict[str, str]:
    """Every parameter's style, from the plan that transformers declares for a base's modules; where it
    declares none, those that need none."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    found: dict[str, str] = {}
    styles = _declared(plan, base)
    for path, module in model.named_modules():
        own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if module in (output, base.get_input_embeddings()):
            found |= dict.fromkeys(own, "vocab")
        elif module in experts:
            found |= dict.fromkeys(own, "expert")
        elif is_norm(module):
            found |= dict.fromkeys(own, "norm")
        elif plan:
            found |= dict.fromkeys(own, STYLES[styles.get(module, "replicate")])
    return found


def prepare(config: Any, base: Any, experts: Collection[nn.Module]) -> None:
    """Tell modules what tensor parallelism is to do with them, where it does not know by their class."""
    styles = _declared(getattr(config, "base_model_tp_plan", None) or {}, base)
    for module in base.modules():
        style = styles.get(module, "replicate")
        if style in (GATHERED, SPLIT):
            module.tensor_parallel = partial(_cut, module, style)
        elif module in experts or next(module.parameters(recurse=False), None) is None:
            continue
        elif is_norm(module) or (
            style == "replicate" and type(module) is not nn.Linear and not isinstance(module, nn.Embedding)
        ):
            module.tensor_parallel = partial(_whole, module)


def _declared(plan: Mapping[str, str], base: nn.Module) -> dict[nn.Module, str]:
    """transformers' style of each linear layer; an output that is gathered outside of a region is not cut."""
    found: dict[nn.Module, str] = {}
    for path, parent in base.named_modules():
        within: dict[nn.Module, str] = {}
        for name, child in parent.named_children():
            place = f"{path}.{name}" if path else name
            style = next((style for pattern, style in plan.items() if fnmatchcase(place, pattern)), None)
            if isinstance(child, nn.Linear) and style in STYLES:
                within[child] = style
        region = any(STYLES[style] == "row" for style in within.values())
        found |= {
            child: "replicate" if style == GATHERED and not region else style
            for child, style in within.items()
        }
    return found


def _whole(module: nn.Module, group: Group, style: str | None) -> None:
    """Called by the `decoder` plan: transformers has many classes of norms and routers."""
    with_local_parameters(module)


def _cut(module: Any, declared: str, group: Group, style: str | None) -> None:
    """Called by the `decoder` plan."""
    module.__class__ = _Gathered if declared == GATHERED else _Split
    module._tensor_group = group


class _Gathered(nn.Linear):
    """Has some rows of the matrix, and gives what all ranks have made."""

    _tensor_group: Group

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, local(self.weight), None if self.bias is None else local(self.bias))
        return gather(out, out.ndim - 1, self._tensor_group)


class _Split(nn.Linear):
    """Has some columns of the matrix, and takes its part of what all ranks have."""

    _tensor_group: Group

    def forward(self, x: Tensor) -> Tensor:
        group = self._tensor_group
        part = x.chunk(group.size, -1)[group.rank]
        bias = None if self.bias is None else local(self.bias)
        if bias is not None and group.rank > 0:
            bias = bias * 0  # keeps its place in the graph: its gradient here is zero, not missing
        return linear(part, local(self.weight), bias)
