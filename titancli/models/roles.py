"""What each parameter of a model is to hidden states, for optimizers that treat matrices as such (Muon)."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from titancli.protocols import ModelDefaults, Role
from titancli.registry.defaults import with_defaults


def roles_of(model: Any) -> dict[str, Role]:
    """Return the role of every parameter, by name: what the model's `roles` declares. Where that is silent,
    `embedding` and `output` by the modules that have them (a tied weight is the embedding's), `matrix` for
    parameters of linear layers and stacks of experts, `other` for the rest.

    To be asked before the model is split into stages or sharded: it goes by which modules share a parameter.
    """
    declared = with_defaults(ModelDefaults, model).roles
    by_module: dict[int, Role] = {}
    for parameter, role in _by_module(model):
        by_module.setdefault(id(parameter), role)
    found: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        by_name = (role for pattern, role in declared.items() if fnmatchcase(name, pattern))
        found[name] = next(by_name, by_module.get(id(parameter), "other"))
    return found


def _by_module(model: Any) -> Iterator[tuple[nn.Parameter, Role]]:
    """Roles that follow from modules; of a parameter's the first counts."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield from ((parameter, "embedding") for parameter in module.parameters(recurse=False))
    yield from ((parameter, "output") for parameter in model.output.parameters())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield from ((p, "matrix") for p in module.parameters(recurse=False) if _is_matrix(p, 2))
    for module in model.experts.values():
        yield from ((p, "matrix") for p in module.parameters(recurse=False) if _is_matrix(p, 3))


def _is_matrix(parameter: nn.Parameter, dims: int) -> bool:
    """Whether it is a matrix, or a stack of them, and no row or column alone."""
    return parameter.ndim == dims and min(parameter.shape[-2:]) > 1
