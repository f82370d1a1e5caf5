"""The average of adapters is exported as checkpoints have them: without the base, which it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_testing import run_cli
from titancli.checkpoint import CheckpointReader

SMALL = ("model.n_layers=2", "training.seq_len=64", "training.local_batch_size=2", "training.steps=2")


def test_an_average_of_adapters_is_converted_beside_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_cli("train", "llama3_debug", "--run-dir", "base", *SMALL)
    assert done.code == 0, done.stderr
    own = ("weights=base/checkpoints/step-2", 'converters=[{type="lora", dora=true}]', 'callbacks=["ema"]')
    done = run_cli("train", "llama3_debug", "--run-dir", "run", *SMALL, *own)
    assert done.code == 0, done.stderr
    average = Path("run/exports/step-2-ema")
    names = CheckpointReader(average).names()
    assert names and all(".lora_" in name for name in names)
    for form in ("hf", "peft"):
        done = run_cli("convert-checkpoint", str(average), form, "--to", form)
        assert done.code == 0, done.stderr
