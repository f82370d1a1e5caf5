"""The operations of a block, and of what follows the last one.

Everything follows from the model's `shape()` (`titancli.models.shape`). `titancli.planning.memory` adds up
what the operations keep; which temporary is freed at which line of the code is left out, and costs a few
percent (docs/plan.md has a table). Sizes are bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from titancli.models.shape import Attention, Block, DeltaNet, Experts, Latent
from titancli.planning.delta import delta_operations, gated
from titancli.planning.operations import (
    FP32,
    Operation,
    add,
    exchange,
    gather,
    joined,
    joined_swish_times,
    linear,
    norm,
    ordered,
    rotation,
    scaled,
    scatter,
    swish_times,
    token_ahead,
)
from titancli.planning.workload import Workload, local_shape

ONES = 8
"""Rows by which the gradient of an expert's bias is summed up."""


def block_operations(block: Block, work: Workload) -> list[Operation]:
    """In the order of forward: "x" is what comes in."""
    stream = (work.stream_tokens, work.shape.dim, work)
    attention, part = list(_mixed(block.attention, work)), block.feed_forward
    sparse = isinstance(part, Experts)
    after = list(_experts(part, work) if isinstance(part, Experts) else _swiglu(work, part.hidden))
    if block.norms_after:
        attention = [*_reading(attention, "n1", "x"), norm("o", "normed o", *stream)]
        after = [*_reading(after, "n2", "x1"), norm("f", "normed f", *stream)]
    else:
        attention = [norm("x", "n1", *stream, residual=True), *attention]
    if block.norms == "both":
        attention, after = (
            [*attention, norm("o", "normed o", *stream)],
            [*after, norm("f", "normed f", *stream)],
        )
    attention = [replace(attention[0], enters="x"), *attention[1:], add(work)]
    if not block.norms_after:
        attention.append(norm("x1", "n2", *stream, residual=True))
    if sparse:  # its parts are run again one by one: `Block.parts`
        found = [*(replace(one, part="attention") for one in attention), *after, add(work)]
    else:
        found = [replace(one, part="block") for one in (*attention, *after, add(work))]
    found = [*(token_ahead(work) if block.mtp else ()), *found]
    # Of each part the first matrix product is kept, the third, …, or all:
    # `titancli.parallel.activation_checkpoint`.
    products: dict[str, int] = defaultdict(int)
    for number, one in enumerate(found):
        if one.kind in ("product", "grouped"):
            products[one.part] += 1
            if products[one.part] % 2 or work.recompute == "products":
                found[number] = replace(one, keeps=(one.result,))
    return found


def _reading(operations: list[Operation], old: str, new: str) -> list[Operation]:
    """The same operations, of another tensor."""
    names = {old: new}
    return [
        replace(
            one,
            saves={names.get(name, name): size for name, size in one.saves.items()},
            enters=names.get(one.enters, one.enters),
        )
        for one in operations
    ]


def runs_through(operations: list[Operation]) -> list[bool]:
    """Whether a part of the block that runs again does each operation: it stops where autograd has got the
    last that it keeps, an operation's input. Grouped products say what they keep only when they are done."""
    last = {one.part: number for number, one in enumerate(operations) if one.saves}
    return [number < last[one.part] + (one.kind == "grouped") for number, one in enumerate(operations)]


def forwards(block: Block, work: Workload, recompute: str) -> Iterator[tuple[Operation, int]]:
    """Each operation of a block, and how often a pass runs it forward."""
    operations = block_operations(block, work)
    if recompute == "full":
        operations = [replace(one, part="block", keeps=()) for one in operations]
    for one, through in zip(operations, runs_through(operations), strict=True):
        yield one, 1 + (through and recompute != "none" and one.part != "" and not one.keeps)


def head_operations(work: Workload) -> list[Operation]:
    """The final norms, which are never compiled, and the output with the loss."""
    work = work.head
    eager = replace(work, compiled=False)
    c, dim, words = work.compute, work.shape.dim, work.shape.vocab_size / work.degrees.tp
    found = [norm("x", "h", work.stream_tokens, dim, eager)]
    if work.degrees.tp > 1:
        found.append(gather("hw", work.tokens * dim * c, "tp", work.degrees.tp))
    if not work.full_logits:
        chunks = -(-work.tokens // work.chunk_rows)
        passes = 6 * c if work.fused_loss else 2 * c + 10 * FP32  # over the logits, the products' included
        moved = 3 * (work.tokens + words * chunks) * dim * c + work.tokens * words * passes
        return [*found, Operation(flops=6.0 * work.tokens * dim * words, moved=moved, kind="product")]
    found.append(linear("logits", "h", work.tokens, dim, words, c))
    if work.degrees.tp > 1:
        whole = work.tokens * work.shape.vocab_size * c
        found.append(Operation(kind="collective", sends=("tp", whole)))
    moved = 6 * work.tokens * work.shape.vocab_size * FP32
    return [*found, Operation(moved=moved, backward_moved=moved)]


# --------------------------------------------------------------------------------------------- attention


def _mixed(part: Attention | DeltaNet, work: Workload) -> Iterator[Operation]:
    """What mixes tokens."""
    c, dim, tokens, tp = work.compute, work.shape.dim, work.tokens, work.degrees.tp
    x = "n1"
    if tp > 1:
        x = "g1"
        yield gather(x, tokens * dim * c, "tp", tp)
    mixed = "mixed"
    for one in delta_operations(part, work, x) if isinstance(part, DeltaNet) else _attention(part, work, x):
        mixed = one.result or mixed
        yield one
    yield linear("o", mixed, tokens, part.heads / tp * part.value_dim, dim, c, residual=tp == 1)
    if tp > 1:
        yield scatter("o sum", tokens * dim * c, tp)


def _attention(part: Attention, work: Workload, x: str) -> Iterator[Operation]:
    yield from _products(part, work, x)
    yield from _turned(part, work)
    mixed = "mixed"
    for one in _core(part, work):
        mixed = one.result or mixed
        yield one
    if part.gated:
        yield from gated(mixed, work.tokens * part.heads / work.degrees.tp * part.value_dim, work)


def _products(part: Attention, work: Workload, x: str) -> Iterator[Operation]:
    """What is made out of `x`, perhaps by way of latents: products that tensor parallelism leaves whole make
    these, and each passes a norm before the next product reads it."""
    products = [p for p in part.parameters if len(p.shape) == 2][:-1]
    after_latent = [False, *(p.style == "replicate" for p in products)]
    readers = [p for p, latent in zip(products, after_latent, strict=False) if not latent]
    results = ("q", "k", "v") if not isinstance(part, Latent) else tuple(p.name for p in products)
    before = x
    for parameter, latent, name in zip(products, after_latent, results, strict=False):
        made, read = local_shape(parameter, work.degrees.tp, work.degrees.ep)
        source = x
        if latent:
            source = f"normed {before}"
            yield norm(before, source, work.tokens, read, work)
        if name == "q" and (part.rotary or part.temperature):
            name = "plain q"
        if name == "k" and part.rotary:
            name = "plain k"
        yield linear(
            "plain q, gate" if name == "plain q" and part.gated else name,
            source,
            work.tokens,
            read,
            made,
            work.compute,
            adds=not latent and parameter is not readers[-1],
        )
        before = name


def _turned(part: Attention, work: Workload) -> Iterator[Operation]:
    """Queries and keys in their places."""
    heads, kv_heads = part.heads / work.degrees.tp, part.kv_heads / work.degrees.tp
    q, k = (work.tokens * count * part.head_dim for count in (heads, kv_heads))
    if part.temperature:
        yield scaled(q, work)
    if not part.rotary:
        return
    if part.qk_norm:
        for name, numbers in (("q", q), ("k", k)):
            yield norm(f"plain {name}", f"normed {name}", numbers / part.head_dim, part.head_dim, work)
    if not isinstance(part, Latent):
        # Python lets go of what comes before only when both are rotated.
        normed = bool(part.qk_norm)
        stages = 1 + normed - (normed and work.compute == FP32)  # a norm in fp32 keeps what it reads
        before = stages * (q + k) * work.compute
        for one in (rotation(numbers, work) for numbers in (q, k)):
            yield replace(one, alive=one.alive + before)
    else:  # parts of them, which are cut off and put back
        yield joined(q * work.compute, rotation(work.tokens * heads * part.rope.dim, work))
        rotated = rotation(work.tokens * part.rope.dim, work)
        made = work.tokens * heads * (part.head_dim - part.rope.dim + part.value_dim) * work.compute
        values = work.tokens * heads * part.value_dim * work.compute
        yield replace(
            joined(k * work.compute, rotated), done=k * work.compute + values, gradients=made, beside=made
        )
    if part.norm_after:
        for name, numbers in (("q", q), ("k", k)):
            yield norm(f"turned {name}", name, numbers / part.head_dim, part.head_dim, work, weight=False)


def _core(part: Attention, work: Workload) -> Iterator[Operation]:
    """Attention, its scores never in memory: q, k, v, the result and its log-sum-exps stay. With what context
    parallelism does around it; where values are narrower than keys, with the numbers that fill them up; and
    where a window is cut into rows of their own, with these."""
    c, cp, how = work.compute, work.degrees.cp, work.context if work.degrees.cp > 1 else ""
    heads, kv_heads = part.heads / work.degrees.tp, part.kv_heads / work.degrees.tp
    filled = part.value_dim < part.head_dim
    length = keys = work.row_tokens
    whole = work.rows * work.seq_len * c
    k, v, own = kv_heads * part.head_dim, kv_heads * part.value_dim, work.tokens * heads * part.value_dim * c
    names = ["q", "k", "v"]
    if how == "allgather":
        yield gather("all k", whole * k, "cp", cp)
        yield gather("all v", whole * v, "cp", cp)
        keys, names = work.seq_len, ["q", "all k", "all v"]
    elif how == "ring":
        yield Operation(kind="collective", sends=("cp", whole * (k + v)))
    elif how == "ulysses":
        length = keys = work.seq_len
        for name, size in zip(names, (heads * part.head_dim, k, v), strict=True):
            yield exchange(f"all {name}", work.tokens * size * c, "cp")
        heads, kv_heads, names = heads / cp, kv_heads / cp, [f"all {name}" for name in names]
    pieces = how == "allgather"
    window = part.window if part.window is not None and part.window < length else None
    blocks = window is not None and not pieces and (not work.device.is_gpu or c == FP32)
    # Of keys each block of queries has two.
    twice = 2 - window / length if blocks and window is not None else 1.0
    key, q = work.rows * kv_heads * c * twice, work.rows * length * heads * part.head_dim * c
    k, narrow = key * keys * part.head_dim, key / twice * keys * part.value_dim
    v, out = key * keys * part.value_dim, work.rows * length * heads * part.value_dim * c
    copied: list[str] = []
    if filled or blocks:
        if filled:
            v, out = key * keys * part.head_dim, q
        # Values that came with keys are views of one tensor, which stays for the keys' sake.
        saves = {names[2]: narrow} if names[2] == "all v" else {}
        before, after = narrow, v
        if blocks and window is not None:  # the first block's are views of all
            saves |= {names[0]: q, names[1]: k / twice, names[2]: narrow}
            viewed = length % window == 0 and (work.rows == 1 or length == 2 * window)  # the others too
            copied = [] if viewed else names[:1]
            before, after = narrow + q + k / twice, v + q * (not viewed) + k
        yield Operation(
            saves=saves,
            done=after,
            gradients=before,
            beside=2 * narrow + (2 * q if blocks else 0.0),
            moved=2 * after,
            backward_moved=2 * before,
        )
        copied += names[1:] if blocks else names[2:]
        names = [f"filled {name}" if name in copied else name for name in names]
    flops = 2.0 * (q + out) / c * work.seen(part)
    yield _softmax(dict(zip(names, (q, k, v), strict=True)), out, work.rows * length * heads * FP32, flops)
    if how == "ulysses":
        yield exchange("mixed", own, "cp")
    elif filled or pieces or blocks:
        yield Operation("mixed", own, done=own, gradients=out, moved=2 * own, backward_moved=own + out)


def _softmax(reads: dict[str, float], out: float, lse: float, flops: float) -> Operation:
    """Attention of queries, keys and values of these sizes."""
    read = sum(reads.values())
    return Operation(
        "out",
        out,
        saves={**reads, "out": out, "lse": lse},
        keeps=("out", "lse"),
        done=out,
        gradients=read,
        flops=flops,
        backward_flops=2.5 * flops,  # the scores are made again
        moved=read + out,
        backward_moved=2 * (read + out),
        kind="attention",
    )


# ------------------------------------------------------------------------------------------ feed-forward


def _swiglu(work: Workload, hidden: int, at: str = "") -> Iterator[Operation]:
    """With tp > 1 the sequence is gathered before it, and summed and cut after it."""
    c, dim, tp = work.compute, work.shape.dim, work.degrees.tp
    width, x = hidden / tp, "n2"
    if tp > 1:
        x = f"{at}g2"
        yield gather(x, work.tokens * dim * c, "tp", tp)
    silu, times = swish_times(f"{at}gate", f"{at}up", f"{at}inner", work.tokens * width, work)
    yield linear(f"{at}gate", x, work.tokens, dim, width, c, adds=True)
    yield from silu
    yield linear(f"{at}up", x, work.tokens, dim, width, c)
    yield times
    yield linear(f"{at}f", f"{at}inner", work.tokens, width, dim, c, residual=tp == 1)
    if tp > 1:
        yield scatter(f"{at}f sum", work.tokens * dim * c, tp)


def _experts(part: Experts, work: Workload) -> Iterator[Operation]:
    """Tensor parallelism leaves the layer alone: each rank has its own part of the sequence. Tokens are taken
    to be spread evenly, so that a rank gets as many from the others as it sends."""
    c, dim, ep = work.compute, work.shape.dim, work.degrees.ep
    tokens, visits = work.stream_tokens, work.stream_tokens * part.top_k
    stream, guests = tokens * dim * c, visits * dim * c
    scores, chosen = tokens * part.experts * FP32, visits * (FP32 + 8)
    router = linear("logits", "n2", tokens, dim, part.experts, c, adds=True)
    cast = tokens * dim * FP32 if c < FP32 else 0.0
    yield replace(
        router,
        part="router",
        enters="n2",
        size=scores,
        saves={**router.saves, "scores": scores, "chosen": 2 * chosen},
        done=0.0,
        beside=router.beside + 2 * scores,
        moved=router.moved + 4 * scores + 2 * cast,
        backward_moved=router.backward_moved + 4 * scores + 4 * cast,
    )
    sent = ordered("visitors", guests)
    if part.shared_hidden:  # their gradient of the stream is there already
        yield replace(sent, gradients=0.0, beside=guests + 2 * stream)
    else:
        yield replace(sent, gradients=stream, beside=guests)
    inside = "visitors"
    if part.score_before:
        inside = "scored"
        yield Operation(
            inside,
            guests,
            saves={"visitors": guests},
            done=guests,
            gradients=guests,
            beside=guests,
            moved=2 * guests,
            backward_moved=4 * guests,
        )
    if ep > 1:
        yield exchange("arrived", guests, "ep")
        inside = "guests"
        yield ordered(inside, guests)
    first, *rest = _visited(part, work, inside, visits)
    yield replace(first, part="experts", enters=inside)
    yield from (replace(one, part="experts") for one in rest)
    if ep > 1:
        yield ordered("leaving", guests)
        # Python still has what was sent, what the experts made of it, and that as it leaves.
        yield replace(exchange("home", guests, "ep"), alive=4 * guests)
    yield replace(ordered("by token", guests), alive=(2 + (ep > 1)) * guests)
    if part.score_before:  # each token's visits added up
        yield Operation("f", stream, gradients=guests, moved=guests + stream, backward_moved=guests)
    else:  # weighted by their scores, and added up
        yield Operation(
            "f",
            stream,
            saves={"by token": guests},
            gradients=guests,
            flops=2 * visits * dim,
            backward_flops=4 * visits * dim,
            moved=guests + stream,
            backward_moved=2 * guests + stream,
        )
    if part.shared_hidden:
        yield from (replace(one, part="shared") for one in _swiglu(work, part.shared_hidden, at="shared "))
        yield add(work)


def _visited(part: Experts, work: Workload, x: str, visits: float) -> Iterator[Operation]:
    """What the experts make of their visitors."""
    c, dim, numbers = work.compute, work.shape.dim, visits * part.hidden
    matrices = part.experts / work.degrees.ep

    def grouped(name: str, source: str, read: float, made: float, *, adds: bool = False) -> Operation:
        one = linear(name, source, visits, read, made, c, adds=adds, matrices=matrices)
        return replace(one, kind="grouped")

    def bias(numbers: float) -> Operation:
        size = numbers * c
        return Operation(backward_flops=2.0 * ONES * numbers, moved=2 * size, backward_moved=size)

    if part.joined:
        yield grouped("both", x, dim, 2 * part.hidden)
        if part.clamped:
            yield bias(2 * numbers)
        yield from joined_swish_times(numbers, work, clamped=part.clamped is not None)
    else:
        silu, times = swish_times("e gate", "e up", "e inner", numbers, work)
        yield grouped("e gate", x, dim, part.hidden, adds=True)
        yield grouped("e up", x, dim, part.hidden)
        yield from (*silu, times)
    yield grouped("made", "e inner", part.hidden, dim)
    if part.clamped:
        yield bias(visits * dim)
