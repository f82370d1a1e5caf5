"""An error of the worker reaches the user as one block, on one rank and on four."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Command

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_error_of_the_worker_is_one_block(command: Callable[..., Command], here: Path, ranks: int) -> None:
    last = str(ranks - 1)
    fault = ("-p", "./faulty.py", "loss=faulty", "loss.fault=error", f"loss.rank={last}", "loss.call=2")
    done = command("tiny.toml", *fault, "--nproc", str(ranks), "--run-dir", "r").wait()
    assert done.code == 1
    block = done.err[done.err.index("error: ") :].splitlines()
    who = f"rank {last} of 4 on " if ranks > 1 else "the run failed"
    assert "failed at step 2: ValueError: a row of 13 tokens" in block[0]
    assert block[0].startswith(f"error: {who}")
    assert sum('faulty.py", line' in line for line in block) == 1  # the plugin's own frame
    assert sum("in the loss faulty/faulty, faulty.py:" in line for line in block) == 1
    assert not [line for line in block if "torch/distributed/elastic" in line or "torch/nn/modules" in line]
    assert block.count("Traceback (most recent call last):") == 1
    (log,) = [line.removeprefix("log: ") for line in block if line.startswith("log: ")]
    assert (here / log).is_file()
    assert len(block) < 33, done.err
    assert done.err.count("Traceback (most recent call last):") == 1
