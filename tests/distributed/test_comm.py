"""The time limits of a process group."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from tests.ranks import GROUP_SECONDS
from titancli.distributed import process_group


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
    assert 0.5 < waited < GROUP_SECONDS


def test_one_process_needs_no_group() -> None:
    process_group.tighten_timeouts(1)
