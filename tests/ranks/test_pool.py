"""The pool itself: ranks that die are told of with their last words, and run again where gloo is at fault."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import __main__ as rank

GLOO = "terminate called after throwing: [enforce fail at gloo/transport/tcp/address.cc:81] rv != -1"


def dies_once(words: str, folder: Path, rank: int) -> int:
    ours = int(os.environ["RANK"])
    if ours == rank and not (folder / "died").exists():
        (folder / "died").touch()
        os.write(2, words.encode())
        os.abort()
    return ours


@pytest.mark.ranks
def test_a_rank_that_dies_is_told_of_with_its_last_words(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 of 2 died with -6: out of luck"):
        ranks(2, dies_once, "out of luck", tmp_path, 1)
    assert ranks(2, dies_once, "", tmp_path, 1) == [0, 1]


@pytest.mark.ranks
def test_a_case_in_which_gloo_aborts_is_run_again_and_told_of(
    ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="the case is run again: rank 1 of 2 died with -6: .*address.cc:81"):
        assert ranks(2, dies_once, GLOO, tmp_path, 1) == [0, 1]
    assert GLOO in capfd.readouterr().err


def test_a_rank_waits_until_the_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    store, began = dist.HashStore(), time.monotonic()
    threading.Timer(0.3, store.add, (rank.DONE, 1)).start()
    rank.leave_together(store, 2)
    assert time.monotonic() - began >= 0.3
    monkeypatch.setattr(rank, "LINGER", 0.2)
    rank.leave_together(store, 4)  # one never comes
