"""What each collective moves in one optimizer step, and how long that takes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from titancli.planning.blocks import forwards
from titancli.planning.head import head_kernels
from titancli.planning.job import Job
from titancli.planning.kernels import Kernel
from titancli.planning.shards import EXPERTS, Group, Stage, groups, reshards, stages


@dataclass(frozen=True)
class Flow:
    """One kind of collective of one rank in one step."""

    name: str
    over: str
    """The mesh dimensions."""
    ranks: int
    size: float
    """Bytes that the rank sends."""
    link: str
    """"node" or "network": the slowest that they pass."""
    seconds: float | None
    """None where the device's links are not known."""


ORDER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""From neighbours to the farthest."""


def flows(job: Job, pp_rank: int) -> list[Flow]:
    """Everything that a rank sends in one optimizer step; loss and gradient norm (a few numbers) left out."""
    sizes: dict[tuple[str, str], float] = defaultdict(float)
    for stage in stages(job, pp_rank):
        _parameters(job, stage, sizes)
        _activations(job, stage, sizes)
        if job.degrees.pp > 1:
            neighbours = (not stage.front) + (not stage.has_head)  # gradients back, activations on
            sizes["send/recv", "pp"] += job.passes * neighbours * job.stream
    return [flow(job, name, over, size) for (name, over), size in sizes.items() if size]


def _parameters(job: Job, stage: Stage, sizes: dict[tuple[str, str], float]) -> None:
    for g in groups("back", stage.back, job):
        _group(job, g, job.reshard == "always", 1, sizes)
    for g in groups("front", stage.front, job):
        _group(job, g, not job.shape.tied and reshards(job, g.ranks), 1, sizes)
    for block, _, count in job.kinds(stage.blocks):
        for g in groups("block", block.parameters, job):
            _group(job, g, reshards(job, g.ranks), count, sizes)


def _group(job: Job, g: Group, resharded: bool, count: int, sizes: dict[tuple[str, str], float]) -> None:
    over = "experts" if g.name == EXPERTS else "fsdp"
    gathers = 1 if job.degrees.pp > 1 else job.passes * (1 + resharded)
    sums = 1 if job.unsharded else job.passes
    part, copies = (g.ranks - 1) / g.ranks, job.degrees.dp_replicate
    sizes["all-gather", over] += count * part * g.padded * job.compute * gathers
    sizes["reduce-scatter", over] += count * part * g.padded * job.reduce * sums
    sizes["all-reduce", "dp_replicate"] += count * 2 * (copies - 1) / copies * g.own * job.reduce


def _activations(job: Job, stage: Stage, sizes: dict[tuple[str, str], float]) -> None:
    """The collectives among the operations: each once forward and once backward, and perhaps when run
    again."""
    for block, recompute, count in job.kinds(stage.blocks):
        for kernel, times in forwards(block, job, recompute):
            _add(job, kernel, sizes, count * (times + 1))
    if stage.has_head:
        for kernel in head_kernels(job):
            _add(job, kernel, sizes, 2)
    if stage.front and job.degrees.tp > 1:
        whole = job.tokens * job.shape.dim * job.compute
        _add(job, Kernel(sends=("tp", whole)), sizes, 2)


def _add(job: Job, kernel: Kernel, sizes: dict[tuple[str, str], float], times: int) -> None:
    if kernel.sends is None:
        return
    over, whole = kernel.sends
    ranks = getattr(job.degrees, over)
    name = "all-gather / reduce-scatter"
    if over == "ep" or (over == "cp" and job.context == "ulysses"):
        name = "all-to-all"
    elif over == "cp" and job.context == "ring":
        name = "send/recv"
    sizes[name, over] += times * job.passes * whole * (ranks - 1) / ranks


def flow(job: Job, name: str, over: str, size: float) -> Flow:
    ranks, span = _span(job, over)
    link, seconds = rate(job, ranks, span)
    return Flow(name, over, ranks, size, link, size / seconds if seconds else None)


def _span(job: Job, over: str) -> tuple[int, int]:
    """The ranks of a dimension, and over how many neighbouring ranks they are spread."""
    d = job.degrees
    if over == "ep":
        return d.ep, d.ep
    if over == "fsdp":
        return job.fsdp, d.tp * job.fsdp
    if over == "experts":
        return job.expert_fsdp, d.ep * job.expert_fsdp
    span = 1
    for name in ORDER[: ORDER.index(over) + 1]:
        span *= getattr(d, name)
    return getattr(d, over), span


def rate(job: Job, ranks: int, span: int) -> tuple[str, float | None]:
    """Bytes a second that a rank sends in a ring over `ranks` ranks that are spread over `span` neighbours.

    Beyond a node each of the group's ranks there brings its own network link, so the ring is as fast as those
    together, or as the links inside a node.
    """
    device = job.device
    if span <= device.node:
        return "node", device.link_rate
    if device.link_rate is None or device.network_rate is None:
        return "network", None
    inside = max(1, device.node * ranks // span)
    return "network", min(device.link_rate, inside * device.network_rate)
