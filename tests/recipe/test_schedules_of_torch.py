"""What layout/stages.py says of pipeline schedules is what torch's own classes do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from titancli.layout.stages import SCHEDULES, StageError, check_microbatches, stage_ranks, stages_of

CASES = [
    (name, pp, per_rank)
    for name, kind in SCHEDULES.items()
    for pp in (1, 2, 3, 4, 8)
    for per_rank in ([1] if kind.stages == (1, 1) else [2] if kind.stages == (2, 2) else [2, 3])
]


def schedule_of(name: str, pp: int, per_rank: int, microbatches: int) -> Any:
    """torch's schedule of rank 0, on stages that only know where they are."""
    total = pp * per_rank
    stages = [
        SimpleNamespace(
            group_size=pp,
            group_rank=0,
            num_stages=total,
            stage_index=i,
            is_first=i == 0,
            is_last=i == total - 1,
            submod=nn.Identity(),
        )
        for i in stages_of(name, pp, 0, total)
    ]
    single = SCHEDULES[name].stages == (1, 1)
    return get_schedule_class(name)(stages[0] if single else stages, microbatches, loss_fn=lambda *_: None)


@pytest.mark.parametrize(("name", "pp", "per_rank"), CASES)
def test_torch_takes_the_micro_batches_that_we_do(name: str, pp: int, per_rank: int) -> None:
    for microbatches in range(1, 20):
        try:
            check_microbatches(name, pp, pp * per_rank, microbatches)
        except StageError:
            with pytest.raises(ValueError, match="icrobatches"):
                schedule_of(name, pp, per_rank, microbatches)
        else:
            schedule_of(name, pp, per_rank, microbatches)


@pytest.mark.parametrize(("name", "pp", "per_rank"), [case for case in CASES if case[2] > 1])
def test_torch_looks_for_stages_where_we_put_them(name: str, pp: int, per_rank: int) -> None:
    total = pp * per_rank
    places = schedule_of(name, pp, per_rank, total).stage_index_to_group_rank
    assert [places[stage] for stage in range(total)] == stage_ranks(name, pp, total)


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.stages == (2, 2)])
def test_torch_runs_v_shaped_schedules_with_two_stages_only(name: str) -> None:
    with pytest.raises((ValueError, AssertionError, IndexError)):
        schedule_of(name, 2, 3, 8)
