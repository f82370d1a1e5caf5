"""Steps replayed as CUDA graphs, on a device whose kernels do nothing: launches, waits, memory, refusals."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.null_gpu.device import names, numbers, total, waits
from titancli.cli import main
from titancli.engine import Engine
from titancli.errors import RecipeError
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import estimate
from titancli.protocols.batch import Batch
from titancli.recipe import load_recipe

SMALL = ["training.mixed_precision_param=bfloat16"]
RECIPES = ("llama3_debug", "qwen3_moe_debug", "deepseek_v3_debug", "gpt_oss_debug", "gemma3_debug")
MODES: dict[str, list[str]] = {
    "alone": ["training.global_batch_size=8", "training.local_batch_size=8"],
    "two micro-batches": ["training.global_batch_size=8", "training.local_batch_size=4"],
    "recomputed": ['activation_checkpoint.mode="full"'],
    "compiled": ["compile.enable=true"],
}


def rows(engine: Engine, **more: Any) -> list[Batch]:
    recipe = engine.recipe
    shape = (recipe.training.local_batch_size, recipe.training.seq_len)
    tensors = {name: torch.zeros(shape, dtype=torch.int64, device="cuda") for name in ("tokens", "targets")}
    return [Batch(tensors | more) for _ in range(engine.settings.accumulation)]


@pytest.mark.parametrize("how", ["step", "blocks"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_replayed_step_launches_little_and_waits_for_nothing(name: str, mode: str, how: str) -> None:
    numbers("zeros")
    usual, graphed = (launches(name, mode, one) for one in ("none", how))
    assert graphed[-1] == graphed[-2] < usual[-1] / (3 if how == "step" else 1.2), (usual, graphed)


def launches(name: str, mode: str, how: str) -> list[int]:
    """Launches of six steps; the last two must wait for nothing."""
    recipe = load_recipe(name, [*SMALL, *MODES[mode], f"compile.cuda_graphs={how}"]).recipe
    found = []
    with Engine.build(recipe, device="cuda") as engine:
        for _ in range(6):
            before = total("launches")
            with waits() as waited:
                assert engine.guard is not None and not engine.guard.too_many()
                engine.forward_backward(rows(engine))
                engine.optim_step()
            found.append(total("launches") - before)
        assert not waited
    return found


BIG = ["model.dim=1024", "model.n_layers=8", "model.hidden_dim=4096", "model.vocab_size=32768"]
BIG += ["model.n_heads=16", "model.n_kv_heads=4", "training.seq_len=4096", "training.local_batch_size=1"]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("how", ["step", "blocks"])
def test_memory_is_what_the_plan_says(how: str, recompute: str, batch: int) -> None:
    """Within 8 %: what graphs hold, with its gaps, and the peak of everything else."""
    numbers("zeros")
    changed = [*SMALL, *BIG, f"compile.cuda_graphs={how}", f"training.global_batch_size={batch}"]
    recipe = load_recipe("llama3_debug", [*changed, f"activation_checkpoint.mode={recompute}"]).recipe
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    with Engine.build(recipe, device="cuda") as engine:
        for _ in range(5):
            torch.cuda.reset_peak_memory_stats()
            engine.forward_backward(rows(engine))
            engine.optim_step()
        segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]
        gaps = sum(one["total_size"] - one["allocated_size"] for one in segments)
        found = torch.cuda.max_memory_allocated() - before + gaps
    plan = estimate(recipe, recipe.degrees(1), DEVICES["H100"])
    assert plan is not None and found == pytest.approx(plan.worst.total, rel=0.08)


def test_what_reads_a_number_is_refused_by_name() -> None:
    numbers("zeros")
    recipe = load_recipe("llama3_debug", [*SMALL, "compile.cuda_graphs=step"]).recipe
    with Engine.build(recipe, device="cuda") as engine:
        forward = engine.model.norm.forward
        engine.model.norm.forward = lambda x: forward(x) * (1.0 + 0.0 * x.sum().item())
        for _ in range(2):
            engine.forward_backward(rows(engine))
            engine.optim_step()
        with pytest.raises(RecipeError, match="cannot be captured") as caught:
            engine.forward_backward(rows(engine))
        assert "capturing" in str(caught.value) and engine.status["accumulated"] == 0
        del engine.model.norm.forward
        for _ in range(4):  # the stream and the allocator are as before
            engine.forward_backward(rows(engine))
            engine.optim_step()


def test_a_graph_is_one_launch_of_many_nodes() -> None:
    """The whole micro-batch, and none of its kernels beside it."""
    numbers("zeros")
    recipe = load_recipe("llama3_debug", [*SMALL, "compile.cuda_graphs=step"]).recipe
    with Engine.build(recipe, device="cuda") as engine:
        for _ in range(4):
            engine.forward_backward(rows(engine))
            engine.optim_step()
        before, kernels = total("launches"), names("launches")
        engine.forward_backward(rows(engine))
        launched = names("launches") - kernels
        assert launched["a graph"] == 1 and total("launches") - before < 40
        assert not launched["cublasGemmEx"], launched


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama3_debug", ["dataset.document_mask=true", "training.global_batch_size=16"]),
        ("sft_debug", []),
        ("dpo_debug", []),
    ],
)
def test_a_run_saves_beside_replays_and_resumes(
    name: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batches that a thread prepares, and saves that a thread writes."""
    monkeypatch.chdir(tmp_path)
    numbers("zeros")
    run = [*SMALL, *more, "compile.cuda_graphs=step", "training.steps=6", "lr_scheduler.warmup_steps=1"]
    run += ["checkpoint.interval=2", 'checkpoint.async_mode="async_with_pinned_mem"']
    unset = [] if name == "llama3_debug" else ["--unset", "validation"]  # it finds no targets here
    assert main(["train", name, "--run-dir", "run", *run, *unset]) == 0
    before = names("launches")["a graph"]
    assert main(["train", "run", "--resume", "training.steps=12"]) == 0
    assert names("launches")["a graph"] >= before + 3
