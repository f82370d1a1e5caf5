"""The process group: results and errors of rank 0 everywhere, comparing ranks, time limits."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from titancli.distributed import process_group
from titancli.errors import EnvironmentProblem, RankFailure, TitanError


def on_rank_zero() -> object:
    import torch.distributed as dist

    def only_here() -> str:
        if dist.get_rank() != 0:
            raise AssertionError("called on another rank")
        return "made"

    def broken() -> str:
        raise EnvironmentProblem("no space", hint="make some")

    def careless() -> str:
        raise OSError("stale")

    # The others only repeat it: what the user sees is rank 0's own, with its traceback.
    with pytest.raises(OSError if dist.get_rank() == 0 else RankFailure, match="stale"):
        process_group.on_rank_zero(careless)
    result = process_group.on_rank_zero(only_here)
    try:
        process_group.on_rank_zero(broken)
    except TitanError as error:
        return result, type(error).__name__, error.message, error.hint
    return None


@pytest.mark.ranks
def test_what_rank_zero_returns_or_raises_reaches_every_rank(ranks) -> None:  # type: ignore[no-untyped-def]
    assert ranks(2, on_rank_zero) == [("made", "EnvironmentProblem", "no space", "make some")] * 2


def compare() -> str:
    import torch.distributed as dist

    process_group.require_same("recipes", "abc", "host")
    try:
        process_group.require_same("recipes", f"recipe {dist.get_rank()}", "host")
    except EnvironmentProblem as error:
        return error.message
    return "nothing was noticed"


@pytest.mark.ranks
def test_ranks_that_differ_are_named_on_every_rank(ranks) -> None:  # type: ignore[no-untyped-def]
    message = "the ranks were started with different recipes"
    listed = "  rank 0 on host: recipe 0\n  rank 1 on host: recipe 1"
    assert ranks(2, compare) == [f"{message}\n{listed}"] * 2


def wait_too_long(sub_group: bool) -> float | None:
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1]) if sub_group else None
    process_group.tighten_timeouts(1)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["the other has its error"], timedelta(seconds=60))
        return None
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:
        return time.monotonic() - began
    finally:
        store.set("the other has its error", b"")
    return None


@pytest.mark.ranks
@pytest.mark.parametrize("sub_group", [False, True])
def test_tightened_time_limits_hold_in_every_group(ranks, sub_group: bool) -> None:  # type: ignore[no-untyped-def]
    waited, _ = ranks(2, wait_too_long, sub_group)
    assert waited is not None
    assert 0.5 < waited < 30  # and not the 60 s that the group was made with


def test_one_process_needs_no_group() -> None:
    process_group.tighten_timeouts(1)
    process_group.require_same("recipes", "abc", "host")
    assert process_group.on_rank_zero(lambda: 3) == 3
