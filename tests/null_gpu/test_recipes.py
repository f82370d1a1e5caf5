"""Every small recipe that titan ships, on one device whose kernels do nothing: it trains, saves, resumes and
exports; from the third step on the host waits for nothing; memory is what `titan plan` says.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.null_gpu.device import numbers, total, waits
from tests.null_gpu.table import ROWS, Row
from titancli.cli import main
from titancli.engine import Engine
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import estimate
from titancli.recipe import load_recipe

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.toml"))
SMALL = [
    name
    for name in RECIPES
    if name.endswith("_debug") or name in ("sft_sum", "grpo_digit", "sft_then_grpo_sum")
]
STEPS = 5
RUN = [
    f"training.steps={STEPS}",
    "metrics.log_freq=100",
    "checkpoint.interval=100",
    "lr_scheduler.warmup_steps=1",
]
RUN += ["training.mixed_precision_param=bfloat16"]  # the shipped debug recipes are in fp32, for a CPU
SLACK = 5 * 2**20
"""Bytes: the models here are so small that 3 % is less than one temporary of a loss or a norm."""
MORE = {"sft_debug": ["--unset", "validation"]}  # it counts its targets on the device, and finds none


@dataclass
class Watch:
    """What a run had asked of the device when each of its steps ended."""

    launches: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    """How many of the waits were before."""
    peaks: list[int] = field(default_factory=list)
    """Bytes, without cuBLAS's."""
    waits: list[str] = field(default_factory=list)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    found = Watch()
    step = Engine.optim_step
    clear_memory()
    before = torch.cuda.memory_allocated()

    def optim_step(engine: Engine, *args: Any, **named: Any) -> Any:
        metrics = step(engine, *args, **named)
        peak = torch.cuda.max_memory_allocated() - before
        found.launches.append(total("launches"))
        found.waited.append(len(found.waits))
        found.peaks.append(peak)
        torch.cuda.reset_peak_memory_stats()
        return metrics

    monkeypatch.setattr(Engine, "optim_step", optim_step)
    with waits() as found.waits:
        yield found


def clear_memory() -> int:
    """Free what no tensor needs, and return the bytes that cuBLAS has had."""
    gc.collect()
    with_workspaces = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return int(with_workspaces - torch.cuda.memory_allocated())


@pytest.mark.parametrize("name", SMALL)
def test_it_trains_saves_resumes_and_exports(
    name: str, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers("true" if "grpo" in name else "zeros")
    assert main(["train", name, "--run-dir", "run", *RUN, *MORE.get(name, [])]) == 0
    last, workspaces = len(watch.peaks), clear_memory()
    assert main(["train", "run", "--resume", f"training.steps={STEPS + 1}"]) == 0
    assert main(["convert-checkpoint", f"run/checkpoints/step-{STEPS + 1}", "out", "--to", "hf"]) == 0
    plan = estimate_of(name)
    row = Row(
        name,
        launches=watch.launches[last - 1] - watch.launches[last - 2],
        waits=watch.waited[last - 1] - watch.waited[1],
        peak=max(watch.peaks[1:last]) - workspaces,
        plan=plan,
        done=f"{last} steps, saved, resumed, exported",
    )
    ROWS.append(row)
    # A rollout reads its tokens.
    assert "grpo" in name or not watch.waits[watch.waited[1] : watch.waited[last - 1]]
    assert plan is None or abs(row.peak - plan) <= max(0.03 * plan, SLACK)


def estimate_of(name: str) -> int | None:
    recipe = load_recipe(name, RUN).recipe
    found = estimate(recipe, recipe.degrees(1), DEVICES["H100"])
    return None if found is None else int(found.worst.total)
