"""Pipeline schedules: how many micro-batches a rank has in flight, and how long it waits for others.

Derived from the orders that `torch/distributed/pipelining/schedules.py` generates; `tests/planning` simulates
those orders and compares.
"""

from __future__ import annotations

from titancli.planning.workload import Workload


def in_flight(work: Workload, pp_rank: int) -> list[int]:
    """Return the peak number of micro-batches whose activations the rank holds, for each of its stages."""
    if work.degrees.pp == 1:
        return [1]
    stages = work.stages // work.degrees.pp
    return under_way(work.pipeline.schedule, work.degrees.pp, pp_rank, work.passes, stages)


def under_way(schedule: str, pp: int, rank: int, count: int, stages: int) -> list[int]:
    """Return the same for `count` micro-batches and `stages` stages per rank."""
    if schedule in ("GPipe", "LoopedBFS"):
        return [count] * stages
    if schedule == "1F1B":
        return [min(count, pp - rank)]
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        down = 2 * pp - rank - (schedule == "ZBVZeroBubble")
        return [min(count, down), min(count, rank + 1)]
    # Interleaved: rounds of micro-batches through one stage after another; `first` is the number of forwards
    # up to and including the one after which backward starts. Zero bubble lets later ranks delay the
    # gradients of weights instead.
    length = count // max(1, count // pp)
    ahead = pp - 1 - rank
    first = (stages - 1) * length + 1 + (2 * ahead if schedule == "Interleaved1F1B" else ahead + rank)
    return [
        sum(1 for i in range(min(first, count * stages)) if i // length % stages == stage)
        for stage in range(stages)
    ]


def bubble(work: Workload) -> float:
    """Return the fraction of a step in which a rank waits for other stages."""
    if work.degrees.pp == 1:
        return 0.0
    return idle_share(work.pipeline.schedule, work.degrees.pp, work.passes, work.stages // work.degrees.pp)


def idle_share(schedule: str, pp: int, count: int, stages: int) -> float:
    """Return the idle fraction if all stages take equally long and backward takes twice as long as
    forward."""
    work = 3 * count * stages
    # A rank's total wait: forward and backward of the stages before it, or, where gradients of weights fill
    # the gaps, one forward each.
    wait = (pp - 1) * (3 if schedule in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS") else 1)
    return wait / (work + wait)
