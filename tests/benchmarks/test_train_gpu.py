"""benchmarks/train_gpu.py on a CPU: what it compares is the same, and what a cut-off run leaves is right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_steps

CPU = torch.device("cpu")


def case(variant: str, **given: Any) -> gpu_steps.Case:
    """Of the smallest model, uncompiled."""
    fields = dict(model="debugmodel", variant=variant, repeat=0, rows=2, seq_len=32, steps=2, warmup=1)
    return gpu_steps.Case(**{**fields, "curve": 0, "profile": 0, "device": "cpu", "compile": False, **given})


def test_more_rows_are_the_same_ones_and_others_after_them() -> None:
    few, many = gpu_steps.rows_of(3, 2, 16, 300), gpu_steps.rows_of(4, 4, 16, 300)
    assert few.shape == (3, 2, 17) and few.max() < 300
    assert torch.equal(few.flatten(0, 1), many.flatten(0, 1)[:6])
    assert torch.equal(few.flatten(0, 1)[1:, 0], few.flatten(0, 1)[:-1, -1])  # as a run cuts a stream


@pytest.mark.slow
@pytest.mark.e2e
def test_the_command_trains_on_what_the_engine_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same rows, same rates: the loss of the last step is the same number."""
    (tmp_path / "tiny.toml").write_text('extends = "titan:llama3_debug"\nmodel = {dim = 32, n_layers = 2}\n')
    monkeypatch.setitem(gpu_steps.RECIPES, "debugmodel", str(tmp_path / "tiny.toml"))
    engine, command = case("titan", curve=3), case("titan train")
    assert gpu_steps.train(command)["loss"] == gpu_steps.measure(engine, CPU)["losses"][-1]
