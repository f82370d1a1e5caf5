"""Bubbles and micro-batches under way are those of torch's own orders, run against a clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from titancli.planning.pipeline import idle_share, under_way

SECONDS = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}
SCHEDULES = [
    ("GPipe", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 3),
    ("LoopedBFS", 2),
    ("InterleavedZeroBubble", 2),
    ("InterleavedZeroBubble", 3),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]
SIZES = [(2, 8), (4, 8), (4, 16), (8, 32)]


def order(schedule: str, pp: int, count: int, stages: int) -> list[list[Any]]:
    ranks = get_schedule_ops(schedule, pp, count, stages if stages > 1 else None)
    flat = [[a for action in rank if action for a in (action.sub_actions or [action])] for rank in ranks]
    return [[action for action in rank if action.computation_type.name in SECONDS] for rank in flat]


def clock(ranks: list[list[Any]]) -> float:
    """When all is done, if an action begins as soon as its rank is free and what it needs is there."""
    last = max(action.stage_index for rank in ranks for action in rank)
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(ranks), [0] * len(ranks)
    while any(place < len(rank) for place, rank in zip(at, ranks, strict=True)):
        before = sum(at)
        for number, rank in enumerate(ranks):
            while at[number] < len(rank):
                action = rank[at[number]]
                kind, stage, batch = action.computation_type.name, action.stage_index, action.microbatch_index
                needs = {
                    "FORWARD": [("F", stage - 1, batch)] if stage else [],
                    "BACKWARD_WEIGHT": [("B", stage, batch)],
                }.get(kind, [("F", stage, batch)] + [("B", stage + 1, batch)] * (stage < last))
                if any(need not in done for need in needs):
                    break
                free[number] = max([free[number], *(done[need] for need in needs)]) + SECONDS[kind]
                name = {"FORWARD": "F", "BACKWARD_WEIGHT": "W"}.get(kind, "B")
                done[name, stage, batch] = free[number]
                at[number] += 1
        assert sum(at) > before, "no rank can go on"
    return max(free)


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
@pytest.mark.parametrize(("pp", "count"), SIZES)
def test_the_bubble_is_that_of_the_order(schedule: str, stages: int, pp: int, count: int) -> None:
    whole = clock(order(schedule, pp, count, stages))
    idle = 1 - 3 * count * stages / whole
    assert idle_share(schedule, pp, count, stages) == pytest.approx(idle, abs=1e-9)


@pytest.mark.parametrize(("schedule", "stages"), [*SCHEDULES, ("1F1B", 1)])
@pytest.mark.parametrize(("pp", "count"), SIZES)
def test_the_micro_batches_under_way_are_those_of_the_order(
    schedule: str, stages: int, pp: int, count: int
) -> None:
    for rank, actions in enumerate(order(schedule, pp, count, stages)):
        now: Counter[int] = Counter()
        most = 0
        for action in actions:
            name = action.computation_type.name
            now[action.stage_index] += {"FORWARD": 1, "BACKWARD_INPUT": 0}.get(name, -1)
            most = max(most, now.total())
        assert sum(under_way(schedule, pp, rank, count, stages)) == most


def test_one_f_one_b_waits_as_long_as_gpipe() -> None:
    assert idle_share("1F1B", 4, 8, 1) == idle_share("GPipe", 4, 8, 1) == pytest.approx(3 / 11)
    assert under_way("1F1B", 4, 0, 2, 1) == [2]
