"""How often ranks exchange something in a save and in a load: on thousands of ranks each is a wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.test_together import Counted
from tests.ranks import Ranks


def exchanges(folder: str) -> list[int]:
    from titancli.checkpoint import load_checkpoint
    from titancli.checkpoint.format.plan import SavePlan
    from titancli.checkpoint.format.storage import pieces_of
    from titancli.checkpoint.save import Draft, run_save

    tensors, plan, found = {"model.weight": torch.ones(3)}, SavePlan(), []
    for step in (1, 2):
        draft = Draft(Path(folder) / f"step-{step}", {}, "", "run", {})
        with Counted() as counted:
            run_save(pieces_of(tensors), draft, None, plan)
        found.append(counted.count)
    load_checkpoint(draft.folder, tensors)  # makes the group that waits
    with Counted() as counted:
        load_checkpoint(draft.folder, tensors)
    return [*found, counted.count]


@pytest.mark.ranks
def test_a_save_is_planned_once_and_ranks_exchange_little(ranks: Ranks, tmp_path: Path) -> None:
    first, again, load = ranks(2, exchanges, str(tmp_path))[0]
    assert (first, again, load) == (14, 7, 10)
