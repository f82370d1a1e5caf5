"""What gpt-oss does beyond others, as operations: heads with sinks, rows cut into windows
(`titancli/models/blocks/attention.py`), and experts with biases whose product is clamped
(`titancli/models/gpt_oss/model.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from titancli.models.shape import Attention
from titancli.planning.kernels import Engine, Kernel, attention
from titancli.planning.latent import widened
from titancli.planning.ledger import Event

SINK = 8
"""Dimensions that a head gets for its sink."""
ONES = 8
"""Rows by which a bias's gradient is summed up."""


def with_sinks(q: float, k: float, share: float) -> Kernel:
    """Queries and keys of so many bytes as "qs" and "ks", with the dimensions of the sink: of the result they
    are this share."""
    filled, wide_q, wide_k = q * (1 / share - 1), q / share, k / share
    return Kernel(
        (("filled", filled), ("qs", wide_q), "filled", ("ks", wide_k), "q", "k"),
        (("grad:k", k), "grad:ks", ("grad:q", "grad:qs")),
        moved=2 * (wide_q + wide_k),
        backward_moved=2 * k,
    )


@dataclass(frozen=True)
class Rows:
    """What attention is computed on; heads of one rank."""

    rows: float
    length: float
    """Queries of each."""
    keys: float
    """Keys and values of each."""
    heads: float
    kv_heads: float
    c: int
    """Bytes of a number."""


def core(
    part: Attention, of: Rows, names: tuple[str, str, str], *, seen: float, masked: bool
) -> list[Kernel]:
    """Attention of heads with sinks, from queries, keys and values of these names to "outn".

    Args:
        seen: keys that a query attends to, on average.
        masked: whether queries are pieces of rows under a mask, and not rows.
    """
    width, keys, window = part.head_dim + SINK, of.keys, part.window
    if masked:  # two pieces of a row see more than the row, or as far as the window
        keys = keys + of.length / 2 if window is None else min(keys, of.length + 2 * window)
    blocks = window is not None and window < of.length and not masked
    per_key = of.rows * of.kv_heads * of.c
    q, k, v = of.rows * of.length * of.heads * width * of.c, keys * per_key * width, keys * per_key
    v *= part.value_dim
    kernels: list[Kernel] = []
    if window is not None and blocks:
        twice = 2 - window / of.length
        kernels.append(in_windows(names, (q, k, v), twice, of.rows))
        names, keys, k, v = ("qw", "kw", "vw"), twice * keys, twice * k, twice * v
    key, names = with_key(names, (q, k, v), with_query=not blocks and not masked)
    wide = widened("vb", "v72", v, v * width / part.value_dim)
    kernels += [key, replace(wide, forward=(*wide.forward, "vb"))]
    names = (*names[:2], "v72")
    heads, widths = (of.heads, of.kv_heads), (width, width)
    kernels.append(attention(of.rows, of.length, keys, *heads, widths, of.c, names=names, seen=seen))
    return [*kernels, joined("out", "outn", q * part.value_dim / width, q, blocks=blocks)]


def in_windows(
    names: tuple[str, str, str], sizes: tuple[float, float, float], twice: float, rows: float
) -> Kernel:
    """Blocks of queries, and for each the keys and values of two: `twice` times as many as there are."""
    q, k, v = sizes
    cut: Event = ("qw", "qp") if rows == 1 else ("qw", q)  # a part of several rows is no view
    forward: list[Event] = [("qp", q), ("kp", k), ("vp", v), cut]
    forward += [("kw", twice * k), "kp", ("vw", twice * v), "vp"]
    backward: list[Event] = []
    for name, block, size in zip(names, ("qw", "kw", "vw"), sizes, strict=True):
        backward += [("one", size), ("other", size), f"grad:{block}", (f"grad:{name}", size), "one", "other"]
    moved = 2 * (2 * q + (1 + twice) * (k + v))
    return Kernel(tuple(forward), tuple(backward), moved=moved, backward_moved=moved)


def with_key(
    names: tuple[str, str, str], sizes: tuple[float, float, float], *, with_query: bool
) -> tuple[Kernel, tuple[str, str, str]]:
    """The sink's key and value before the others, and, for whole rows, a query; and their names then."""
    (q, k, v), (q_size, k_size, v_size) = names, sizes
    forward: list[Event] = [("kb", k_size), ("vb", v_size)]
    backward: list[Event] = [(f"grad:{v}", v_size), "grad:vb", (f"grad:{k}", "grad:kb")]
    if with_query:
        forward.append(("qb", q_size))
        backward = [(f"grad:{q}", q_size), "grad:qb", *backward]
    moved = 2 * (k_size + v_size + q_size * with_query)
    kernel = Kernel(tuple(forward), tuple(backward), moved=moved, backward_moved=moved)
    return kernel, ("qb" if with_query else q, "kb", "vb")


def joined(x: str, out: str, size: float, whole: float, *, blocks: bool) -> Kernel:
    """What a kernel made, without what the sink became; of blocks of windows, as rows again."""
    rest: tuple[Event, ...] = (("rest", size), (out, size), "rest") if blocks else ((out, size),)
    return Kernel(
        rest,
        (("cut", whole), f"grad:{out}", (f"grad:{x}", whole), "cut"),
        moved=2 * size * (1 + blocks),
        backward_moved=size + 3 * whole,
    )


def with_bias(x: str, out: str, numbers: float, c: int) -> Kernel:
    """Each group of rows with its own bias; the bias's gradient is a product with rows of ones."""
    size = numbers * c
    return Kernel(
        ((out, size), x),
        ((f"grad:{x}", f"grad:{out}"),),
        backward_flops=2.0 * ONES * numbers,
        moved=2 * size,
        backward_moved=size,
    )


def clamped_swiglu(both: str, out: str, numbers: float, c: int, engine: Engine) -> Kernel:
    """Of the two halves of one tensor, `numbers` each, of which nothing else is kept."""
    size, mask = numbers * c, numbers
    gone: tuple[Event, ...] = (f"grad:{out}", both)
    if engine == "compiled":
        backward: tuple[Event, ...] = ((f"grad:{both}", 2 * size), *gone)
        return Kernel(((out, size),), backward, (both,), moved=3 * size, backward_moved=5 * size)
    forward: list[Event] = [("g", size), ("u", size), ("u1", size), "u", ("ag", size), ("s", size), "ag"]
    forward += [("gs", size), "s", (out, size), "u1", "gs", "g"]
    return Kernel(
        tuple(forward),
        (
            *_clamped_backward(size, mask),
            (f"grad:{both}", 2 * size),
            "for gate",
            "for up",
            "g",
            "s",
            "slope",
            *gone,
        ),
        (both,),
        moved=12 * size,
        backward_moved=36 * size,
    )


def _clamped_backward(size: float, mask: float) -> Iterator[Event]:
    yield from (("g", size), ("ag", size), ("s", size), "ag")
    yield from (("ag", size), ("closed", size), ("product", size), "ag", "closed")
    yield from (("plus", size), "product", ("slope", size), "plus")
    yield from (("u", size), ("u1", size), "u", ("a", size), "u1", ("b", size), "a")
    yield from (("mask", mask), ("for gate", size), "b", "mask")
    yield from (("a", size), ("b", size), "a", ("absolute", size), ("mask", mask), "absolute")
    yield from (("for up", size), "b", "mask")
