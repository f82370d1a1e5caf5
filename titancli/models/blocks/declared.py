"""Declarations of a decoder's modules about their parameters: tensor-parallel sharding, and roles for
optimizers; and of custom operators.

A module declares `styles` and `roles` by the names of its own parameters and of its children. Norms are
replicated unless they declare otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from torch import nn
from torch.library import CustomOpDef

NORMS = {"weight": "norm", "bias": "norm"}
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}
"""The implementations of declared operators, see `declare_operator`."""
KEPT: set[Any] = set()
"""Declared operators whose results activation checkpointing by operation keeps."""


def declare_operator(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Declare an expensive operator and its backward, whose temporaries exceed their results.

    The memory planner runs their implementations, since dispatch modes do not see temporaries; activation
    checkpointing by operation keeps the results of `forward`.
    """
    IMPLEMENTATIONS.update({op._opoverload: op._init_fn for op in (forward, backward)})
    KEPT.add(forward._opoverload)


def declared(model: nn.Module, what: Literal["styles", "roles"]) -> dict[str, Any]:
    """Return the declarations about a decoder's parameters, by name pattern; one pattern stands for all
    blocks."""
    return {re.sub(r"^layers\.\d+\.", "layers.*.", name): value for name, value in _all(model, what)}


def _all(model: nn.Module, what: str) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        norm = what == "styles" and isinstance(module, nn.RMSNorm | nn.LayerNorm)
        known: Mapping[str, Any] = getattr(module, what, NORMS if norm else {})
        for name, value in known.items():
            child = getattr(module, name, None)
            inside = (
                [f"{name}.{own}" for own, _ in _parameters(child)] if isinstance(child, nn.Module) else [name]
            )
            for one in inside if child is not None else ():
                yield f"{path}.{one}".removeprefix("."), value


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False)
