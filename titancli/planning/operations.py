"""Operations on one rank, one by one: what each keeps, makes and costs.

A closed form says of each how many bytes autograd keeps for it, how large its result and its gradients are,
what its backward takes beside them, its arithmetic and its traffic. `titancli.planning.blocks` says of which
a block consists. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from titancli.planning.workload import Workload

FP32 = 4
READS = 1.5
"""Tensors that an elementwise operation reads for each that it writes: one or two."""
Dimension = Literal["tp", "cp", "ep"]


@dataclass(frozen=True)
class Operation:
    """One operation, or several that belong together."""

    result: str = ""
    """A name for what it makes. A name stands for one tensor, which is counted once."""
    size: float = 0.0
    """Of the result."""
    saves: Mapping[str, float] = field(default_factory=dict)
    """What autograd holds for backward."""
    keeps: tuple[str, ...] = ()
    """What selective activation checkpointing ("op") holds, of the result and of what is saved."""
    done: float = 0.0
    """Of gradients that are gone after its backward: its result's, save where the residual stream has
    that."""
    gradients: float = 0.0
    """Of what it reads, as far as backward makes new ones."""
    weights: float = 0.0
    """Of the gradients of its weights."""
    beside: float = 0.0
    """That backward takes beside all of these."""
    flops: float = 0.0
    """Of forward."""
    backward_flops: float = 0.0
    moved: float = 0.0
    """Read and written in forward."""
    backward_moved: float = 0.0
    kind: Literal["product", "grouped", "attention", "elementwise", "collective"] = "elementwise"
    sends: tuple[Dimension, float] | None = None
    """A collective: the mesh dimension, and the bytes of the whole (gathered) tensor; the same back."""
    part: str = ""
    """The part of the block that activation checkpointing by op runs again as one; "": it is never run
    again."""
    enters: str = ""
    """What its part is given, which stays with what the part keeps; of a part's first operation."""
    alive: float = 0.0
    """Results that are there in forward beside what is saved, where these are many."""
    inside: float = 0.0
    """That forward takes while it runs, save where its result has been kept."""


def linear(
    result: str,
    x: str,
    tokens: float,
    read: float,
    made: float,
    c: int,
    *,
    matrices: float = 1,
    adds: bool = False,
    residual: bool = False,
) -> Operation:
    """A product with a matrix.

    Args:
        matrices: that lie on this rank (experts), each for its share of the tokens.
        adds: the gradient of x is there from another one that reads it, and this one's is added.
        residual: the gradient of the result is that of the residual stream, and stays.
    """
    size, weights, out = tokens * read * c, matrices * read * made * c, tokens * made * c
    flops, moved = 2.0 * tokens * read * made, size + out + weights
    return Operation(
        result,
        out,
        saves={x: size},
        done=0.0 if residual else out,
        gradients=0.0 if adds else size,
        weights=weights,
        beside=size if adds else 0.0,
        flops=flops,
        backward_flops=2 * flops,
        moved=moved,
        backward_moved=2 * moved,
        kind="product",
    )


def _elementwise(work: Workload, fused: float, writes: tuple[float, float], one: Operation) -> Operation:
    """With what it moves: one kernel for all of it `fused` bytes forward, and twice as many backward; kernels
    of its own read more than they write."""
    if work.engine == "compiled":
        return replace(one, moved=fused, backward_moved=2 * fused)
    return replace(one, moved=(1 + READS) * writes[0], backward_moved=(1 + READS) * writes[1])


def norm(
    x: str,
    result: str,
    tokens: float,
    width: float,
    work: Workload,
    *,
    residual: bool = False,
    weight: bool = True,
    plain: bool = False,
) -> Operation:
    """RMSNorm. On a CPU torch has no kernel for it but does it step by step, in fp32, and keeps more. One by
    1 + weight is in fp32 everywhere: `titancli.models.blocks.norm`.

    `plain`: it is by its weight also where the model's others are not.
    `residual`: the stream that passes the norm by has a gradient already, and both are added.
    """
    own, full, rstd = tokens * width * work.compute, tokens * width * FP32, tokens * FP32
    saves, beside = {x: own}, own
    if work.engine == "cpu":
        cast = work.compute < FP32
        saves = {f"fp32 {x}" if cast else x: full} | ({f"hat {x}": full} if weight else {})
        beside = 4 * full - own if cast else 3 * full
    elif work.engine == "gpu" and work.compute < FP32 and work.shape.zero_centred and not plain:
        saves, beside = {f"fp32 {x}": full}, 2 * full
    gradients = 0.0 if residual else own
    one = Operation(
        result,
        own,
        saves={**saves, f"rstd {x}": rstd},
        done=own,
        gradients=gradients,
        weights=width * work.compute if weight else 0.0,
        beside=beside,
    )
    return _elementwise(work, 2 * own, (own, 2 * own), one)


def token_ahead(work: Workload) -> Iterator[Operation]:
    """What multi-token prediction makes a block's input of; the embeddings are counted where they are made,
    and the norm that follows the block with the final norm."""
    tokens, dim, c = work.stream_tokens, work.shape.dim, work.compute
    both = 2 * tokens * dim * c
    embedded = norm("embedded", "e", tokens, dim, work)
    yield replace(embedded, saves={k: size for k, size in embedded.saves.items() if k != "embedded"})
    yield norm("hidden", "h", tokens, dim, work, residual=True)
    yield Operation("e, h", both, done=both, gradients=both, moved=2 * both, backward_moved=2 * both)
    yield linear("x", "e, h", tokens, 2 * dim, dim, c, residual=True)


def rotation(numbers: float, work: Workload) -> Operation:
    """Rotary embedding, in fp32: `titancli.models.blocks.rope.rotate`. Autograd needs the angles only."""
    full, own = numbers * FP32, numbers * work.compute
    cast = work.compute < FP32
    most = 0.0 if work.engine == "compiled" else (3 if cast else 2) * full
    one = Operation(done=own, gradients=own, beside=max(0.0, most - cast * own), alive=most)
    return _elementwise(work, 2 * own, ((3 + 2 * cast) * full + own, (3.5 + 2 * cast) * full + own), one)


def joined(size: float, part: Operation) -> Operation:
    """A part that was worked on and is put back; backward puts the gradients of the parts together."""
    return replace(
        part,
        done=size,
        gradients=size,
        moved=part.moved + 2 * size,
        backward_moved=part.backward_moved + 4 * size,
    )


def scaled(numbers: float, work: Workload) -> Operation:
    """Each vector times an fp32 number of its own, which needs no gradient."""
    full, own = numbers * FP32, numbers * work.compute
    cast = work.compute < FP32 and work.engine != "compiled"
    one = Operation(done=own, gradients=own, beside=2 * full - own if cast else 0.0)
    return _elementwise(work, 2 * own, (own + cast * full, own + 2 * cast * full), one)


def swish_times(
    gate: str, up: str, inner: str, numbers: float, work: Workload
) -> tuple[list[Operation], Operation]:
    """`silu(gate) * up`: what may stand before the product that makes `up`, and the rest."""
    size = numbers * work.compute
    if work.engine == "compiled":
        fused = Operation(
            inner,
            size,
            saves={gate: size, up: size},
            done=size,
            gradients=2 * size,
            moved=3 * size,
            backward_moved=5 * size,
        )
        return [], fused
    act = f"silu {gate}"
    silu = Operation(
        act, size, saves={gate: size}, done=size, gradients=size, moved=2 * size, backward_moved=3 * size
    )
    times = Operation(
        inner,
        size,
        saves={act: size, up: size},
        done=size,
        gradients=2 * size,
        moved=3 * size,
        backward_moved=6 * size,
    )
    return [silu], times


def joined_swish_times(numbers: float, work: Workload, *, clamped: bool) -> list[Operation]:
    """The same of the two halves of one tensor; a clamped one keeps nothing else."""
    size = numbers * work.compute
    fused = work.engine == "compiled"
    one = Operation(
        "e inner",
        size,
        saves={"both": 2 * size},
        done=size,
        gradients=2 * size,
        beside=5 * size if clamped and not fused else 0.0,
        moved=(3 if fused else 12) * size,
        backward_moved=(5 if fused else 36) * size,
    )
    if fused or clamped:
        return [one]
    (silu,), times = swish_times("both", "both", "e inner", numbers, work)
    silu = replace(silu, saves={"both": 2 * size}, done=2 * size, gradients=2 * size, beside=size)
    return [
        replace(silu, backward_moved=7 * size),
        replace(times, saves={"silu both": size, "both": 2 * size}),
    ]


def ordered(result: str, size: float) -> Operation:
    """Rows in another order."""
    return Operation(result, size, done=size, gradients=size, moved=2 * size, backward_moved=3 * size)


def add(work: Workload) -> Operation:
    """To the residual stream, whose gradient goes to both sides as it is; the norm that reads it adds up."""
    return Operation(moved=(1 if work.engine == "compiled" else 3) * work.stream)


# ------------------------------------------------------------------------------------------- collectives


def gather(result: str, size: float, over: Dimension, ranks: int) -> Operation:
    """The pieces of all ranks joined, `size` in all; backward sums up and cuts (`parallel.collectives`)."""
    return Operation(
        result, size, done=size, gradients=size / ranks, beside=size, kind="collective", sends=(over, size)
    )


def scatter(result: str, size: float, ranks: int) -> Operation:
    """The sum over all ranks, of which each keeps its piece; backward gathers."""
    return Operation(
        result,
        size / ranks,
        keeps=(result,),
        gradients=size,
        beside=size,
        kind="collective",
        sends=("tp", size),
    )


def exchange(result: str, size: float, over: Dimension) -> Operation:
    """Every rank's part against every other's (all-to-all), both ways."""
    return Operation(
        result, size, keeps=(result,), done=size, gradients=size, kind="collective", sends=(over, size)
    )
