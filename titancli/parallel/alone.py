"""One rank: nothing is sharded, gathered or reduced, so FSDP2 is left out, and its casts with its copies.

Parameters stay as they are stored. Where they are computed with in another dtype, they are cast where a
forward uses them, inside the block: where activations are made again in backward, so are the casts, and no
copies are kept. Gradients come back through the cast, and are summed in the dtype of the parameters, or
where micro-batches are accumulated unsharded in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Have every module of a model find its parameters in this dtype, as attributes; `named_parameters` has
    them as they are stored."""
    for module in model.modules():
        names = tuple(
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype
        )
        if names:
            kind: Any = type(module)
            module.__class__ = _casting(kind, names, dtype)


@contextmanager
def summed_in_float32(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Sum the gradients of several backwards in float32 where parameters are stored in less, as FSDP2 does
    until it reduces them; sharded parameters are left to it.

    Yields:
        What is to be called after each backward. If one raises, the gradients are those of before.
    """
    parameters = [
        p
        for p in model.parameters()
        if p.requires_grad and p.dtype != torch.float32 and not isinstance(p, DTensor)
    ]
    before = [p.grad for p in parameters]
    sums: list[Tensor | None] = [None] * len(parameters)

    def add() -> None:
        for place, p in enumerate(parameters):
            if p.grad is not None:
                total = sums[place]
                sums[place] = p.grad.float() if total is None else total.add_(p.grad)
                p.grad = None

    for p in parameters:
        p.grad = None
    try:
        yield add
    except BaseException:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
        raise
    for p, gradient, total in zip(parameters, before, sums, strict=True):
        made = None if total is None else total.to(p.dtype)
        p.grad = made if gradient is None else gradient if made is None else gradient + made


@contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """Cast the parameters once, for all forwards inside; without gradients."""
    made: dict[int, Tensor] = {}  # a tied one once
    with _given(model, lambda module: {name: _cast_once(module, name, made) for name in module.cast_names}):
        yield


@contextmanager
def as_stored(model: nn.Module) -> Iterator[None]:
    """Have attributes be the parameters themselves inside, for code that writes into them: what is written
    into a cast is lost."""
    with _given(model, lambda module: module._parameters):
        yield


@contextmanager
def _given(model: nn.Module, attributes: Callable[[Any], dict[str, Any]]) -> Iterator[None]:
    modules = [module for module in model.modules() if isinstance(module, _Casting)]
    try:
        for module in modules:
            module.casts = attributes(module)
        yield
    finally:
        for module in modules:
            module.casts = None


def _cast_once(module: Any, name: str, made: dict[int, Tensor]) -> Tensor:
    parameter = module._parameters[name]
    if id(parameter) not in made:
        made[id(parameter)] = parameter.detach().to(module.cast_dtype)
    return made[id(parameter)]


class _Casting(nn.Module):
    """What such a module's class is derived from."""

    cast_names: tuple[str, ...] = ()
    cast_dtype: torch.dtype = torch.float32
    casts: dict[str, Any] | None = None
    """What attributes are, by name; None: each is cast where it is used."""


@cache
def _casting(kind: Any, names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    facts = {"__module__": kind.__module__, "__doc__": kind.__doc__, "cast_dtype": dtype}
    properties = {name: property(_getter(name)) for name in names}
    return type(kind.__name__, (_Casting, kind), {**facts, "cast_names": names, **properties})


def _getter(name: str) -> Callable[[Any], Tensor]:
    def get(module: Any) -> Tensor:
        if module.casts is not None:
            found: Tensor = module.casts[name]
            return found
        return module._parameters[name].to(module.cast_dtype)

    return get
