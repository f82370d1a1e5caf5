"""The role of each parameter of a model, for optimizers that treat matrices differently (Muon)."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from titancli.models.loss import of_loss
from titancli.protocols import Role


def roles_of(model: Any) -> dict[str, Role]:
    """Return the role of every parameter by name: as declared by the model's `roles`; otherwise `embedding`
    and `output` by module (a tied weight is the embedding's; a loss's are `output`), `matrix` for parameters
    of linear layers and stacks of experts, and `other` for the rest.

    Call it before the model is split into stages or sharded: it depends on which modules share a parameter.
    """
    declared = model.roles
    by_module: dict[int, Role] = {}
    for parameter, role in _by_module(model):
        by_module.setdefault(id(parameter), role)
    found: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        by_name = (role for pattern, role in declared.items() if fnmatchcase(name, pattern))
        usual: Role = "output" if of_loss(name) else by_module.get(id(parameter), "other")
        found[name] = next(by_name, usual)
    return found


def _by_module(model: Any) -> Iterator[tuple[nn.Parameter, Role]]:
    """Yield roles by module; the first role of a parameter counts."""
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
    """Return whether it is a matrix or a stack of matrices, and not a single row or column."""
    return parameter.ndim == dims and min(parameter.shape[-2:]) > 1
