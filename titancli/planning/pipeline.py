"""Pipeline schedules: how many micro-batches a rank has under way, and how long it waits for others.

Counted over the orders that `torch/distributed/pipelining/schedules.py` makes; `tests/planning` runs those
orders through a clock and compares.
"""

from __future__ import annotations

from titancli.planning.workload import Workload


def in_flight(work: Workload, pp_rank: int) -> list[int]:
    """For each stage that the rank holds: micro-batches whose activations it has, at the worst moment."""
    if work.degrees.pp == 1:
        return [1]
    stages = work.stages // work.degrees.pp
    return under_way(work.pipeline.schedule, work.degrees.pp, pp_rank, work.passes, stages)


def under_way(schedule: str, pp: int, rank: int, count: int, stages: int) -> list[int]:
    """As above, for `count` micro-batches and `stages` stages on each rank."""
    if schedule in ("GPipe", "LoopedBFS"):
        return [count] * stages
    if schedule == "1F1B":
        return [min(count, pp - rank)]
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        down = 2 * pp - rank - (schedule == "ZBVZeroBubble")
        return [min(count, down), min(count, rank + 1)]
    # Interleaved: rounds of micro-batches through one stage after the other; so many forwards before the
    # first backward, and one more. Zero bubble lets later ranks put off the gradients of weights instead.
    length = count // max(1, count // pp)
    ahead = pp - 1 - rank
    first = (stages - 1) * length + 1 + (2 * ahead if schedule == "Interleaved1F1B" else ahead + rank)
    return [
        sum(1 for i in range(min(first, count * stages)) if i // length % stages == stage)
        for stage in range(stages)
    ]


def bubble(work: Workload) -> float:
    """The share of a step in which a rank waits for other stages."""
    if work.degrees.pp == 1:
        return 0.0
    return idle_share(work.pipeline.schedule, work.degrees.pp, work.passes, work.stages // work.degrees.pp)


def idle_share(schedule: str, pp: int, count: int, stages: int) -> float:
    """Of stages that all take equally long, with backward twice as long as forward."""
    work = 3 * count * stages
    # What a rank waits for in all: forward and backward of the stages before it, or, where the gradients of
    # weights fill the gaps, one forward each.
    wait = (pp - 1) * (3 if schedule in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS") else 1)
    return wait / (work + wait)
