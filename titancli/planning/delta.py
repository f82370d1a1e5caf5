"""The operations of gated DeltaNet: `titancli.models.blocks.delta`. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from titancli.models.shape import DeltaNet
from titancli.planning.operations import FP32, Operation, exchange, linear, norm
from titancli.planning.workload import Workload

CHUNK = 64
"""Tokens whose products are computed together: `titancli.models.blocks.delta_rule`."""
WORKING = 256 * 2**20
"""Bytes by which that chooses how many key heads it computes together."""


def delta_operations(part: DeltaNet, work: Workload, x: str) -> Iterator[Operation]:
    """Of what is between the norm before it, `x`, and its last product."""
    c, tokens, tp = work.compute, work.tokens, work.degrees.tp
    heads, mixed = part.heads / tp, tokens * part.mixed / tp * c
    values, rates = tokens * heads * part.value_dim, tokens * heads * FP32
    made = part.mixed / tp + heads * part.value_dim
    yield linear("mixed, gate", x, tokens, work.shape.dim, made, c, adds=True)
    yield linear("steps", x, tokens, work.shape.dim, 2 * heads, c)
    saves = {"wide steps": 2 * rates, "kept": 2 * rates}
    yield Operation("rates", 2 * rates, saves=saves, done=2 * rates, gradients=2 * rates, moved=8 * rates)
    before, there = "mixed, gate", mixed
    if c < FP32:  # one tensor, which stays for the part that is convolved; else the gate is kept as it is
        there += values * c
    if work.degrees.cp > 1:
        yield exchange("whole rows", mixed, "cp")
        yield exchange("whole rates", 2 * rates, "cp")
        before, there = "whole rows", mixed
    yield Operation(
        "convolved",
        mixed,
        saves={before: there, "after zeros": mixed},
        done=mixed,
        gradients=mixed,
        beside=2 * mixed + 3 * mixed * FP32 / c,
        alive=3 * mixed * FP32 / c,
        moved=4 * mixed,
        backward_moved=8 * mixed,
    )
    yield Operation(
        "qkv",
        mixed,
        saves={"convolved": mixed},
        done=mixed,
        gradients=mixed,
        moved=2 * mixed,
        backward_moved=3 * mixed,
    )
    # As in attention, the scores are made again in backward; each chunk has them, and a step of the state.
    width = part.key_dim + part.value_dim
    flops = 2.0 * tokens * heads * (2 * CHUNK * width + part.key_dim * (part.key_dim + 4 * part.value_dim))
    out = values * c
    last = FP32 * work.rows * heads / work.degrees.cp * part.key_dim * part.value_dim
    forward, backward = inside(part, work)
    yield Operation(
        "read",
        out,
        saves={"qkv": mixed, "rates": 2 * rates, "read": out},
        keeps=("read",),
        done=out,
        gradients=mixed + 2 * rates,
        beside=2 * last + backward,
        inside=last + forward,
        flops=flops,
        backward_flops=3 * flops,
        moved=mixed + out,
        backward_moved=2 * (mixed + out),
        kind="attention",
    )
    yield Operation("last state", last, keeps=("last state",))
    if work.degrees.cp > 1:
        yield exchange("own read", out, "cp")
    yield norm("read", "normed read", tokens * heads, part.value_dim, work, plain=True)
    yield from gated("normed read", values, work, swish=True)


def inside(part: DeltaNet, work: Workload) -> tuple[float, float]:
    """Bytes that the operator `gated_delta_rule` takes beside what it is given and returns, forward and
    backward: fp32 tensors of the key heads that it computes together, as far as they are alive at once."""
    key_heads = part.key_heads / work.degrees.tp / work.degrees.cp
    shared, k, v = part.heads / part.key_heads, part.key_dim, part.value_dim
    size = min(CHUNK, work.seq_len)
    chunks = ceil(work.seq_len / size)
    of_token = 6 * (k + v) + 6 * size + 2 * k * (k + v) / size

    def of_heads(passes: int, numbers: float) -> float:
        """Of so many numbers for each token of a value head."""
        each = WORKING // (work.rows * work.seq_len * shared * of_token * FP32 * passes + 1)
        return FP32 * min(key_heads, max(1, each)) * shared * work.rows * chunks * size * numbers

    # Numbers for each token of a value head. Queries and keys are shared, and so are products of keys.
    own, alike, step, state = k / shared, size / shared, k * k / size, k * v / size
    states = state * (chunks + 1) / chunks
    row = 2 * own + 2 * v + k + 3 * size + alike + 3
    made = 2 * own + 3 * v + 2 * k + 2 * size + alike + 5
    walk = row + max(3 * step, 2 * step + k, step + state + max(k, states))
    read = row + states + max(k + state + v, state + 2 * v, 3 * v)
    held = row + states + v + state  # with the gradient, and what it adds to those of states
    found = states + 3 * v + 4 * k + 2 * size + 2 * alike + 2 * own
    found += max(3 * k, 3 * size + 2, size + state + 5, size + v)
    again = held + max(3 * step, state + step + states, found)
    return of_heads(1, max(made, walk, read)), of_heads(2, again)


def gated(x: str, numbers: float, work: Workload, *, swish: bool = False) -> Iterator[Operation]:
    """`x` times a function of a gate that came out of a product: a sigmoid or, in fp32, a swish."""
    size, own = numbers * (FP32 if swish else work.compute), numbers * work.compute
    reads = "wide gate" if swish else "open gate"
    yield Operation(
        "open gate",
        size,
        saves={reads: size},
        done=size,
        gradients=own,
        moved=2 * size,
        backward_moved=3 * size,
    )
    yield Operation(
        "mixed",
        own,
        saves={x: own, "open gate": size},
        done=own,
        gradients=own + size,
        beside=size if swish else 0.0,
        moved=own + 2 * size,
        backward_moved=2 * own + 3 * size,
    )
