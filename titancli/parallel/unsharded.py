"""Parameters that no other rank has a shard or a replica of, on one rank and under tensor and pipeline
parallelism alone: FSDP2 has nothing to gather or to reduce, and is left out, and its casts with its copies.

Parameters stay as they are stored. Where they are computed with in another dtype, they are cast where a
forward uses them, inside the block: where activations are made again in backward, so are the casts, and no
copies are kept. A pipeline, whose micro-batches are in flight together, casts once for all of them. Gradients
come back through the cast, and are summed in the dtype of the parameters, or where micro-batches are
accumulated unsharded in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from titancli.distributed.local import local


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
    until it reduces them; its own are left to it.

    Yields:
        What is to be called after each backward. If one raises, the gradients are those of before.
    """
    parameters = [
        p
        for p in model.parameters()
        if p.requires_grad and p.dtype != torch.float32 and not isinstance(model, FSDPModule)
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


def whole_on_ranks(models: Iterable[nn.Module]) -> list[Any]:
    """Return the parameters that tensor parallelism keeps whole on each rank and FSDP2 does not hold."""
    return [
        p
        for model in models
        if not isinstance(model, FSDPModule)
        for p in model.parameters()
        if isinstance(p, DTensor) and p.placements == (Replicate(),)
    ]


@contextmanager
def summed_over_ranks(parameters: Iterable[Any]) -> Iterator[None]:
    """Sum the gradients of `whole_on_ranks` over ranks once, when all backwards inside are done, in float32
    and in one exchange. Collective.

    If one of them raises, these gradients are those of before.
    """
    parameters = [p for p in parameters if p.requires_grad]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
        _sum_over_ranks(parameters)
    except BaseException:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
        raise
    for p, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            p.grad = gradient if p.grad is None else gradient + p.grad


def _sum_over_ranks(parameters: Iterable[Any]) -> None:
    meshes: dict[Any, list[Any]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None and p.grad.placements != p.placements:
            meshes[p.device_mesh].append(p)
    for mesh, several in meshes.items():
        parts = [p.grad.to_local() for p in several]
        flat = torch.cat([part.float().flatten() for part in parts])
        dist.all_reduce(flat, group=mesh.get_group())
        for p, part, total in zip(several, parts, flat.split([part.numel() for part in parts]), strict=True):
            made = total.view_as(part).to(part.dtype)
            p.grad = DTensor.from_local(made, mesh, p.placements, run_check=False)


@contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """Cast the parameters once, for all forwards inside; their gradients are still those of each backward."""
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
        made[id(parameter)] = local(parameter).to(module.cast_dtype)
    return made[id(parameter)]


class _Casting(nn.Module):
    """Base of such a module's class."""

    cast_names: tuple[str, ...] = ()
    cast_dtype: torch.dtype = torch.float32
    casts: dict[str, Any] | None = None
    """Values of attributes, by name; None: this rank's shard of each is cast where it is used."""


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
        return local(module._parameters[name]).to(module.cast_dtype)

    return get
