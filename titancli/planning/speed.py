"""The bytes that each collective sends in an optimizer step, and a lower bound on the step's time.

From the vendor's figures: every operation takes the longer of its arithmetic at the peak rate and its bytes
at the memory's rate. Collectives of tensor, context and expert parallelism are not overlapped; those of FSDP
and HSDP, and copies from and to the host, overlap with arithmetic and count where they take longer. Nothing
is calibrated, so a real run is slower.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from titancli.observe.peaks import Device
from titancli.planning.host import host
from titancli.planning.measure import BACK, FRONT, Piece, Work
from titancli.planning.memory import numbers_at_rest
from titancli.planning.pipeline import bubble
from titancli.planning.workload import EXPERTS, Group, Stage, Workload, groups, reshards, stages


@dataclass(frozen=True)
class Flow:
    """One kind of collective on one rank in one step."""

    name: str
    over: str
    """Mesh dimensions."""
    ranks: int
    size: float
    """Bytes that the rank sends."""
    link: str
    """"node" or "network": the slowest link on the way."""
    seconds: float | None
    """None if the speed of the device's links is unknown."""


ORDER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""Mesh dimensions from the closest ranks to the farthest."""


def flows(work: Workload, pp_rank: int) -> list[Flow]:
    """Return all traffic of a rank in one optimizer step, except loss and gradient norm (a few numbers)."""
    sizes: dict[tuple[str, str], float] = defaultdict(float)
    for stage in stages(work, pp_rank):
        _parameters(work, stage, sizes)
        _activations(work, stage, sizes)
        if work.degrees.pp > 1:
            neighbours = (not stage.front) + (not stage.has_head)  # gradients back, activations on
            sizes["send/recv", "pp"] += work.passes * neighbours * work.measured().stream
    return [flow(work, name, over, size) for (name, over), size in sizes.items() if size]


def _parameters(work: Workload, stage: Stage, sizes: dict[tuple[str, str], float]) -> None:
    one = work.cut()
    for g in groups("back", stage.back, work):
        _group(work, g, work.reshard == "always", 1, sizes)
    for g in groups("front", stage.front, work):
        _group(work, g, not one.tied and reshards(work, g.ranks), 1, sizes)
    for (kind, _), count in work.kinds(stage.blocks).items():
        for g in groups("block", one.parameters[kind], work):
            _group(work, g, reshards(work, g.ranks), count, sizes)


def _group(
    work: Workload, g: Group, resharded: bool, count: int, sizes: dict[tuple[str, str], float]
) -> None:
    over = "experts" if g.name == EXPERTS else "fsdp"
    gathers = 1 if work.degrees.pp > 1 else work.passes * (1 + resharded)
    sums = 1 if work.unsharded else work.passes
    part, copies = (g.ranks - 1) / g.ranks, work.degrees.dp_replicate
    sizes["all-gather", over] += count * part * g.padded * work.compute * gathers
    sizes["reduce-scatter", over] += count * part * g.padded * g.trained * work.reduce * sums
    sizes["all-reduce", "dp_replicate"] += count * 2 * (copies - 1) / copies * g.own * g.trained * work.reduce


def _activations(work: Workload, stage: Stage, sizes: dict[tuple[str, str], float]) -> None:
    """Add the collectives among the operators of the stage's parts."""
    for piece, count in _pieces(work, stage):
        for one in piece.operators:
            if one.sends is not None:
                name, over, whole = one.sends
                ranks = getattr(work.degrees, over)
                sizes[name, over] += count * work.passes * whole * (ranks - 1) / ranks


def _pieces(work: Workload, stage: Stage) -> Iterator[tuple[Piece, int]]:
    """Yield the parts of a stage, each with its count."""
    if stage.front:
        yield work.piece(FRONT), 1
    for (kind, recompute), count in work.kinds(stage.blocks).items():
        yield work.piece(kind, recompute), count
    if stage.has_head:
        yield work.piece(BACK), 1


def flow(work: Workload, name: str, over: str, size: float) -> Flow:
    ranks, span = _span(work, over)
    link, seconds = rate(work, ranks, span)
    return Flow(name, over, ranks, size, link, size / seconds if seconds else None)


def _span(work: Workload, over: str) -> tuple[int, int]:
    """Return the number of ranks in a dimension, and the number of neighbouring ranks that they span."""
    d = work.degrees
    if over == "ep":
        return d.ep, d.ep
    if over == "fsdp":
        return work.fsdp, d.tp * work.fsdp
    if over == "experts":
        return work.expert_fsdp, d.ep * work.expert_fsdp
    span = 1
    for name in ORDER[: ORDER.index(over) + 1]:
        span *= getattr(d, name)
    return getattr(d, over), span


def rate(work: Workload, ranks: int, span: int) -> tuple[str, float | None]:
    """Return the link and a rank's bytes per second in a ring of `ranks` ranks that span `span` neighbours.

    Beyond a node, each of the group's ranks in the node contributes its own network link, so the ring is as
    fast as those together, or as the links inside the node.
    """
    device = work.device
    if span <= device.node:
        return "node", device.link_rate
    if device.link_rate is None or device.network_rate is None:
        return "network", None
    inside = max(1, device.node * ranks // span)
    return "network", min(device.link_rate, inside * device.network_rate)


# ------------------------------------------------------------------------------------------------ time

BESIDE = ("fsdp", "experts", "dp_replicate")
"""Collectives that overlap with arithmetic."""


@dataclass(frozen=True)
class Speed:
    """Bounds for a whole step, in seconds of the slowest rank."""

    arithmetic: float
    """All operators of the slowest rank, one after another."""
    waiting: float
    """Collectives that nothing overlaps with."""
    beside: float
    """Collectives that overlap with arithmetic."""
    host: float
    """Copies from and to the host's memory, beyond the arithmetic that they are made beside."""
    optimizer: float
    """0 where it steps on the CPU, whose time is not estimated."""
    bubble: float
    """Fraction of the step in which a rank waits for other pipeline stages."""
    step: float
    tokens_per_second: float
    """Per device."""
    mfu: float
    """Fraction of the peak FLOPS that the model's own operations use, at most 1; without recomputation.
    By convention all scores count, also those that causal attention skips."""


def speed(work: Workload) -> Speed | None:
    """Estimate a step's time; None if the device's speed is unknown."""
    device = work.device
    if device.flops is None or device.memory_rate is None:
        return None
    ranks = range(work.degrees.pp)
    costs = [_rank(work, rank) for rank in ranks]
    arithmetic, waiting, beside, copies = (max(of_each) for of_each in zip(*costs, strict=True))
    busy = max(w + max(a + h, b) for a, w, b, h in costs)
    own = max(numbers_at_rest(work, rank) for rank in ranks)
    # Weights, gradients (also scaled) and state are read and written once.
    optimizer = own * (2 * work.stored + 3 * work.stored + 2 * work.optimizer_state) / device.memory_rate
    if work.offloaded:
        optimizer = 0.0
    share = bubble(work)
    step = busy / (1 - share) + optimizer
    rate = work.tokens_per_step / step / work.degrees.world
    return Speed(
        arithmetic=arithmetic,
        waiting=waiting,
        beside=beside,
        host=copies,
        optimizer=optimizer,
        bubble=share,
        step=step,
        tokens_per_second=rate,
        mfu=min(1.0, rate * work.blueprint.flops_per_token / device.flops),
    )


def _rank(work: Workload, pp_rank: int) -> tuple[float, float, float, float]:
    """Return the seconds of one rank in a step: arithmetic, exposed collectives, overlapped collectives, and
    exposed copies from and to the host."""
    forward = backward = 0.0
    for stage in stages(work, pp_rank):
        for piece, count in _pieces(work, stage):
            seconds = [work.passes * count * _seconds(one, work.device) for one in piece.operators]
            forward += sum(seconds[: piece.turn])
            backward += sum(seconds[piece.turn :])
    waiting = beside = 0.0
    for one in flows(work, pp_rank):
        if one.over in BESIDE:
            beside += one.seconds or 0.0
        elif one.over != "pp":  # transfers between stages overlap or are part of the bubble
            waiting += one.seconds or 0.0
    there, rate = host(work, pp_rank), work.device.host_rate
    exposed = 0.0 if there is None or rate is None else there.exposed(rate, forward, backward)
    return forward + backward, waiting, beside, exposed


def _seconds(one: Work, device: Device) -> float:
    peak, memory_rate = device.peak(one.bits) or math.inf, device.memory_rate or math.inf
    return max(one.flops / peak, one.moved / memory_rate)
