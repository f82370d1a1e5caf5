"""The memory that one block takes, and that of the embedding, the output and the loss: what they keep from
forward to backward, and the most that is there in each. It follows from their operations
(`titancli.planning.blocks`); `titancli.planning.memory` puts them into a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from titancli.models.shape import Block
from titancli.planning.blocks import block_operations, head_operations, runs_through
from titancli.planning.operations import FP32
from titancli.planning.workload import Workload

PARTS = 8
"""Of the output's gradient, where it is summed in another dtype than it is made in:
`titancli.losses.chunked`."""


def in_all(classes: Mapping[str, float]) -> float:
    return sum(classes.values())


@dataclass(frozen=True)
class BlockMemory:
    """What one block takes, in bytes of one rank."""

    forward: float
    """The most in forward."""
    kept: float
    """What stays from forward to backward."""
    backward: dict[str, float]
    """The most in backward, by class."""
    gradients: float
    """Of its weights, before they are reduced."""
    experts_done: dict[str, float]
    """By class, what there is in backward when the experts have their gradients, which are reduced then."""


def block_memory(block: Block, work: Workload, recompute: str) -> BlockMemory:
    """`recompute`: what activation checkpointing does with this block, as in `Workload.recomputed`."""
    if recompute.startswith("budget"):
        least, most = (block_memory(block, work, mode) for mode in ("full", "none"))
        share = float(recompute.split()[1])  # 0: what full checkpointing keeps; 1: what the compiler likes
        return replace(most, kept=least.kept + share * (most.kept - least.kept))
    operations = block_operations(block, work)
    if recompute == "full":
        operations = [replace(one, part="block", keeps=()) for one in operations]
    through = runs_through(operations)
    sizes, first_use = {"x": work.stream}, {"x": 0}
    for number, one in enumerate(operations):
        sizes |= {one.result: one.size, **one.saves}
        first_use = dict.fromkeys(one.saves, number) | first_use
    only_kept: dict[str, set[str]] = defaultdict(set)  # by part, what no operation saves
    handed_over: dict[str, set[str]] = defaultdict(set)  # and of that, what is used as the part runs again
    for one, reached in zip(operations, through, strict=True):
        only_kept[one.part] |= set(one.keeps) - set(first_use)
        handed_over[one.part] |= set(one.keeps) - set(first_use) if reached else set()

    def total(names: Iterable[str]) -> float:
        return sum(sizes[name] for name in names)

    def forward(part: str | None, stay: set[str], there: set[str]) -> float:
        """The most as a part (None: all) runs forward: these are there, or are made and stay."""
        return max(
            total(name for name in stay if name in there or first_use.get(name, 0) <= number)
            + (one.alive if one.result in there else one.alive + one.inside)
            for number, one in enumerate(operations)
            if part in (None, one.part)
        )

    held = {name for one in operations for name in one.saves}
    if recompute != "none":
        held = {"x"} | {one.enters for one in operations if one.enters and recompute in ("op", "products")}
        for one, reached in zip(operations, through, strict=True):
            held |= set() if one.part else set(one.saves)
            # Compiled code drops what is kept for nothing: what only the part's own result is made of.
            if one.part and (reached or work.engine != "compiled"):
                held |= set(one.keeps)
    live, passed_on, gradients, part = set(held), work.stream, 0.0, ""
    peak, experts_done = {"activations": 0.0}, {}
    for number, one in reversed([*enumerate(operations)]):
        if recompute != "none" and one.part != part:
            live -= only_kept[part]
            part = one.part
            live |= {name for other in operations if part and other.part == part for name in other.saves}
            live -= handed_over[part]
            if part:
                again = {"activations": passed_on + forward(part, live, held), "gradients": gradients}
                peak = max(peak, again, key=in_all)
        gradients += one.weights
        passed_on += one.gradients
        moment = {"activations": total(live) + passed_on + one.beside, "gradients": gradients}
        peak = max(peak, moment, key=in_all)
        passed_on -= one.done
        live -= {name for name in one.saves if first_use[name] == number}
        if one.kind == "grouped":
            experts_done = {"activations": total(live) + passed_on, "gradients": gradients}
    first = work.stream + forward(None, held, set())
    return BlockMemory(first, total(held), peak, gradients, experts_done)


@dataclass(frozen=True)
class HeadMemory:
    """What the final norm, the output and the loss take: bytes of one rank, by class."""

    forward: dict[str, float]
    """The most in forward, the last block's output included."""
    kept: dict[str, float]
    backward: dict[str, float]
    """The most in backward."""
    gradients: float
    """Of the weights, before they are reduced."""


def head_memory(work: Workload) -> HeadMemory:
    norm, *_ = head_operations(work)
    work = work.head
    c, tokens, stream, tp = work.compute, work.tokens, work.stream, work.degrees.tp
    words, hidden = work.shape.vocab_size / tp, tokens * work.shape.dim * c
    held, weight = sum(norm.saves.values()), words * hidden / tokens
    if work.full_logits:
        part, logits = tokens * words * c, tokens * work.shape.vocab_size * c
        full = tokens * work.shape.vocab_size * FP32
        forward = max(logits + full + full * (c < FP32), (2 * logits + part) * (tp > 1))
        kept, backward, output = full, 3 * full, {"loss": part, "activations": hidden, "gradients": weight}
    else:  # gradients are made in forward, chunk by chunk of the tokens: `linear_token_loss`
        rows, summed = min(work.chunk_rows, tokens), words * work.shape.dim * FP32
        forward = 5 * tokens * FP32 + hidden + summed
        if work.fused_loss:  # their gradient takes the place of the logits
            forward += rows * words * c
        else:
            forward += rows * words * FP32
            if c < FP32:  # and the gradient of logits, in the dtype of the weights
                forward += rows * words * c + weight / PARTS
        kept = backward = hidden + summed
        output = {"loss": kept, "gradients": weight * (c < FP32)}
    before = held + ("x" not in norm.saves) * stream + (tp > 1) * stream + hidden
    moments = (
        {"activations": held + hidden, "loss": backward},
        {**output, "activations": held + hidden + output.get("activations", 0.0)},
        {"activations": held + (stream if tp == 1 else 2 * hidden) + norm.beside, "gradients": weight},
    )
    return HeadMemory(
        forward={"activations": before, "loss": forward},
        kept={"activations": held + hidden, "loss": kept},
        backward=max(moments, key=in_all),
        gradients=weight + norm.weights,
    )


def embedding_peak(work: Workload, *, backward: bool = False) -> float:
    """Beside the weight and its gradient: what the look-up makes, under tensor parallelism before it is
    sharded."""
    work = work.head  # as many look-ups as hidden states
    whole = work.tokens * work.shape.dim * work.compute
    if work.degrees.tp == 1:
        return work.stream
    return 2 * whole + work.stream if backward else 3 * whole
