"""A save, a load, and an upload may take longer than training's collectives are allowed to."""

from __future__ import annotations

import subprocess
import sys
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


def work_of_rank_zero_alone(folder: str, error: bool) -> list[str]:
    import datetime

    import torch.distributed as dist

    from titancli.checkpoint import checkpointer
    from titancli.distributed import process_group
    from titancli.errors import TitanError
    from titancli.recipe.schema import Checkpoint

    done = []

    def work() -> None:
        time.sleep(0.5 if error else 5.0)  # a sign of life at least; and longer than `PATIENCE`
        done.append("done")
        if error:
            raise TitanError("no such day")

    usual = process_group.PATIENCE, checkpointer.SIGN_SECONDS
    process_group.PATIENCE, checkpointer.SIGN_SECONDS = datetime.timedelta(seconds=4), 0.3
    made = checkpointer.Checkpointer(Path(folder), Checkpoint(), lock_text="", run_id="run")
    try:
        made.on_main("working", work)
        made.on_main("working", lambda: done.append(f"again on {dist.get_rank()}"))
    except TitanError as caught:
        done.append(caught.message)
    finally:
        process_group.PATIENCE, checkpointer.SIGN_SECONDS = usual
    return done


@pytest.mark.ranks
def test_ranks_wait_for_what_rank_zero_does_alone_as_long_as_it_gives_signs_of_life(ranks, tmp_path):
    assert ranks(2, work_of_rank_zero_alone, str(tmp_path), False) == [["done", "again on 0"], []]
    assert ranks(2, work_of_rank_zero_alone, str(tmp_path), True) == [
        ["done", "no such day"],
        ["no such day"],
    ]


def load_while_one_rank_is_slow(folder: str) -> list[float]:
    import torch
    import torch.distributed as dist

    from titancli.checkpoint import load_checkpoint, save_checkpoint
    from titancli.checkpoint.format.reader import Reader
    from titancli.distributed.process_group import tighten_timeouts

    save_checkpoint(Path(folder), {"model.weight": torch.ones(3)}, {}, lock_text="", run_id="run")
    tensors = {"model.weight": torch.zeros(3)}
    load_checkpoint(Path(folder), tensors)  # makes the group that waits
    tighten_timeouts(1)
    real = Reader._read

    def slow(*arguments: Any) -> Any:
        time.sleep(3 * dist.get_rank())
        return real(*arguments)

    Reader._read = slow  # type: ignore[method-assign]
    try:
        load_checkpoint(Path(folder), tensors)
    finally:
        Reader._read = real  # type: ignore[method-assign]
    return tensors["model.weight"].tolist()


@pytest.mark.ranks
def test_a_load_waits_for_the_slowest_disk_beyond_the_limit_of_a_step(ranks, tmp_path):
    assert ranks(2, load_while_one_rank_is_slow, str(tmp_path / "step-1")) == [[1.0] * 3] * 2


WAITING = """
import os, sys
import torch.distributed as dist
from titancli.distributed.process_group import patient_group

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
group = patient_group()
if rank == 1:
    os._exit(3)
try:
    dist.all_gather_object([None, None], 1, group=group)
except RuntimeError:
    os._exit(4)
"""


def test_a_rank_that_ends_is_noticed_at_once_however_long_the_others_would_wait(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    command = [sys.executable, str(tmp_path / "waiting.py")]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")]) for rank in (0, 1)]
    assert [rank.wait(60) for rank in ranks] == [4, 3]
