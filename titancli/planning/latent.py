"""Multi-head latent attention as operations: how queries, keys and values come to be, and how values that
are narrower than keys pass torch's kernel (`titancli/models/blocks/latent.py`, `attention.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from titancli.models.shape import Attention
from titancli.planning.job import Job
from titancli.planning.kernels import Kernel, linear, norm, rotate
from titancli.planning.ledger import Event


def products(part: Attention, job: Job, x: str) -> Iterator[Kernel]:
    """From the normed stream `x` to "q", "k" and "v"; values are a view of "kv", which stays as long as they
    do."""
    yield from _queries(part, job, x)
    yield from _keys_and_values(part, job, x)


def _queries(part: Attention, job: Job, x: str) -> Iterator[Kernel]:
    c, dim, tokens, heads = job.compute, job.shape.dim, job.tokens, part.heads / job.degrees.tp
    rank, rope = part.query_rank, part.rope_dim or 0
    size = tokens * heads * part.head_dim * c
    if rank is None:
        yield linear("wq", x, "q0", tokens, (dim, heads * part.head_dim), c, branches="first")
    else:
        yield linear("wq_a", x, "ql", tokens, (dim, rank), c, branches="first")
        normed = norm("q_norm", "ql", "qn", tokens, rank, c, job.engine)
        yield replace(normed, forward=(*normed.forward, "ql"))
        yield linear("wq_b", "qn", "q0", tokens, (rank, heads * part.head_dim), c)
    yield _parted("q0", size, ("q", "qr0"))
    yield rotate("qr0", "qr", tokens * heads * rope, c, job.engine)
    yield Kernel((("q", size), "qr", "q0"), moved=2 * size, backward_moved=2 * size)


def _keys_and_values(part: Attention, job: Job, x: str) -> Iterator[Kernel]:
    c, dim, tokens, heads = job.compute, job.shape.dim, job.tokens, part.heads / job.degrees.tp
    rank, rope = part.kv_rank or 0, part.rope_dim or 0
    made = heads * (part.head_dim - rope + part.value_dim)
    yield linear("wkv_a", x, "kvl", tokens, (dim, rank + rope), c, branches="last")
    yield _parted("kvl", tokens * (rank + rope) * c, ("kr0",))
    yield norm("kv_norm", "kvl", "kvn", tokens, rank, c, job.engine)
    yield linear("wkv_b", "kvn", "kv", tokens, (rank, made), c)
    yield _parted("kv", tokens * made * c, ("k", "v"))
    yield rotate("kr0", "kr", tokens * rope, c, job.engine)
    size = tokens * heads * part.head_dim * c
    yield Kernel(
        (("k", size), "kr", "kvl"),
        (("grad:kr", tokens * rope * c),),  # the sum over heads
        moved=2 * size,
        backward_moved=2 * size,
    )


def _parted(x: str, size: float, into: tuple[str, ...]) -> Kernel:
    """Views of parts; backward puts the gradients of the parts together."""
    gone = [f"grad:{name}" for name in into]
    back: list[Event] = [("whole", size), *gone, f"grad:{x}", (f"grad:{x}", "whole")]
    return Kernel((), tuple(back), backward_moved=2 * size)


def widened(v: str, out: str, size: float, whole: float) -> Kernel:
    """Values of `size` bytes filled up with zeros, for kernels that want heads of one width.

    Those that came from other ranks, "kg" and "vg" or "ka" and "va", are views of one tensor, which stays for
    the keys' sake.
    """
    return Kernel(
        ((out, whole),),
        ((f"grad:{v}", size), f"grad:{out}", v),
        () if v == "v" else (v,),
        moved=size + whole,
        backward_moved=2 * size,
    )


def narrowed(x: str, out: str, size: float, whole: float) -> Kernel:
    """What a kernel made of such values, without what the zeros became."""
    return Kernel(
        ((out, size),), ((f"grad:{x}", whole), f"grad:{out}"), moved=2 * size, backward_moved=size + whole
    )
