"""What stands before and after the blocks: the embedding, the final norm, the output and the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titancli.planning.job import Job
from titancli.planning.kernels import FP32, Engine, Kernel, gather, linear, norm
from titancli.planning.ledger import Event, Ledger

CHUNK = {"cpu": 64 * 2**20, "gpu": 512 * 2**20}
"""Bytes of the fp32 logits of one chunk of the loss: `titancli.losses.chunked`."""
PARTS = 8
"""Of the output's gradient, where it is summed in another dtype than it is made in: likewise."""


@dataclass(frozen=True)
class HeadMemory:
    """Bytes of one rank."""

    forward_peak: dict[str, float]
    """The most in forward by class, the last block's output included."""
    kept: dict[str, float]
    backward_peak: dict[str, float]
    gradients: float
    """Of the weights, before they are reduced."""


def embedding_peak(job: Job, *, backward: bool = False) -> float:
    """Beside the weight and its gradient: what the look-up makes, under tensor parallelism before it is
    cut."""
    whole = job.tokens * job.shape.dim * job.compute
    if job.degrees.tp == 1:
        return job.stream
    return 2 * whole + job.stream if backward else 3 * whole


def head_memory(job: Job) -> HeadMemory:
    kernels = head_kernels(job)
    saved = frozenset(name for kernel in kernels for name in kernel.saves)
    forward = Ledger({"x": job.stream}, held=saved)
    for kernel in kernels:
        forward.run(kernel.forward)
    kept = Ledger({name: size for name, size in forward.live.items() if name in saved})
    backward = Ledger(dict(kept.live))
    for kernel in reversed(kernels):
        backward.run(kernel.backward)
    gradients = backward.classes.get("gradients", 0.0)
    return HeadMemory(forward.at_peak, kept.classes, backward.at_peak, gradients)


def head_kernels(job: Job) -> list[Kernel]:
    """The final norm, and the output with the loss inside."""
    c, dim, tp = job.compute, job.shape.dim, job.degrees.tp
    engine: Engine = "gpu" if job.device.is_gpu else "cpu"  # neither is ever compiled
    kernels = [norm("norm", "x", "h", job.stream_tokens, dim, c, engine)]
    hidden = "h"
    if tp > 1:
        hidden = "hw"
        kernels.append(gather("h", hidden, job.tokens * dim * c, tp))
    kernels += _full(job, hidden) if job.full_logits else [_chunked(job, hidden)]
    return kernels


def _chunked(job: Job, h: str) -> Kernel:
    """`titancli.losses.chunked.linear_token_loss`: gradients are made in forward, chunk by chunk of the
    tokens."""
    c, dim, tokens, words = job.compute, job.shape.dim, job.tokens, job.shape.vocab_size / job.degrees.tp
    rows = max(1, int(CHUNK["gpu" if job.device.is_gpu else "cpu"] // (FP32 * words)))
    chunks = math.ceil(tokens / rows)
    size = min(rows, tokens)
    events: list[Event] = [
        ("loss:rows", 5 * tokens * FP32),
        ("loss:dh", tokens * dim * c),
        ("loss:dw", words * dim * FP32),
    ]
    # One chunk, as they follow one another: nothing of it is left when the next one begins.
    if c < FP32:  # the product, in fp32, and its gradient in the dtype of the weights
        events += [("loss:mm", size * words * c), ("loss:logits", size * words * FP32), "loss:mm"]
        part = words * dim * c / PARTS
        events += [("loss:back", size * words * c), ("loss:part", part), "loss:part", "loss:back"]
    else:
        events += [("loss:logits", size * words * FP32)]
    events += ["loss:logits", "loss:rows"]
    backward: list[Event] = []
    if c < FP32:
        backward += [("dw:output", words * dim * c), h, "loss:dw"]
    else:
        backward += [h, ("dw:output", "loss:dw")]
    backward += [(f"grad:{h}", "loss:dh")]
    flops = 6.0 * tokens * dim * words
    moved = 3 * (tokens + words * chunks) * dim * c + tokens * words * (2 * c + 5 * 2 * FP32)
    return Kernel(
        tuple(events), tuple(backward), (h, "loss:dh", "loss:dw"), flops=flops, moved=moved, kind="product"
    )


def _full(job: Job, h: str) -> list[Kernel]:
    """All logits at once, and torch's cross-entropy on them."""
    c, dim, tokens, tp = job.compute, job.shape.dim, job.tokens, job.degrees.tp
    words = job.shape.vocab_size
    own, full, part = tokens * words * c, tokens * words * FP32, tokens * words / tp * c
    output = linear("output", h, "loss:part" if tp > 1 else "loss:logits", tokens, (dim, words / tp), c)
    joined: list[Kernel] = []
    if tp > 1:
        forward: tuple[Event, ...] = (("loss:joined", own), ("loss:logits", own), "loss:joined", "loss:part")
        backward: tuple[Event, ...] = (("grad:loss:part", part), "grad:loss:logits")
        joined = [Kernel(forward, backward, kind="collective", sends=("tp", own))]
    wide: list[Event] = [("loss:fp32", full)] if c < FP32 else []
    loss = Kernel(
        (*wide, ("loss:logp", full), "loss:fp32", "loss:logits"),
        (
            *(("loss:dlogp", full), ("loss:dfp32", full), "loss:dlogp", "loss:logp"),
            *(("grad:loss:logits", own), "loss:dfp32"),
        ),
        ("loss:logp",),
        moved=6 * full,
        backward_moved=6 * full,
    )
    return [output, *joined, loss]
