"""Roles of transformers' parameters for optimizers, where `titancli.models.roles` cannot infer them from
their classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from titancli.models.blocks.moe import Experts

if TYPE_CHECKING:
    from titancli.protocols import Role


def declared_roles(model: nn.Module, theirs: Any) -> Iterator[tuple[str, Role]]:
    """Yield names and roles of parameters: of routers, whose class transformers names to record their logits,
    or which are beside experts and have as many outputs; and of its own linear layers.

    Args:
        theirs: transformers' model of these modules.
    """
    from transformers.pytorch_utils import Conv1D

    routers = tuple(_recorded(theirs))
    for path, module in model.named_modules():
        if isinstance(module, routers) and not _is_block(module):
            yield from ((f"{path}.{name}", "router") for name, _ in module.named_parameters())
        elif isinstance(module, Conv1D):
            yield f"{path}.weight", "matrix"
        counts = {child.num_experts for child in module.children() if isinstance(child, Experts)}
        for key, child in module.named_children() if counts else ():
            if isinstance(child, nn.Linear) and child.out_features in counts:
                yield from ((f"{path}.{key}.{name}", "router") for name, _ in child.named_parameters())


def _recorded(theirs: Any) -> Iterator[Any]:
    """Yield the classes whose outputs transformers records as router logits."""
    for module in theirs.modules():  # declared by the whole model or by the base
        classes = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits", ())
        for one in classes if isinstance(classes, (list, tuple)) else (classes,):
            yield getattr(one, "target_class", one)


def _is_block(module: nn.Module) -> bool:
    """Return whether it contains more than a router: for some models, transformers records a whole block's
    output."""
    children = list(module.children())
    return any(isinstance(child, (nn.Embedding, Experts)) or list(child.children()) for child in children)
