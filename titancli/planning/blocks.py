"""A block of a decoder as the operations that one rank does, and the memory that they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from titancli.models.shape import Attention, Block, Experts, FeedForward
from titancli.planning.job import Job
from titancli.planning.kernels import (
    Kernel,
    add,
    attention,
    exchange,
    gather,
    linear,
    norm,
    permute,
    rotate,
    route,
    scatter,
    swish_times,
)
from titancli.planning.ledger import Ledger


@dataclass(frozen=True)
class BlockMemory:
    """What one block takes, in bytes of one rank."""

    forward_peak: float
    """The most in forward, its input included."""
    kept: float
    """What stays until backward, its input included where it is needed then."""
    keeps_input: bool
    backward_peak: dict[str, float]
    """The most in backward by class: what was kept, the gradients of output and weights, temporaries."""
    gradients: float
    """Of its weights, before they are reduced."""


def block_memory(block: Block, job: Job, recompute: str) -> BlockMemory:
    """`recompute`: what activation checkpointing does with this block, as in `Job.recomputed`."""
    if recompute.startswith("budget"):
        return _within(float(recompute.split()[1]), *(block_memory(block, job, r) for r in ("full", "none")))
    kernels = block_kernels(block, job)
    stream = job.stream
    saved = frozenset(name for kernel in kernels for name in kernel.saves)
    held = saved
    if recompute != "none":
        held = frozenset({"x"})
    if recompute == "op":
        # Compiled code drops what is kept for nothing: results that only the block's own result is made of.
        last = _last_saver(kernels) if job.engine == "compiled" else len(kernels)
        held |= {name for kernel in kernels[:last] for name in kernel.keeps}
    forward = Ledger({"x": stream}, held=held)
    for kernel in kernels:
        forward.run(kernel.forward)
    kept = {name: size for name, size in forward.live.items() if name in held}
    backward = Ledger({**kept, "grad:y": stream})
    if recompute != "none":
        _run_again(backward, kernels, saved)
    for kernel in reversed(kernels):
        backward.run(kernel.backward)
    return BlockMemory(
        forward_peak=forward.peak,
        kept=sum(kept.values()),
        keeps_input="x" in held,
        backward_peak=backward.at_peak,
        gradients=backward.classes.get("gradients", 0.0),
    )


def _within(budget: float, least: BlockMemory, most: BlockMemory) -> BlockMemory:
    """What the compiler keeps within a budget: 0 is as little as full checkpointing keeps, 1 what it
    likes."""
    kept = least.kept + budget * (most.kept - least.kept)
    return replace(most, kept=kept, forward_peak=max(kept, least.forward_peak), keeps_input=True)


def _last_saver(kernels: list[Kernel]) -> int:
    return max(number for number, kernel in enumerate(kernels) if kernel.saves)


def forwards(block: Block, job: Job, recompute: str) -> Iterator[tuple[Kernel, int]]:
    """Each operation of a block, and how often a pass runs it forward: what backward runs again ends where
    autograd has got the last that it keeps, the last linear's input."""
    kernels = block_kernels(block, job)
    last = _last_saver(kernels)
    for number, kernel in enumerate(kernels):
        yield kernel, 1 + (number < last and kernel.runs_again(recompute))


def _run_again(ledger: Ledger, kernels: list[Kernel], saved: frozenset[str]) -> None:
    """Forward once more, as far as it is: see `forwards`."""
    before = set(ledger.live)
    last = _last_saver(kernels)
    ledger.held = saved | {"x"}
    for kernel in kernels[:last]:
        ledger.run(kernel.forward)
    ledger.held = frozenset()
    for name in set(ledger.live) - saved - before:
        ledger.free(name)


# ------------------------------------------------------------------------------------- the operations


def block_kernels(block: Block, job: Job) -> list[Kernel]:
    """In the order of forward: `x` is what comes in, `y` what goes out."""
    kernels = [
        norm(
            "norm1", "x", "n1", job.stream_tokens, job.shape.dim, job.compute, job.engine, residual="grad:x1"
        ),
        *_attention(block.attention, job),
        add("x", "o", "x1", job.stream, job.engine),
        norm(
            "norm2", "x1", "n2", job.stream_tokens, job.shape.dim, job.compute, job.engine, residual="grad:y"
        ),
        *_feed_forward(block.feed_forward, job),
        add("x1", "f", "y", job.stream, job.engine),
    ]
    return _every_other_kept([kernel for kernel in kernels if kernel != Kernel()])


def _every_other_kept(kernels: list[Kernel]) -> list[Kernel]:
    """Selective checkpointing keeps the first matrix product, the third, …: see
    `titancli.parallel.activation_checkpoint`. The routed experts, and what follows them, count anew."""
    products = [number for number, kernel in enumerate(kernels) if kernel.kind in ("product", "grouped")]
    runs = [list(run) for _, run in groupby(products, key=lambda number: kernels[number].kind)]
    kept = {number for run in runs for number in run[::2]}
    return [
        replace(kernel, keeps=(_out(kernel),)) if number in kept else kernel
        for number, kernel in enumerate(kernels)
    ]


def _out(kernel: Kernel) -> str:
    first = kernel.forward[0]
    return first if isinstance(first, str) else first[0]


def _attention(part: Attention, job: Job) -> Iterator[Kernel]:
    c, dim, engine, tp, cp = job.compute, job.shape.dim, job.engine, job.degrees.tp, job.degrees.cp
    heads, kv_heads = part.heads / tp, part.kv_heads / tp
    widths = (part.head_dim, part.value_dim)
    q, k, v = heads * part.head_dim, kv_heads * part.head_dim, kv_heads * part.value_dim
    tokens = job.tokens
    n1 = "n1"
    if tp > 1:
        n1 = "g1"
        yield gather("n1", n1, tokens * dim * c, tp)
    yield linear("wq", n1, "q0", tokens, (dim, q), c, branches="first")
    yield linear("wk", n1, "k0", tokens, (dim, k), c, branches="middle")
    yield linear("wv", n1, "v", tokens, (dim, v), c, branches="last")
    q_in, k_in = "q0", "k0"
    if part.qk_norm:
        q_in, k_in = "qn", "kn"
        yield norm("q_norm", "q0", q_in, tokens * heads, part.head_dim, c, engine)
        yield norm("k_norm", "k0", k_in, tokens * kv_heads, part.head_dim, c, engine)
    yield rotate(q_in, "q", tokens * q, c, engine)
    turned = rotate(k_in, "k", tokens * k, c, engine)
    yield replace(turned, forward=(*turned.forward, "k0", "kn", "q0", "qn"))
    length, keys, scale = job.row_tokens, job.row_tokens, 1.0
    names, out = ("q", "k", "v"), "out"
    whole = job.rows * job.seq_len * c
    if cp > 1 and job.context == "allgather":
        keys, names = job.seq_len, ("q", "kg", "vg")
        yield gather("k", "kg", whole * k, cp, over="cp")
        yield gather("v", "vg", whole * v, cp, over="cp")
    elif cp > 1 and job.context == "ring":
        yield Kernel(kind="collective", sends=("cp", whole * (k + v)))
    elif cp > 1:
        length = keys = job.seq_len
        scale, names = 1 / cp, ("qa", "ka", "va")
        for name, size in (("q", q), ("k", k), ("v", v)):
            yield exchange(name, f"{name}a", tokens * size * c, over="cp")
    yield attention(
        job.rows, length, keys, heads * scale, kv_heads * scale, widths, c, names=names, seen=job.seen(part)
    )
    if cp > 1 and job.context == "allgather":
        out, size = "outj", tokens * heads * part.value_dim * c  # of two pieces of the row
        yield Kernel(
            ((out, size),), (("grad:out", size), "grad:outj"), moved=2 * size, backward_moved=2 * size
        )
    elif cp > 1 and job.context == "ulysses":
        out = "outa"
        yield exchange("out", out, tokens * heads * part.value_dim * c, over="cp")
    wide = heads * part.value_dim
    yield linear(
        "wo", out, "o" if tp == 1 else "ow", tokens, (wide, dim), c, grad=None if tp > 1 else "grad:x1"
    )
    if tp > 1:
        yield scatter("ow", "o", tokens * dim * c, tp, gone="n1")


def _feed_forward(part: FeedForward | Experts, job: Job) -> Iterator[Kernel]:
    if isinstance(part, Experts):
        yield from _experts(part, job)
        return
    yield from _swiglu(job, "n2", "f", part.hidden, job.degrees.tp, grad="grad:y")


def _swiglu(
    job: Job, x: str, out: str, hidden: float, tp: int, *, grad: str, at: str = ""
) -> Iterator[Kernel]:
    """With tp > 1 the sequence is gathered before it, and summed and cut after it."""
    c, dim, engine = job.compute, job.shape.dim, job.engine
    tokens = job.tokens if tp > 1 else job.stream_tokens
    width = hidden / tp
    last, came = out, ""
    if tp > 1:
        last, came = f"{out}w", x
        yield gather(x, f"g{x}", tokens * dim * c, tp)
        x = f"g{x}"
    w1, w2, w3 = (f"{at}{name}" for name in ("w1", "w2", "w3"))
    silu, times = swish_times(f"{at}gate", f"{at}up", f"{at}inner", tokens * width, c, engine)
    yield linear(w1, x, f"{at}gate", tokens, (dim, width), c, branches="first")
    yield silu
    yield linear(w3, x, f"{at}up", tokens, (dim, width), c, branches="last")
    yield replace(times, forward=(*times.forward, f"silu:{at}gate", f"{at}gate", f"{at}up"))
    yield linear(
        w2,
        f"{at}inner",
        last,
        tokens,
        (width, dim),
        c,
        grad=None if tp > 1 else grad,
        after=(f"{at}inner",),
    )
    if tp > 1:
        yield scatter(last, out, tokens * dim * c, tp, gone=came)


def _experts(part: Experts, job: Job) -> Iterator[Kernel]:
    """Tensor parallelism leaves the layer alone: each rank has its own part of the sequence. Tokens are
    taken to be spread evenly, so that a rank gets as many from the others as it sends."""
    c, dim, engine, ep = job.compute, job.shape.dim, job.engine, job.degrees.ep
    tokens = job.stream_tokens
    visits, matrices = tokens * part.top_k, part.experts / ep
    yield route("router", "n2", tokens, (dim, part.experts), part.top_k, c)
    yield permute("n2", "visitors", visits * dim * c, into="n2", size=tokens * dim * c)
    inside = "visitors"
    if ep > 1:
        inside = "guests"
        yield exchange("visitors", "arrived", visits * dim * c, over="ep")
        yield permute("arrived", inside, visits * dim * c, into="arrived", size=visits * dim * c)
    silu, times = swish_times("egate", "eup", "einner", visits * part.hidden, c, engine)
    into, back = (dim, part.hidden), (part.hidden, dim)
    grouped = [
        linear("e1", inside, "egate", visits, into, c, branches="first", matrices=matrices),
        linear("e3", inside, "eup", visits, into, c, branches="last", matrices=matrices),
        silu,
        replace(times, forward=(*times.forward, "silu:egate", "egate", "eup")),
        linear("e2", "einner", "made", visits, back, c, after=("einner",), matrices=matrices),
    ]
    for kernel in grouped:
        yield replace(kernel, kind="grouped") if kernel.kind == "product" else kernel
    home = "made"
    if ep > 1:
        home = "home"
        yield permute("made", "leaving", visits * dim * c, into="made", size=visits * dim * c)
        yield exchange("leaving", home, visits * dim * c, over="ep")
    shared = part.shared_hidden > 0
    yield permute(home, "byt", visits * dim * c, into=home, size=visits * dim * c)
    yield _combine("byt", "routed" if shared else "f", visits * dim, tokens * dim, c)
    if shared:
        yield from _swiglu(job, "n2", "shared", part.shared_hidden, 1, grad="grad:y", at="s")
        yield add("routed", "shared", "f", tokens * dim * c, engine)


def _combine(x: str, out: str, numbers: float, out_numbers: float, c: int) -> Kernel:
    """Each token's visits, weighted by their scores and added up; what came home is saved for the scores."""
    size, out_size = numbers * c, out_numbers * c
    return Kernel(
        ((out, out_size),),
        ((f"grad:{x}", size), x),
        (x,),
        flops=2 * numbers,
        backward_flops=4 * numbers,
        moved=size + out_size,
        backward_moved=2 * size + out_size,
    )
