"""How transformers' modules are cut by tensor parallelism: from the plan that transformers declares."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from titancli.errors import RecipeError
from titancli.models.hf_causal_lm.theirs import hf_config

STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "norm"}
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
    other = sorted({style for style in plan.values() if style not in STYLES})
    if other:
        return (
            f"transformers' plan for {config.model_type} uses {', '.join(other)}, which titan does "
            f"not support"
        )
    return None


def is_norm(module: nn.Module) -> bool:
    """Whether it norms single tokens, or heads; by its name, as transformers itself finds them."""
    own = list(module.parameters(recurse=False))
    return "Norm" in type(module).__name__ and bool(own) and all(p.ndim == 1 for p in own)


def tensor_plan(config: Any, model: nn.Module, base: Any, output: nn.Module) -> dict[str, str]:
    """Every parameter's style, from the plan that transformers declares for a base's modules.

    What it says nothing of, and is no norm, is left out: tensor parallelism then refuses it by name.
    """
    plan = getattr(config, "base_model_tp_plan", None) or {}
    declared = {pattern: STYLES[style] for pattern, style in plan.items() if style in STYLES}
    paths = {module: path for path, module in base.named_modules()}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        place = paths.get(module, "")
        style = next((style for pattern, style in declared.items() if fnmatchcase(place, pattern)), None)
        if module in (output, base.get_input_embeddings()):
            found |= dict.fromkeys(own, "vocab")
        elif is_norm(module):
            found |= dict.fromkeys(own, "norm")
        elif style is not None and isinstance(module, nn.Linear):
            found |= dict.fromkeys(own, style)
    return found
