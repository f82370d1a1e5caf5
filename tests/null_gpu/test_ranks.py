"""Two ranks, a GPU each: NCCL's calls end at once, and no rank touches the other's GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TITAN = Path(sys.executable).with_name("titan")
RUN = ["training.steps=3", "checkpoint.interval=2", "lr_scheduler.warmup_steps=1", "metrics.log_freq=1"]
RUN += ["training.mixed_precision_param=bfloat16"]
pytestmark = pytest.mark.cold  # a fork of one that has asked for GPUs may use none
LAYOUTS = {
    "FSDP": ["llama3_debug", 'checkpoint.async_mode="async_with_pinned_mem"'],
    "TP": ["llama3_debug", "mesh.tp=2", "mesh.dp_shard=1", 'checkpoint.async_mode="async"'],
    "PP": ["llama3_debug", "mesh.pp=2", "mesh.dp_shard=1"],
    "experts, in turn": [
        "qwen3_moe_debug",
        "mesh.ep=2",
        "mesh.dp_shard=2",
        "debug.moe_force_load_balance=true",
    ],
    "experts, uneven": [
        "qwen3_moe_debug",
        "mesh.ep=2",
        "mesh.dp_shard=2",
        'callbacks=[{type="uneven", visitors=2048}]',  # 4 rows of 256 tokens, 2 experts each
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_save_and_resume(layout: str, tmp_path: Path) -> None:
    recipe, *changed = LAYOUTS[layout]
    log, plugin = tmp_path / "contexts", ["-p", str(HERE / "uneven.py")] * ("uneven" in layout)
    titan("train", recipe, "--nproc", "2", "--run-dir", "run", *RUN, *changed, *plugin, log=log)
    titan("train", "run", "--resume", "--nproc", "2", "training.steps=4", *plugin, log=log)
    assert (tmp_path / "run" / "checkpoints" / "step-4" / "manifest.json").exists()
    assert {line for line in log.read_text().splitlines() if line[0].isdigit()} == {"0 0", "1 1"}


def titan(*words: str, log: Path) -> None:
    # torch's pipeline stages vote for the shapes that titan gives: 1 says that all are given.
    settings = {"NULL_GPU_NUMBERS": "2", "NULL_GPU_CONTEXTS": str(log)}
    settings["PYTHONPATH"] = f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [TITAN, *words],
        cwd=log.parent,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
