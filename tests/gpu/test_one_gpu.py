"""What one GPU must do, and a CPU cannot show: nothing waits, memory is as planned, its kernels are right.

`cuda` rows are marked `gpu`; the `cpu` rows beside them run the same lines, so that a GPU's first run is not
spent on their mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.checkpoint.tensors import RUN, bits
from tests.planning.measure import measured, planned
from titancli.checkpoint import Checkpointer, load_checkpoint
from titancli.cli import main
from titancli.engine import Engine
from titancli.optimizers import AdamW
from titancli.optimizers.adamw import build
from titancli.protocols.batch import Batch
from titancli.recipe import load_recipe
from titancli.recipe.schema import Checkpoint

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICES_TRIED = [pytest.param("cuda", marks=GPU), pytest.param("cpu", marks=pytest.mark.slow)]


@pytest.fixture(params=DEVICES_TRIED)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def distance(found: Tensor, expected: Tensor) -> float:
    """‖Δ‖ / ‖expected‖."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())


# ---------------------------------------------------------------------------------------------- waiting

SMALL = ["training.seq_len=16", "training.local_batch_size=2", "training.mixed_precision_param=bfloat16"]
FAMILIES = ("gpt_oss_debug", "deepseek_v3_debug", "llama4_debug", "qwen3_moe_debug", "qwen3_next_debug")
STEPS: dict[str, list[str]] = {
    "as shipped": [],
    "compiled": ["compile.enable=true"],
    "bf16 moments": ['optimizer.state_dtype="bfloat16"'],
    "bf16 parameters": ["training.dtype=bfloat16"],
    "products kept": [
        'activation_checkpoint.mode="selective"',
        'activation_checkpoint.selective_ac_option="products"',
    ],
    "whole logits": ['loss="cross_entropy_full"'],
    "muon": ['optimizer="muon"'],
    "two micro-batches": ["training.global_batch_size=4"],
    "documents": [],
    "documents, compiled": ["compile.enable=true"],
}


@contextmanager
def refused_to_wait(device: torch.device) -> Iterator[None]:
    """Any wait of the host for the GPU raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [*STEPS, *FAMILIES])
def test_a_step_does_not_wait_for_the_device(device: torch.device, name: str) -> None:
    if device.type == "cpu" and name.endswith("compiled"):
        pytest.skip("compiled steps are tried on the CPU elsewhere")
    shipped, changed = (name, []) if name in FAMILIES else ("llama3_debug", ["model.n_layers=2"])
    recipe = load_recipe(shipped, [*SMALL, *changed, *STEPS.get(name, [])]).recipe
    with Engine.build(recipe, device=device) as engine:
        draw = torch.Generator().manual_seed(0)
        words = recipe.model.vocab_size  # type: ignore[attr-defined]
        rows = torch.randint(0, words, (engine.settings.accumulation, 2, 17), generator=draw)
        batches = [
            Batch({"tokens": row[:, :-1].contiguous(), "targets": row[:, 1:].contiguous()}) for row in rows
        ]
        if name.startswith("documents"):
            ids = (torch.arange(16) // torch.tensor([[5], [16]])).int()
            batches = [Batch({**batch, "document_ids": ids}) for batch in batches]
        batches = [batch.to(device) for batch in batches]
        losses = []
        for number in range(4):
            with refused_to_wait(device) if number > 1 else nothing():  # the first allocates and compiles
                metrics = engine.forward_backward(batches)
                metrics |= engine.optim_step()
            losses.append(metrics["loss"])
    assert torch.stack(losses).isfinite().all()


@contextmanager
def nothing() -> Iterator[None]:
    yield


# ----------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("recompute", ["none", "products", "full"])
def test_memory_is_what_the_plan_says(device: torch.device, recompute: str) -> None:
    """Within 5 % of the allocator's peak, for 300 M parameters on 4096 tokens; on the CPU: fake tensors'."""
    mode = recompute if recompute != "products" else "selective"
    made = [f'activation_checkpoint.mode="{mode}"', "training.mixed_precision_param=bfloat16"]
    made += ['activation_checkpoint.selective_ac_option="products"'] if recompute == "products" else []
    made += ["model.n_heads=16", "model.n_kv_heads=4", "training.local_batch_size=1"]
    big = ["model.dim=1024", "model.n_layers=16", "model.hidden_dim=4096", "model.vocab_size=32768"]
    big = [*big, "training.seq_len=4096"] if device.type == "cuda" else ["model.n_layers=2"]
    recipe = load_recipe("llama3_debug", [*made, *big]).recipe
    if device.type == "cpu":
        assert planned(recipe, 1).worst.total == pytest.approx(measured(recipe, 1), rel=0.05)
        return
    plan = planned(recipe, 1, "H200").worst.total
    before = torch.cuda.memory_allocated(device)
    with Engine.build(recipe, device=device) as engine:
        tokens = torch.randint(0, 32768, (1, 4097), device=device)
        batch = Batch({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
        for _ in range(2):  # the second has the optimizer's state
            torch.cuda.reset_peak_memory_stats(device)
            engine.forward_backward(batch)
            engine.optim_step()
        peak = torch.cuda.max_memory_allocated(device) - before
    assert peak == pytest.approx(plan, rel=0.05)


# -------------------------------------------------------------------------------------------- optimizer


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_the_fused_optimizer_is_torchs_in_fp64(device: torch.device, state: str) -> None:
    """Five steps of odd sizes; fp32 moments to rounding, bf16 ones to theirs."""
    shapes = [(257, 129), (1,), (4096, 33), (7,)]
    found, exact = (
        parameters(shapes, where, dtype)
        for where, dtype in ((device, torch.float32), (torch.device("cpu"), torch.float64))
    )
    ours = build(AdamW(lr=1e-2, state_dtype=state), named_parameters=list(found.items()))  # type: ignore[arg-type]
    theirs = torch.optim.AdamW(exact.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        give_gradients(exact, step)
        for name, parameter in found.items():
            parameter.grad = exact[name].grad.to(parameter)  # type: ignore[union-attr]
        ours.step()
        theirs.step()
    limit = 1e-6 if state == "float32" else 1e-3
    assert max(distance(found[name], exact[name]) for name in found) < limit


def test_a_step_that_is_skipped_changes_nothing(device: torch.device) -> None:
    """A gradient that is not finite, found on the device: no weight and no moment moves."""
    settings = ["model.n_layers=1", "training.seq_len=32", "training.local_batch_size=1"]
    with Engine.build("llama3_debug", settings, device=device) as engine:
        tokens = torch.randint(0, 2048, (1, 33), generator=torch.Generator().manual_seed(0))
        batch = Batch({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
        for _ in range(2):
            engine.forward_backward(batch)
            engine.optim_step()
        before = {name: bits(tensor) for name, tensor in engine.save_state()[0].items() if "step" not in name}
        engine.forward_backward(batch)
        _, first = next(iter(engine.named_parameters()))
        first.grad[0] = float("nan")
        engine.optim_step()
        after = {name: bits(tensor) for name, tensor in engine.save_state()[0].items() if name in before}
    assert before and after == before


def parameters(
    shapes: list[tuple[int, ...]], device: torch.device, dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {
        f"layers.{number}.weight": nn.Parameter(torch.randn(shape, generator=draw).to(device, dtype))
        for number, shape in enumerate(shapes)
    }


def give_gradients(exact: dict[str, nn.Parameter], step: int) -> None:
    for parameter in exact.values():
        parameter.grad = torch.sin(parameter.detach() * 3 + step)


# -------------------------------------------------------------------------------------------- attention

KERNELS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HEADS: dict[str, tuple[int, int, int, int]] = {  # heads, heads of keys, width of keys, of values
    "llama 1B": (32, 8, 64, 64),
    "llama 8B": (32, 8, 128, 128),
    "every head its keys": (4, 4, 128, 128),
    "deepseek": (4, 4, 192, 128),
}


@pytest.mark.parametrize("length", [512, 333])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_the_dense_attention(
    device: torch.device, kernel: str, heads: str, length: int
) -> None:
    """Output and gradients of q, k and v within bf16's rounding of softmax written out in fp64."""
    if device.type == "cpu" and kernel not in ("flash", "math"):
        pytest.skip("a CPU has flash attention and plain products")
    length = length // 8 if device.type == "cpu" else length
    count, kv, wide, narrow = HEADS[heads]
    draw = torch.Generator().manual_seed(length)
    shapes = ((1, count, length, wide), (1, kv, length, wide), (1, kv, length, narrow))
    exact = [torch.randn(shape, generator=draw).bfloat16().double().requires_grad_() for shape in shapes]
    given = [x.detach().to(device, torch.bfloat16).requires_grad_() for x in exact]
    out_weights = torch.randn(1, count, length, narrow, generator=draw).bfloat16().double()
    try:
        with sdpa_kernel(KERNELS[kernel]):
            found = scaled_dot_product_attention(*given, is_causal=True, enable_gqa=count != kv)
    except RuntimeError as error:
        must = kernel != "memory-efficient" and heads != "deepseek"
        if must or "No available kernel" not in str(error):
            raise
        pytest.skip(f"{kernel} does not take {heads} here")
    q, k, v = (x.repeat_interleave(count // x.shape[1], 1) for x in exact)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    expected = (q @ k.mT / wide**0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ v
    gradients = torch.autograd.grad((found * out_weights.to(found)).sum(), given)
    references = torch.autograd.grad((expected * out_weights).sum(), exact)
    for mine, reference in zip((found, *gradients), (expected, *references), strict=True):
        assert distance(mine, reference) < 0.02


# --------------------------------------------------------------------------------- saves, and generation


def test_pinned_saves_are_of_their_step(device: torch.device, tmp_path: Path) -> None:
    """Weights that change right after `save` returns; buffers that are pinned, and used again."""
    checkpointer = Checkpointer(
        tmp_path,
        Checkpoint(interval=1, async_mode="async_with_pinned_mem"),
        lock_text="recipe = 1\n",
        run_id=RUN,
        on_saved=lambda step, path: None,
    )
    tensors = {
        "model.w": torch.zeros(1024, 1025, device=device),
        "model.turned": torch.zeros(65, 33, device=device).T,
        "model.half": torch.zeros(77, device=device, dtype=torch.bfloat16),
    }
    for step in (1, 2, 3):
        for tensor in tensors.values():
            tensor.fill_(step)
        checkpointer.save(step, tensors, {"step": step})
        for tensor in tensors.values():
            tensor.fill_(-1)
    checkpointer.wait()
    for step in (1, 2, 3):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        assert load_checkpoint(tmp_path / f"step-{step}", loaded) == {"step": step}
        assert all(bool((tensor == step).all()) for tensor in loaded.values())


def test_a_run_trains_saves_resumes_and_generates(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, from a recipe to text; greedy text in fp32 is the same on the device and on the CPU."""
    run = str(tmp_path / "run")
    small = ["model.n_layers=2", "training.seq_len=32", "training.local_batch_size=1", "training.steps=4"]
    small += ["checkpoint.interval=2", 'checkpoint.async_mode="async_with_pinned_mem"']
    assert main(["train", "llama3_debug", "--run-dir", run, *small]) == 0
    assert main(["train", run, "--resume", "training.steps=6"]) == 0
    texts = [generated(capsys, run, where) for where in ("cpu", device.type)]
    assert texts[0] == texts[1]


def generated(capsys: pytest.CaptureFixture[str], run: str, device: str) -> Any:
    capsys.readouterr()
    asked = ["--max-new-tokens", "12", "--temperature", "0", "--dtype", "float32", "--device", device]
    assert main(["generate", run, "def main(", *asked, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["prompts"]
