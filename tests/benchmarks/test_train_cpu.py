"""What benchmarks/train_cpu.py and benchmarks/checkpoint.py measure can be built and trains."""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import checkpoint
import train_cpu


def test_titan_trains() -> None:
    stream = train_cpu.batches(2, 32)
    with train_cpu.engine(rows=2, length=32) as step:
        first, *_, last = [float(step(*next(stream))["loss"]) for _ in range(3)]
    assert math.isfinite(last) and abs(first - math.log(train_cpu.VOCABULARY)) < 0.5


def test_a_state_to_save() -> None:
    with checkpoint.tensors() as state:
        size = sum(t.numel() * t.element_size() for t in state.values())
    assert 1.0e9 < size < 1.1e9, "as benchmarks/README.md says"
