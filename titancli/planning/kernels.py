"""The operations of a block: what each takes and gives back forward and backward, what autograd keeps of
it, and what it costs.

The events follow the code in `titancli/models/blocks` operation by operation, as PyTorch runs it: which
results autograd saves, in which order temporaries come and go, when Python lets go of a variable.
`tests/planning` holds them against `torch.distributed._tools.MemTracker`. Sizes are bytes of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titancli.planning.ledger import Event

FP32 = 4
READS = 1.5
"""Tensors that an elementwise operation reads for each that it writes: one or two."""

Engine = Literal["cpu", "gpu", "compiled"]
"""Who runs the operations: CPU kernels (norms are several), GPU kernels (norms are one), or torch.compile on
a GPU, which runs what stands between two products as one kernel and keeps only what a product reads."""


@dataclass(frozen=True)
class Kernel:
    """One operation of a block, or several that belong together."""

    forward: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    saves: tuple[str, ...] = ()
    """Held for backward."""
    keeps: tuple[str, ...] = ()
    """Held by selective activation checkpointing ("op")."""
    flops: float = 0.0
    """Of forward."""
    backward_flops: float = 0.0
    moved: float = 0.0
    """Bytes read and written in forward."""
    backward_moved: float = 0.0
    kind: Literal["product", "grouped", "attention", "elementwise", "collective"] = "elementwise"
    sends: tuple[str, float] | None = None
    """A collective: the mesh dimension, and the bytes of the whole (gathered) tensor; the same back."""

    def runs_again(self, recompute: str) -> bool:
        """Whether backward runs it forward once more, if anything that comes after it needs that."""
        return recompute == "full" or (recompute == "op" and not self.keeps)


def written(events: tuple[Event, ...]) -> float:
    return sum(e[1] for e in events if not isinstance(e, str) and not isinstance(e[1], str))


def _elementwise(
    forward: list[Event], backward: list[Event], saves: tuple[str, ...], engine: Engine, fused: float
) -> Kernel:
    """`fused`: bytes that one kernel for all of it would move forward; backward moves twice as many."""
    one_kernel = engine == "compiled"
    return Kernel(
        tuple(forward),
        tuple(backward),
        saves,
        moved=fused if one_kernel else (1 + READS) * written(tuple(forward)),
        backward_moved=2 * fused if one_kernel else (1 + READS) * written(tuple(backward)),
    )


def linear(
    name: str,
    x: str,
    out: str,
    tokens: float,
    widths: tuple[float, float],
    c: int,
    *,
    matrices: float = 1,
    grad: str | None = None,
    branches: Literal["only", "first", "middle", "last"] = "only",
    after: tuple[Event, ...] = (),
) -> Kernel:
    """`out = x · weightᵀ`, weight [widths[1], widths[0]].

    Args:
        matrices: that lie on this rank (experts), each for its share of the tokens.
        grad: the gradient of out if that is another branch's as well, and stays.
        branches: where several linears read x: which in order of forward this is. Backward goes the other
            way.
        after: events at the end of forward.
    """
    size, weight = tokens * widths[0] * c, matrices * widths[0] * widths[1] * c
    backward: list[Event] = [(x, size), (f"dw:{name}", weight)]
    begins, ends = branches in ("only", "last"), branches in ("only", "first")
    backward.append((f"grad:{x}" if begins else f"more:{x}", size))
    if grad is None:
        backward.append(f"grad:{out}")
    if ends:
        backward.append(x)
    if not begins:
        backward += [(f"sum:{x}", size), f"more:{x}", f"grad:{x}", (f"grad:{x}", f"sum:{x}")]
    flops = 2.0 * tokens * widths[0] * widths[1]
    moved = tokens * (widths[0] + widths[1]) * c + weight
    return Kernel(
        ((out, tokens * widths[1] * c), *after),
        tuple(backward),
        (x,),
        flops=flops,
        backward_flops=2 * flops,
        moved=moved,
        backward_moved=2 * moved,
        kind="product",
    )


def norm(
    name: str,
    x: str,
    out: str,
    tokens: float,
    width: float,
    c: int,
    engine: Engine,
    *,
    residual: str = "",
    weight: bool = True,
) -> Kernel:
    """RMSNorm, with a weight or without. On a CPU torch has no kernel for it but does it step by step, in
    fp32 (`torch.rms_norm`).

    `residual`: the gradient that x has from the stream that passes the norm by; both are added.
    """
    full, own, one = tokens * width * FP32, tokens * width * c, tokens * FP32
    grad, dw = f"grad:{out}", [(f"dw:{name}", width * c)] if weight else []
    add: list[Event] = []
    if residual:
        add = [(f"sum:{x}", own), f"n:{x}", residual, (f"grad:{x}", f"sum:{x}")]
    else:
        add = [(f"grad:{x}", f"n:{x}")]
    if engine != "cpu":
        backward: list[Event] = [(f"n:{x}", own), *dw, grad, x, f"rstd:{out}", *add]
        return _elementwise([(out, own), (f"rstd:{out}", one)], backward, (x, f"rstd:{out}"), engine, 2 * own)
    wide = c < FP32
    x32, hat = (f"x32:{out}" if wide else x), f"hat:{out}"
    forward: list[Event] = [(x32, full)] if wide else []
    forward += [("pow", full), (f"rstd:{out}", one), "pow", (hat, full)]
    if weight:
        forward += [("scaled", full), (out, own), "scaled"] if wide else [(out, own)]
        forward += [hat, *([x32] if wide else [])]
    else:
        forward += [(out, own), hat, x32] if wide else [(out, hat)]
    into: list[Event] = [("g32", full), grad] if wide else [("g32", grad)]
    if weight:
        backward = [*into, ("a", full), ("b", full), "b", *dw, "g32", hat]
    else:
        backward = [*into, ("a", "g32")]
    backward += [("d", full), ("e", full), "a", "d"]
    backward += [f"rstd:{out}", ("f", full), ("g", full), ("h", full), ("i", full), "h", "g", "f", x32]
    backward += [("j", full), "i", "e"]
    backward += [(f"n:{x}", own), "j"] if wide else [(f"n:{x}", "j")]
    saved = (x32, hat, f"rstd:{out}") if weight else (x32, f"rstd:{out}")
    return _elementwise([*forward], [*backward, *add], saved, engine, 2 * own)


def rotate(x: str, out: str, numbers: float, c: int, engine: Engine) -> Kernel:
    """Rotary embedding of `numbers` numbers, in fp32 (`blocks.rope.rotate`). Autograd needs the angles
    only."""
    full, half, own = numbers * FP32, numbers * FP32 / 2, numbers * c
    if engine == "compiled":
        return _elementwise([(out, own)], [(f"grad:{x}", own), f"grad:{out}"], (), engine, 2 * own)
    wide = c < FP32
    forward: list[Event] = [("x32", full)] if wide else []
    forward += [
        ("a", half),
        ("b", half),
        ("s", half),
        "a",
        "b",
        ("a", half),
        ("b", half),
        ("t", half),
        "a",
        "b",
    ]
    forward += [("cat", full), "s", "t", (out, own), "cat", "x32"] if wide else [(out, own), "s", "t"]
    grad = "g32" if wide else f"grad:{out}"
    backward: list[Event] = [("g32", full), f"grad:{out}"] if wide else []
    backward += [("a", half), ("b", half), ("n", half), ("d", half), "n", ("s", half), "a", "d"]
    backward += [("a", half), grad, ("t", half), "a", "b"]
    backward += (
        [("cat", full), "s", "t", (f"grad:{x}", own), "cat"] if wide else [(f"grad:{x}", own), "s", "t"]
    )
    return _elementwise(forward, backward, (), engine, 2 * own)


def sharpen(x: str, out: str, numbers: float, c: int, engine: Engine) -> Kernel:
    """Each vector times an fp32 number of its own, which needs no gradient."""
    full, own = numbers * FP32, numbers * c
    if engine == "compiled" or c == FP32:
        return _elementwise([(out, own), x], [(f"grad:{x}", own), f"grad:{out}"], (), engine, 2 * own)
    forward: list[Event] = [("x32", full), (out, own), "x32", x]
    backward: list[Event] = [("g32", full), f"grad:{out}", ("m", full), "g32", (f"grad:{x}", own), "m"]
    return _elementwise(forward, backward, (), engine, 2 * own)


def attention(
    rows: float,
    length: float,
    keys: float,
    heads: float,
    kv_heads: float,
    widths: tuple[int, int],
    c: int,
    *,
    names: tuple[str, str, str] = ("q", "k", "v"),
    seen: float,
) -> Kernel:
    """Softmax attention that never has its scores in memory (flash, cuDNN): q, k, v, out and the
    log-sum-exps stay.

    Args:
        rows, length, keys: of a rank: rows, queries of each, keys and values of each.
        widths: of a query or key, and of a value.
        seen: keys that a query attends to, on average.
    """
    q_size = rows * length * heads * widths[0] * c
    k_size, v_size = (rows * keys * kv_heads * width * c for width in widths)
    out_size, lse = rows * length * heads * widths[1] * c, rows * length * heads * FP32
    q, k, v = names
    flops = 2.0 * rows * length * heads * sum(widths) * seen
    moved = q_size + k_size + v_size + out_size
    return Kernel(
        (("out", out_size), ("lse", lse)),
        (
            (f"grad:{q}", q_size),
            (f"grad:{k}", k_size),
            (f"grad:{v}", v_size),
            *("grad:out", q, k, v, "out", "lse"),
        ),
        (q, k, v, "out", "lse"),
        ("out", "lse"),
        flops=flops,
        backward_flops=2.5 * flops,  # the scores are made again
        moved=moved,
        backward_moved=2 * moved,
        kind="attention",
    )


def swish_times(
    gate: str, up: str, out: str, numbers: float, c: int, engine: Engine
) -> tuple[Kernel, Kernel]:
    """`silu(gate) * up`, as two operations: between them the linear that makes `up` may stand."""
    size = numbers * c
    if engine == "compiled":
        fused = Kernel(
            ((out, size),),
            ((f"grad:{gate}", size), (f"grad:{up}", size), f"grad:{out}", gate, up),
            (gate, up),
            moved=3 * size,
            backward_moved=5 * size,
        )
        return Kernel(), fused
    act = f"silu:{gate}"
    silu = Kernel(
        ((act, size),),
        ((f"grad:{gate}", size), f"grad:{act}", gate),
        (gate,),
        moved=2 * size,
        backward_moved=3 * size,
    )
    times = Kernel(
        ((out, size),),
        ((f"grad:{up}", size), (f"grad:{act}", size), f"grad:{out}", up, act),
        (act, up),
        moved=3 * size,
        backward_moved=6 * size,
    )
    return silu, times


def add(a: str, b: str, out: str, size: float, engine: Engine) -> Kernel:
    """The residual stream. Its gradient goes to both sides as it is; the norm that reads the stream adds
    up."""
    moved = (1 if engine == "compiled" else 3) * size  # compiled, the norm that follows reads it at once
    return Kernel(((out, size), b, a), moved=moved)


# ----------------------------------------------------------------------------------------- collectives


def gather(x: str, out: str, size: float, ranks: int, *, over: str = "tp") -> Kernel:
    """The pieces of all ranks joined, `size` bytes in all; backward sums up and cuts
    (`parallel.collectives`)."""
    return Kernel(
        (("joined", size), (out, size), "joined"),
        (("stacked", size), (f"grad:{x}", size / ranks), f"grad:{out}", "stacked"),
        kind="collective",
        sends=(over, size),
    )


def scatter(x: str, out: str, size: float, ranks: int, *, over: str = "tp", gone: str = "") -> Kernel:
    """The sum over all ranks, of which each keeps its piece; backward gathers. `gone`: what Python lets go of
    then."""
    return Kernel(
        (("stacked", size), (out, size / ranks), "stacked", x, gone),
        (("joined", size), (f"grad:{x}", size), "joined"),
        keeps=(out,),
        kind="collective",
        sends=(over, size),
    )


def exchange(x: str, out: str, size: float, *, over: str) -> Kernel:
    """Every rank's part against every other's (all-to-all), both ways."""
    return Kernel(
        ((out, size), x),
        ((f"grad:{x}", size), f"grad:{out}"),
        keeps=(out,),
        kind="collective",
        sends=(over, size),
    )
