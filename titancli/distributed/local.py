"""This rank's shard of a parameter, and of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from titancli.distributed.collectives import Group, gather, gather_same, sum_same
from titancli.distributed.private import offsets_of as offsets_of
from titancli.distributed.private import sharded_as as sharded_as
from titancli.errors import TitanError

SEQUENCE = 1
"""The dimension of [B, S, dim] that is cut between the blocks."""
Slot = tuple[dict[str, Any], str, Any]
"""A parameter, with the dict of a module that has it, and its name there."""
T = TypeVar("T")


# ------------------------------------------------------------------------------------------------ parameters


def local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, for computing on local tensors.

    A whole parameter meets other tokens or other heads on each rank, so its gradient there is part of a sum.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    partial_where_whole = [Partial() if p.is_replicate() else p for p in parameter.placements]
    return parameter.to_local(grad_placements=partial_where_whole)


def with_local_parameters(module: Any, *, linears: bool = False) -> None:
    """Have a module's own forward find local parameters, whatever it does with them: for one that works on
    single tokens, and whose parameters stay whole.

    Args:
        linears: also those of every Linear in it; they must be gathered together with the module's own.
    """
    kind: Any = type(module)
    module.__class__ = _local_of(kind, linears)


@cache
def _local_of(kind: Any, linears: bool) -> type[nn.Module]:
    @wraps(kind.forward)  # so that it can still be asked what it takes
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside = self.modules() if linears else ()
        owners = [self, *(module for module in inside if isinstance(module, nn.Linear))]
        kept = slots(owners, lambda parameter: isinstance(parameter, DTensor))
        if not kept:  # they are local already: see on_local_parameters
            return kind.forward(self, *args, **kwargs)
        return call_with(kept, local, kind.forward, self, *args, **kwargs)

    named = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**named, "forward": forward})


def slots(modules: Iterable[nn.Module], wanted: Callable[[Any], bool]) -> list[Slot]:
    """Return where modules have the parameters that are wanted, as they are now: FSDP2 puts other objects in
    their place between two calls."""
    return [
        (module._parameters, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if wanted(parameter)
    ]


def call_with(
    kept: Sequence[Slot],
    value: Callable[[Any], Any],
    function: Callable[..., T],
    /,
    *args: Any,
    **kwargs: Any,
) -> T:
    """Call a function that finds `value(parameter)` in place of each parameter; afterwards, or after an
    error, they are back."""
    try:
        for parameters, name, parameter in kept:
            # No nn.Parameter, but what autograd leads from here to the parameter.
            parameters[name] = value(parameter)
        return function(*args, **kwargs)
    finally:
        for parameters, name, parameter in kept:
            parameters[name] = parameter


# ------------------------------------------------------------------------------------------------------ rows


class RowCut:
    """The pieces of every row that this rank has."""

    def __init__(self, group: Group, *, head_tail: bool) -> None:
        self.group = group
        self.pieces = 2 * group.size if head_tail else group.size
        self.mine = self._of(group.rank)
        """The numbers of this rank's pieces, in the order in which it has them."""

    def _of(self, rank: int) -> tuple[int, ...]:
        return (rank,) if self.pieces == self.group.size else (rank, self.pieces - 1 - rank)

    def queries(self, length: int) -> list[range] | None:
        """Return the positions of a row whose attention this rank computes, piece by piece; None: it gets
        whole rows of some heads."""
        if self.pieces == self.group.size:
            return None
        each = length // self.pieces
        return [range(number * each, (number + 1) * each) for number in self.mine]

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of whole rows.

        Raises:
            TitanError: the rows cannot be cut into equal pieces.
        """
        if x.shape[dim] % self.pieces:
            raise TitanError(
                f"a row of {x.shape[dim]} cannot be split into {self.pieces} equal parts",
                hint=f"under mesh.cp = {self.group.size} the length of rows must be a multiple of "
                f"{self.pieces}",
            )
        return self.part(x, self.group.rank, dim)

    def part(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return a rank's part of whole rows."""
        pieces = x.chunk(self.pieces, dim)
        return torch.cat([pieces[number] for number in self._of(rank)], dim)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, in document order. Every rank goes on to compute the same with them,
        and backward keeps this rank's part of the gradient."""
        return self.in_order(gather_same(x, 0, self.group), dim)

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """Return the result of `join`, for ranks that then compute different things: backward sums over
        the ranks."""
        return self.in_order(gather(x, 0, self.group), dim)

    def in_order(self, stacked: Tensor, dim: int) -> Tensor:
        """Whole rows, of the parts of all ranks along dimension 0."""
        found: dict[int, Tensor] = {}
        for rank, part in enumerate(stacked.chunk(self.group.size)):
            numbers = self._of(rank)
            found |= dict(zip(numbers, part.chunk(len(numbers), dim), strict=True))
        return torch.cat([found[number] for number in range(self.pieces)], dim)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' values; every rank goes on to compute the same with it."""
        return sum_same(x, self.group)

    def inputs(self, inputs: Mapping[str, Tensor], sequence_dim: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the inputs of a model's forward with their rows cut, and with `positions`, which a part of a
        row needs.

        Args:
            inputs: by name; rows come first.
            sequence_dim: which dimension of an input runs along the sequence; others stay whole.

        Raises:
            TitanError: the model takes no positions, or the rows cannot be cut.
        """
        inputs = dict(inputs)
        if "positions" not in inputs:
            if "positions" not in sequence_dim:
                raise TitanError("with mesh.cp a model needs `positions` in its sequence_dim")
            some = next(name for name in inputs if name in sequence_dim)
            counted = torch.arange(inputs[some].shape[sequence_dim[some]], device=inputs[some].device)
            inputs["positions"] = counted.expand(inputs[some].shape[0], -1)
        cut = {name: self.cut(x, sequence_dim[name]) for name, x in inputs.items() if name in sequence_dim}
        return {**inputs, **cut}


@dataclass(frozen=True)
class NestedCut:
    """Rows that are cut twice: by `outer`, and the parts of that by `inner`."""

    outer: RowCut
    inner: RowCut

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of whole rows; see `RowCut.cut`."""
        return self.inner.cut(self.outer.cut(x, dim), dim)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return whole rows from the parts of all ranks; see `RowCut.join`."""
        return self.outer.join(self.inner.join(x, dim), dim)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' values; see `RowCut.sum`."""
        return self.outer.sum(self.inner.sum(x))
