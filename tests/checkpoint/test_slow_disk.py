"""A save may take longer than training's collectives are allowed to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest


def save_while_one_rank_is_slow(folder: str) -> list[int]:
    import torch
    import torch.distributed as dist

    from titancli.checkpoint import checkpointer
    from titancli.distributed.process_group import tighten_timeouts
    from titancli.recipe.schema import Checkpoint

    real = checkpointer.run_save
    saved: list[int] = []

    def slow(*arguments: Any) -> None:
        time.sleep(3 * dist.get_rank())
        real(*arguments)

    made = checkpointer.Checkpointer(
        Path(folder),
        Checkpoint(interval=1),
        lock_text="",
        run_id="run",
        on_saved=lambda step, path: saved.append(step),
    )
    tighten_timeouts(1)
    checkpointer.run_save = slow
    try:
        made.save(1, {"model.weight": torch.ones(3)}, {})
    finally:
        checkpointer.run_save = real
    return saved


@pytest.mark.ranks
def test_ranks_wait_for_the_slowest_disk_beyond_the_limit_of_a_step(ranks, tmp_path):
    assert ranks(2, save_while_one_rank_is_slow, str(tmp_path)) == [[1], [1]]
