"""Each collective, forward and backward, eager and compiled, against what one process computes.

The reference does with plain tensor operations what all ranks together do, and lets autograd have its way: it
sees how every rank uses the result, and so what the gradient of each rank's input is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from titancli.distributed import collectives
from titancli.distributed.collectives import Group

pytestmark = pytest.mark.ranks

WORLD = 3
SHAPE = (6, 3, 9)
PIECES = {0: (2, 3, 9), 1: (6, 1, 9), 2: (6, 3, 3)}
"""What a rank has of SHAPE, cut along each dimension."""
SPLITS = [[1, 0, 3], [2, 2, 0], [0, 4, 1]]
"""How many rows each rank sends to each."""


def draw(name: str, rank: int, shape: tuple[int, ...]) -> Tensor:
    """The same numbers wherever they are asked for."""
    generator = torch.Generator().manual_seed(100 * rank + sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def used(x: Tensor, rank: int) -> Tensor:
    """Something that each rank computes in its own way."""
    places = torch.arange(x.numel()).view(x.shape)
    return (x.sin() * (places * 0.37 + rank).cos()).sum()


def used_alike(x: Tensor) -> Tensor:
    """Something that all ranks compute in the same way."""
    return used(x, 0)


# -------------------------------------------------------------------------------------- what ranks run


def run(
    call: str, shape: tuple[int, ...], args: tuple[Any, ...], alike: bool, mode: str
) -> tuple[Tensor, Tensor]:
    """One rank's result, and the gradient of its input.

    Args:
        call: a function of `collectives`; called as call(x, *args with the group in the place of "group").
    """
    group = Group.of(torch.distributed.group.WORLD)
    rank = group.rank
    function = getattr(collectives, call)
    given = [group if arg == "group" else arg[rank] if isinstance(arg, list) else arg for arg in args]

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        # Work before and after, so that a compiled graph has something to order.
        out = function(x * 2, *given)
        return out, used_alike(out + 1) if alike else used(out + 1, rank)

    if mode != "eager":
        torch._dynamo.reset()
        step = torch.compile(step, backend=mode, fullgraph=True)
    x = draw("input", rank, shape if isinstance(shape, tuple) else shape[rank]).requires_grad_()
    out, loss = step(x)
    loss.backward()
    return out.detach(), x.grad


# ------------------------------------------------------------------------------------------- reference


def reference(
    shapes: list[tuple[int, ...]], together: Callable[[list[Tensor]], list[Tensor]], alike: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Every rank's result and gradient, by one process.

    Args:
        together: what all ranks have, to what all ranks get.
        alike: whether the loss is one that all ranks compute, or a sum over what each computes.
    """
    inputs = [draw("input", rank, shape).requires_grad_() for rank, shape in enumerate(shapes)]
    outs = together([x * 2 for x in inputs])
    if alike:
        used_alike(outs[0] + 1).backward()
    else:
        sum(used(out + 1, rank) for rank, out in enumerate(outs)).backward()
    return [out.detach() for out in outs], [x.grad for x in inputs]


def check(
    ranks, call: str, shapes: Any, args: tuple[Any, ...], together: Any, alike: bool, mode: str
) -> None:
    each = shapes if isinstance(shapes, list) else [shapes] * WORLD
    outs, grads = reference(each, together, alike)
    for (out, grad), expected_out, expected_grad in zip(
        ranks(WORLD, run, call, shapes, args, alike, mode), outs, grads, strict=True
    ):
        torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)


MODES = pytest.mark.parametrize("mode", ["eager", "aot_eager"])
DIMS = pytest.mark.parametrize("dim", [0, 1, 2])


@MODES
@DIMS
def test_gather(ranks, dim, mode):
    def together(xs: list[Tensor]) -> list[Tensor]:
        return [torch.cat(xs, dim)] * WORLD

    check(ranks, "gather", PIECES[dim], (dim, "group"), together, False, mode)


@pytest.mark.parametrize("call", ["gather", "gather_same", "reduce_scatter"])
def test_of_one_row_a_part_along_the_sequence(ranks, call):
    """As tensor parallel has it with one row: nothing is copied but by the collective."""

    def together(xs: list[Tensor]) -> list[Tensor]:
        return list(sum(xs).chunk(WORLD, 1)) if call == "reduce_scatter" else [torch.cat(xs, 1)] * WORLD

    check(ranks, call, (1, 6, 4), (1, "group"), together, call == "gather_same", "eager")
    assert ranks(WORLD, copies, call, (1, 6, 4)) == [0] * WORLD
    assert ranks(WORLD, copies, call, (2, 6, 4)) == [1] * WORLD


def copies(call: str, shape: tuple[int, ...]) -> int:
    """How often tensors are joined."""
    joined, cat = 0, torch.cat

    def counted(*args: Any) -> Tensor:
        nonlocal joined
        joined += 1
        return cat(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", counted)
        getattr(collectives, call)(torch.ones(shape), 1, Group.of(torch.distributed.group.WORLD))
    return joined


@MODES
@DIMS
def test_gather_same(ranks, dim, mode):
    def together(xs: list[Tensor]) -> list[Tensor]:
        return [torch.cat(xs, dim)] * WORLD

    check(ranks, "gather_same", PIECES[dim], (dim, "group"), together, True, mode)


@MODES
@DIMS
def test_reduce_scatter(ranks, dim, mode):
    def together(xs: list[Tensor]) -> list[Tensor]:
        return list(sum(xs).chunk(WORLD, dim))

    check(ranks, "reduce_scatter", SHAPE, (dim, "group"), together, False, mode)


@MODES
def test_sum_same(ranks, mode):
    check(ranks, "sum_same", SHAPE, ("group",), lambda xs: [sum(xs)] * WORLD, True, mode)


def exchanged(xs: list[Tensor], splits: list[list[int]]) -> list[Tensor]:
    sent = [x.split(sizes) for x, sizes in zip(xs, splits, strict=True)]
    return [torch.cat([pieces[rank] for pieces in sent]) for rank in range(WORLD)]


@MODES
def test_all_to_all_even(ranks, mode):
    even = [[2] * WORLD] * WORLD
    check(ranks, "all_to_all", SHAPE, ("group",), lambda xs: exchanged(xs, even), False, mode)


@MODES
def test_all_to_all_uneven(ranks, mode):
    """Also a rank that sends nothing to another."""
    received = [list(column) for column in zip(*SPLITS, strict=True)]
    shapes = [(sum(sizes), 3, 2) for sizes in SPLITS]
    args = ("group", received, SPLITS)
    check(ranks, "all_to_all", shapes, args, lambda xs: exchanged(xs, SPLITS), False, mode)


def reduced(op: str, mode: str) -> tuple[Tensor, bool]:
    group = Group.of(torch.distributed.group.WORLD)

    def step(x: Tensor) -> Tensor:
        return collectives.all_reduce(x * 2, op, group)

    if mode != "eager":
        torch._dynamo.reset()
        step = torch.compile(step, backend=mode, fullgraph=True)
    out = step(draw("input", group.rank, SHAPE).requires_grad_())
    return out.detach(), out.requires_grad


@MODES
@pytest.mark.parametrize("op", ["sum", "max"])
def test_all_reduce_has_no_gradient(ranks, op, mode):
    stacked = torch.stack([draw("input", rank, SHAPE) * 2 for rank in range(WORLD)])
    expected = stacked.sum(0) if op == "sum" else stacked.amax(0)
    for out, has_gradient in ranks(WORLD, reduced, op, mode):
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        assert not has_gradient


def keeps_its_input() -> bool:
    group = Group.of(torch.distributed.group.WORLD)
    x = draw("input", group.rank, SHAPE)
    before = x.clone()
    collectives.all_reduce(x, "sum", group)
    collectives.sum_same(x, group)
    return torch.equal(x, before)


def test_an_input_is_never_overwritten(ranks):
    assert ranks(WORLD, keeps_its_input) == [True] * WORLD


def strided() -> tuple[Tensor, Tensor]:
    """A transposed input, and an expanded gradient, as `sum` gives."""
    group = Group.of(torch.distributed.group.WORLD)
    x = draw("input", group.rank, (3, 6)).requires_grad_()
    out = collectives.reduce_scatter(x.t(), 0, group)
    out.sum().backward()
    return out.detach(), x.grad


def test_memory_in_any_order_will_do(ranks):
    summed = sum(draw("input", rank, (3, 6)) for rank in range(WORLD)).t()
    for rank, (out, grad) in enumerate(ranks(WORLD, strided)):
        torch.testing.assert_close(out, summed.chunk(WORLD)[rank])
        assert torch.equal(grad, torch.ones(3, 6))
