"""The least time that a step can take on the maker's figures, and with it the most tokens a second.

Every operation takes the longer of its arithmetic at the peak rate and its bytes at the memory's rate.
Collectives of tensor, context and expert parallelism wait for the operation before them and are waited for;
those of FSDP and HSDP run beside the arithmetic, and count where they take longer. Nothing is calibrated: a
run comes below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from titancli.planning.blocks import forwards
from titancli.planning.head import head_kernels
from titancli.planning.job import Job
from titancli.planning.kernels import Kernel
from titancli.planning.memory import numbers_at_rest
from titancli.planning.pipeline import bubble
from titancli.planning.shards import stages
from titancli.planning.traffic import flows

BESIDE = ("fsdp", "experts", "dp_replicate")
"""Collectives that run beside the arithmetic."""


@dataclass(frozen=True)
class Speed:
    """Bounds for a whole step, in seconds of the slowest rank."""

    arithmetic: float
    """All operations of the slowest rank, one after the other."""
    waiting: float
    """For collectives that nothing runs beside."""
    beside: float
    """Of collectives that run beside the arithmetic."""
    optimizer: float
    bubble: float
    """The share of the step that a rank waits for other pipeline stages."""
    step: float
    tokens_per_second: float
    """Of one device."""
    mfu: float
    """The share of the peak that the model's own operations use; those that are done again do not count."""


def speed(job: Job) -> Speed | None:
    """None for a device whose figures nobody tells."""
    device = job.device
    if device.flops is None or device.memory_rate is None:
        return None
    ranks = range(job.degrees.pp)
    costs = [_rank(job, rank) for rank in ranks]
    arithmetic = max(cost[0] for cost in costs)
    waiting = max(cost[1] for cost in costs)
    beside = max(cost[2] for cost in costs)
    busy = max(a + w + max(0.0, b - a) for a, w, b in costs)
    own = max(numbers_at_rest(job, rank) for rank in ranks)
    # Read and written once: weights, gradients (scaled as well), state.
    optimizer = own * (2 * job.stored + 3 * job.stored + 2 * job.optimizer_state) / device.memory_rate
    share = bubble(job)
    step = busy / (1 - share) + optimizer
    rate = job.tokens_per_step / step / job.degrees.world
    return Speed(
        arithmetic=arithmetic,
        waiting=waiting,
        beside=beside,
        optimizer=optimizer,
        bubble=share,
        step=step,
        tokens_per_second=rate,
        mfu=rate * job.shape.flops_per_token(job.seq_len) / device.flops,
    )


def _rank(job: Job, pp_rank: int) -> tuple[float, float, float]:
    """Seconds of one rank in a step: arithmetic, collectives in between, collectives beside it."""
    peak, memory_rate = job.device.flops or math.inf, job.device.memory_rate or math.inf
    one_pass = sum(
        count * _seconds(kernel, forwards, peak, memory_rate)
        for kernel, forwards, count in _operations(job, pp_rank)
    )
    waiting = beside = 0.0
    for one in flows(job, pp_rank):
        if one.over in BESIDE:
            beside += one.seconds or 0.0
        elif one.over != "pp":  # between stages there is time enough, or it is part of the bubble
            waiting += one.seconds or 0.0
    return one_pass * job.passes, waiting, beside


def _operations(job: Job, pp_rank: int) -> Iterator[tuple[Kernel, int, int]]:
    """All operations of one pass, with how often each is run forward, and how many such there are."""
    for stage in stages(job, pp_rank):
        for block, recompute, count in job.kinds(stage.blocks):
            for kernel, times in forwards(block, job, recompute):
                yield kernel, times, count
        if stage.has_head:
            yield from ((kernel, 1, 1) for kernel in head_kernels(job))


def _seconds(kernel: Kernel, forwards: int, peak: float, memory_rate: float) -> float:
    forward = max(kernel.flops / peak, kernel.moved / memory_rate)
    backward = max(kernel.backward_flops / peak, kernel.backward_moved / memory_rate)
    return forwards * forward + backward
