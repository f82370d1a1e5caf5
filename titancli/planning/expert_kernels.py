"""The operations of a block that only a layer of experts has: see `titancli.planning.kernels`."""

from __future__ import annotations

from titancli.planning.kernels import FP32, Engine, Kernel, linear
from titancli.planning.ledger import Event


def route(name: str, x: str, tokens: float, widths: tuple[float, float], top_k: int, c: int) -> Kernel:
    """The router: its product in fp32, and scores, of which autograd keeps two copies (what made them, and
    they). The casts come and go; the visits, right after, take more."""
    scores = tokens * widths[1] * FP32
    chosen = tokens * top_k * (FP32 + 8)
    product = linear(name, x, "logits", tokens, widths, c)
    cast = tokens * widths[0] * FP32 if c < FP32 else 0.0
    return Kernel(
        (("logits", scores), ("scores", scores), "logits", ("chosen", 2 * chosen)),
        (("grad:logits", scores), "scores", "chosen", *product.backward),
        (x, "scores", "chosen"),
        flops=product.flops,
        backward_flops=product.backward_flops,
        moved=product.moved + 4 * scores + 2 * cast,
        backward_moved=product.backward_moved + 4 * scores + 4 * cast,
        kind="product",
    )


def joined_swish_times(both: str, out: str, numbers: float, c: int, engine: Engine) -> tuple[Kernel, ...]:
    """As `swish_times`, of the two halves of one tensor, `numbers` each."""
    size = numbers * c
    if engine == "compiled":
        fused = Kernel(
            ((out, size), both),
            ((f"grad:{both}", 2 * size), f"grad:{out}", both),
            (both,),
            moved=3 * size,
            backward_moved=5 * size,
        )
        return (fused,)
    act = f"silu:{both}"
    silu = Kernel(
        ((act, size),),
        (("first", size), f"grad:{act}", both, (f"grad:{both}", 2 * size), "first", "second"),
        (both,),
        moved=2 * size,
        backward_moved=7 * size,
    )
    times = Kernel(
        ((out, size), act, both),
        (("second", size), (f"grad:{act}", size), f"grad:{out}", act),
        (act, both),
        moved=3 * size,
        backward_moved=6 * size,
    )
    return silu, times


def score(x: str, out: str, numbers: float, c: int) -> Kernel:
    """Tokens times their scores, before they go to the experts."""
    size = numbers * c
    return Kernel(
        ((out, size), x),
        (("product", size), "product", (f"grad:{x}", size), f"grad:{out}", x),
        (x,),
        moved=2 * size,
        backward_moved=4 * size,
    )


def add_up(x: str, out: str, numbers: float, out_numbers: float, c: int) -> Kernel:
    """Each token's visits added up; the gradient goes to all of them as it is."""
    size, out_size = numbers * c, out_numbers * c
    return Kernel(((out, out_size), x), ((f"grad:{x}", size),), moved=size + out_size, backward_moved=size)


def combine(x: str, out: str, numbers: float, out_numbers: float, c: int) -> Kernel:
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


def permute(x: str, out: str, moved: float, *, into: str, size: float) -> Kernel:
    """Rows in another order, perhaps several times each; `size` is x's."""
    copies = moved > size
    back: list[Event] = (
        [("back", moved), (f"grad:{into}", size), "back"] if copies else [(f"grad:{into}", size)]
    )
    return Kernel(((out, moved), x), (*back, f"grad:{out}"), moved=2 * moved, backward_moved=2 * moved + size)
