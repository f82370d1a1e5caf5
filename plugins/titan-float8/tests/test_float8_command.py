"""A run in float8 by the command: trained, stopped, resumed, exported, and loaded in transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_float8.ao import NOISE
from titan_testing import recipe, run_cli

FLOAT8 = """
name = "float8"

[requires]
plugins = ["titan-float8>=0.1"]

[[converters]]
type = "float8_linear"
skip = ["output"]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true

[lr_scheduler]
total_steps = 5

[checkpoint]
enable = true
"""


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    return [event["metrics"]["loss"] for event in events if event["event"] == "step"]


def test_a_run_is_trained_resumed_and_exported(tmp_path: Path) -> None:
    path = recipe(tmp_path, FLOAT8)
    for run, steps in (("whole", 5), ("parts", 3)):
        done = run_cli("train", path, "--run-dir", run, f"training.steps={steps}", cwd=tmp_path)
        assert done.code == 0, done.stderr
    done = run_cli("train", "parts", "--resume", "training.steps=5", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    for words in NOISE.values():
        assert words not in done.stderr

    done = run_cli("convert-checkpoint", "whole/checkpoints/step-5", "hf", "--to", "hf", cwd=tmp_path)
    assert done.code == 0, done.stderr
    check_export(tmp_path)


def check_export(folder: Path) -> None:
    """transformers loads it as it is, and it holds the very numbers of the checkpoint."""
    from transformers import AutoModelForCausalLM

    from titancli.checkpoint import CheckpointReader

    theirs: dict[str, Any] = AutoModelForCausalLM.from_pretrained(folder / "hf").state_dict()
    ours = CheckpointReader(folder / "whole" / "checkpoints" / "step-5", prefix="model.")
    for name, hf_name in (
        ("layers.1.feed_forward.w2.weight", "model.layers.1.mlp.down_proj.weight"),
        ("layers.0.attention.wq.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("output.weight", "lm_head.weight"),
    ):
        assert torch.equal(theirs[hf_name], ours.read(name))


def test_a_checkpoint_goes_on_without_float8(tmp_path: Path) -> None:
    done = run_cli("train", recipe(tmp_path, FLOAT8), "--run-dir", "float8", cwd=tmp_path)
    assert done.code == 0, done.stderr
    done = run_cli(
        "train",
        "float8",
        "--resume",
        "converters=[]",
        "requires.plugins=[]",
        "training.steps=4",
        cwd=tmp_path,
    )
    assert done.code == 0, done.stderr
    assert len(losses(tmp_path / "float8")) == 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("converters.0.recipe=rowwise", "one scale per tensor"),
        ("converters.0.skip=['output', 'wz']", "skip = 'wz' matches no linear layer"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(tmp_path: Path, override: str, said: str) -> None:
    done = run_cli("train", recipe(tmp_path, FLOAT8), override, cwd=tmp_path)
    assert done.code == 3
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_layers_left_alone_are_an_event(tmp_path: Path) -> None:
    text = FLOAT8.replace('skip = ["output"]\n', "")
    done = run_cli("train", recipe(tmp_path, text), "--run-dir", "r", "checkpoint.enable=false", cwd=tmp_path)
    assert done.code == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").open()]
    (event,) = [event for event in events if event["event"] == "log"]
    assert event["level"] == logging.getLevelName(logging.WARNING).lower()
    assert "does not convert these layers: output" in event["message"]
