"""A block of a decoder as the operations that one rank does, and the memory that they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from titancli.models.shape import Attention, Block, Experts, FeedForward
from titancli.planning import gpt_oss, latent
from titancli.planning.expert_kernels import add_up, combine, joined_swish_times, permute, route, score
from titancli.planning.job import Job
from titancli.planning.kernels import (
    Engine,
    Kernel,
    add,
    attention,
    exchange,
    gather,
    linear,
    norm,
    rotate,
    scatter,
    sharpen,
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
    experts_done: dict[str, float]
    """By class, what there is in backward when the experts have their gradients, which are reduced then."""


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
    experts_done: dict[str, float] = {}
    for kernel in reversed(kernels):
        backward.run(kernel.backward)
        if kernel.kind == "grouped":
            experts_done = dict(backward.classes)
    return BlockMemory(
        forward_peak=forward.peak,
        kept=sum(kept.values()),
        keeps_input="x" in held,
        backward_peak=backward.at_peak,
        gradients=backward.classes.get("gradients", 0.0),
        experts_done=experts_done,
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
    c, dim, tp, tokens = job.compute, job.shape.dim, job.degrees.tp, job.tokens
    n1 = "n1"
    if tp > 1:
        n1 = "g1"
        yield gather("n1", n1, tokens * dim * c, tp)
    yield from (_products if part.kv_rank is None else latent.products)(part, job, n1)
    kernels, out = _core(part, job)
    yield from kernels
    width, made = part.heads / tp * part.value_dim, "o" if tp == 1 else "ow"
    yield linear("wo", out, made, tokens, (width, dim), c, grad=None if tp > 1 else "grad:x1", after=_GONE)
    if tp > 1:
        yield scatter("ow", "o", tokens * dim * c, tp, gone="n1")


_GONE = ("kv", "qs", "ks", "v", "kg", "vg", "qa", "ka", "va", "qp", "kw", "vw")
"""What attention is made of, or a view of, and need not keep: it stays until the module has returned."""


def _products(part: Attention, job: Job, x: str) -> Iterator[Kernel]:
    """From the normed stream `x` to "q", "k" and "v"."""
    c, dim, engine, tokens = job.compute, job.shape.dim, job.engine, job.tokens
    heads, kv_heads = part.heads / job.degrees.tp, part.kv_heads / job.degrees.tp
    q, k, v = heads * part.head_dim, kv_heads * part.head_dim, kv_heads * part.value_dim
    made = ("q0" if part.rotary or part.scaled else "q", "k0" if part.rotary else "k")
    yield linear("wq", x, made[0], tokens, (dim, q), c, branches="first")
    yield linear("wk", x, made[1], tokens, (dim, k), c, branches="middle")
    yield linear("wv", x, "v", tokens, (dim, v), c, branches="last")
    if part.scaled:
        yield sharpen("q0", "q", tokens * q, c, engine)
    if part.rotary:
        yield from _rotated(part, (tokens * heads, tokens * kv_heads), c, engine)
    if part.sinks:
        share = part.head_dim / (part.head_dim + gpt_oss.SINK)
        yield gpt_oss.with_sinks(tokens * q * c, tokens * k * c, share)


def _core(part: Attention, job: Job) -> tuple[list[Kernel], str]:
    """Attention of "q", "k" and "v", with what context parallelism does around it; and the name of what comes
    out."""
    c, cp, how = job.compute, job.degrees.cp, job.context if job.degrees.cp > 1 else ""
    heads, kv_heads = part.heads / job.degrees.tp, part.kv_heads / job.degrees.tp
    width = part.head_dim + gpt_oss.SINK * part.sinks
    q, k, v = heads * width, kv_heads * width, kv_heads * part.value_dim
    length, keys, scale = job.row_tokens, job.row_tokens, 1.0
    names = ("qs", "ks", "v") if part.sinks else ("q", "k", "v")
    whole, made = job.rows * job.seq_len * c, job.tokens * heads * part.value_dim * c
    kernels: list[Kernel] = []
    if how == "allgather":
        kernels.append(gather(names[1], "kg", whole * k, cp, over="cp"))
        kernels.append(gather("v", "vg", whole * v, cp, over="cp"))
        keys, names = job.seq_len, (names[0], "kg", "vg")
    elif how == "ring":
        kernels.append(Kernel(kind="collective", sends=("cp", whole * (k + v))))
    elif how:
        length = keys = job.seq_len
        for name, to, size in zip(names, ("qa", "ka", "va"), (q, k, v), strict=True):
            kernels.append(exchange(name, to, job.tokens * size * c, over="cp"))
        scale, names = 1 / cp, ("qa", "ka", "va")
    if part.sinks:
        sizes = gpt_oss.Rows(job.rows, length, keys, heads * scale, kv_heads * scale, c)
        kernels += gpt_oss.core(part, sizes, names, seen=job.seen(part), masked=how == "allgather")
        if how == "ulysses":
            kernels.append(exchange("outn", "outa", made, over="cp"))
        return kernels, "outa" if how == "ulysses" else "outn"
    widths, narrow = (part.head_dim, part.value_dim), part.value_dim < part.head_dim
    if narrow:
        full, own = (job.rows * keys * heads * scale * width * c for width in widths)
        # The keys that a rank's two pieces of a row see are more than a row, and widened for each.
        pieces = 1 + 1 / (2 * cp) if how == "allgather" else 1.0
        kernels.append(latent.widened(names[2], "vw", own, full * pieces))
        widths, names = (part.head_dim, part.head_dim), (*names[:2], "vw")
    kernels.append(
        attention(
            job.rows,
            length,
            keys,
            heads * scale,
            kv_heads * scale,
            widths,
            c,
            names=names,
            seen=job.seen(part),
        )
    )
    full = made * widths[1] / part.value_dim
    if how == "allgather":  # of two pieces of the row
        kernels.append(latent.narrowed("out", "outj", made, full))
        return kernels, "outj"
    if how == "ulysses":
        kernels.append(exchange("out", "outa", made, over="cp"))
        return kernels, "outa"
    if narrow:
        kernels.append(latent.narrowed("out", "outn", made, full))
        return kernels, "outn"
    return kernels, "out"


def _rotated(part: Attention, vectors: tuple[float, float], c: int, engine: Engine) -> Iterator[Kernel]:
    """Queries and keys, so many of each, in their places: "q0" and "k0" become "q" and "k"."""
    width, named = part.head_dim, list(zip("qk", vectors, strict=True))
    came, turned = "0", "r" if part.norm_after else ""
    if part.qk_norm:
        came = "n"
        for x, count in named:
            yield norm(f"{x}_norm", f"{x}0", f"{x}n", count, width, c, engine)
    for x, count in named:
        kernel = rotate(f"{x}{came}", f"{x}{turned}", count * width, c, engine)
        yield kernel if x == "q" else replace(kernel, forward=(*kernel.forward, "k0", "kn", "q0", "qn"))
    if part.norm_after:
        for x, count in named:
            kernel = norm("", f"{x}r", x, count, width, c, engine, weight=False)
            yield kernel if x == "q" else replace(kernel, forward=(*kernel.forward, "qr", "kr"))


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
    inside = sent_from = "visitors"
    if part.score_before:
        inside = "scored"
        yield score("visitors", inside, visits * dim, c)
    if ep > 1:
        sent = exchange(inside, "arrived", visits * dim * c, over="ep")
        yield replace(sent, forward=sent.forward[:1])
        sent_from, inside = inside, "guests"
        yield permute("arrived", inside, visits * dim * c, into="arrived", size=visits * dim * c)
    into, back = (dim, part.hidden), (part.hidden, dim)
    made, both = "made", (dim, 2 * part.hidden)
    if part.clamped:
        made, numbers = "made0", visits * part.hidden
        grouped = [
            linear("e13", inside, "eraw", visits, both, c, matrices=matrices),
            gpt_oss.with_bias("eraw", "eboth", 2 * numbers, c),
            gpt_oss.clamped_swiglu("eboth", "einner", numbers, c, engine),
        ]
    elif part.joined:
        grouped = [
            linear("e13", inside, "eboth", visits, both, c, matrices=matrices),
            *joined_swish_times("eboth", "einner", visits * part.hidden, c, engine),
        ]
    else:
        silu, times = swish_times("egate", "eup", "einner", visits * part.hidden, c, engine)
        grouped = [
            linear("e1", inside, "egate", visits, into, c, branches="first", matrices=matrices),
            linear("e3", inside, "eup", visits, into, c, branches="last", matrices=matrices),
            silu,
            replace(times, forward=(*times.forward, "silu:egate", "egate", "eup")),
        ]
    gone = ("einner", "eboth") if part.clamped else ("einner",)
    grouped.append(linear("e2", "einner", made, visits, back, c, after=gone, matrices=matrices))
    if part.clamped:
        grouped.append(gpt_oss.with_bias(made, "made", visits * dim, c))
    for kernel in grouped:
        yield replace(kernel, kind="grouped") if kernel.kind == "product" else kernel
    home = "made"
    if ep > 1:
        home = "home"
        yield permute("made", "leaving", visits * dim * c, into="made", size=visits * dim * c)
        yield exchange("leaving", home, visits * dim * c, over="ep")
    shared = part.shared_hidden > 0
    ordered = permute(home, "byt", visits * dim * c, into=home, size=visits * dim * c)
    yield replace(ordered, forward=ordered.forward[:1])
    routed, sizes = "routed" if shared else "f", (visits * dim, tokens * dim)
    together = (add_up if part.score_before else combine)("byt", routed, *sizes, c)
    # Python lets go of what was sent, and of what came back, only at the end.
    yield replace(together, forward=(*together.forward, sent_from, home))
    if shared:
        yield from _swiglu(job, "n2", "shared", part.shared_hidden, job.degrees.tp, grad="grad:y", at="s")
        yield add("routed", "shared", "f", tokens * dim * c, engine)
