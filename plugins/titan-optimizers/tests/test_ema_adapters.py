"""The average of adapters has the values of the formula, and is exported as checkpoints have adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ema_cases
import pytest
import torch
from torch import Tensor

from tests.converters import lora_cases
from tests.engine.cases import small
from titan_testing import run_cli
from titancli.checkpoint import CheckpointReader
from titancli.converters import LoRA

SMALL = ("model.n_layers=2", "training.seq_len=64", "training.local_batch_size=2")
AVERAGE = "callbacks=[{type='ema', decay=0.5}]"
LAYOUTS: dict[str, tuple[int, Any, LoRA]] = {
    "one rank": (1, small(), LoRA(rank=4)),
    "DoRA": (1, small(), LoRA(rank=4, dora=True)),
    "FSDP2": (2, small({"dp_shard": 2}), LoRA(rank=4)),
    "TP": (2, small({"tp": 2}), LoRA(rank=4, dora=True)),
    "PP": (2, small({"pp": 2}), LoRA(rank=4)),
}


@pytest.fixture(scope="module")
def base(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "base"
    ranks(1, lora_cases.save_base, folder)
    return folder


def lag(found: Tensor, average: Tensor, first: Tensor) -> float:
    """How far an average is from what it should be, as a share of how far that has moved. fp32 rounds values
    that move by a 100th of their size."""
    return float((found.double() - average).norm() / (average - first).norm())


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_average_of_adapters(ranks: Any, base: Path, name: str) -> None:
    """In each step 0.3 of the way to the new weights, in fp64; base weights have none."""
    world, layout, lora = LAYOUTS[name]
    parts = ranks(world, ema_cases.averaged, layout, base, lora, 0.7, 4)
    assert parts[0]
    for found, average, first in (triple for part in parts for triple in part.values()):
        assert lag(found, average, first) < 1e-3
    assert all(".lora_" in key for part in parts for key in part)


def test_exported_average_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the checkpoints' values, also after a resume, and converted beside its base."""
    monkeypatch.chdir(tmp_path)
    done = run_cli("train", "llama3_debug", "--run-dir", "base", *SMALL, "training.steps=2")
    assert done.code == 0, done.stderr
    own = ("weights=base/checkpoints/step-2", 'converters=[{type="lora", dora=true}]', AVERAGE)
    saved = ("checkpoint.interval=1", "checkpoint.keep_latest_k=0", "training.steps=2")
    done = run_cli("train", "llama3_debug", "--run-dir", "run", *SMALL, *own, *saved)
    assert done.code == 0, done.stderr
    done = run_cli("train", "run", "--resume", "training.steps=4")
    assert done.code == 0, done.stderr
    export = Path("run/exports/step-4-ema")
    average = CheckpointReader(export)
    assert average.names() and all(".lora_" in name for name in average.names())
    steps = [CheckpointReader(Path(f"run/checkpoints/step-{step}")) for step in (1, 2, 3, 4)]
    begins_at_zero = [name for name in average.names() if ".lora_b" in name.lower()]
    assert begins_at_zero
    for name in begins_at_zero:
        expected = torch.zeros_like(average.read(name), dtype=torch.float64)
        for step in steps:
            expected = 0.5 * expected + 0.5 * step.read(name).double()
        assert lag(average.read(name), expected, torch.zeros_like(expected)) < 1e-3
    for form in ("hf", "peft"):
        done = run_cli("convert-checkpoint", str(export), form, "--to", form)
        assert done.code == 0, done.stderr
