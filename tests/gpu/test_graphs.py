"""Steps replayed as CUDA graphs: bit for bit those without, and the host waits for nothing.

On the CPU the graphs are `tests.engine.reruns.Reruns`, which compute what they would replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.reruns import reruns
from tests.parallel.dropout_cases import Dropping
from titancli.engine import Engine
from titancli.protocols.batch import Batch
from titancli.recipe import load_recipe

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS, BROKEN, SAVED = 7, 4, 5
"""The steps of a run, counted from 1; the one that is skipped; the one after which it is resumed."""
SMALL = ["training.seq_len=64", "training.local_batch_size=2", "training.mixed_precision_param=bfloat16"]
SMALL += ['activation_checkpoint.mode="none"', "model.n_layers=2"]
CASES: dict[str, list[str]] = {
    "as it is": [],
    "compiled": [
        "compile.enable=true",
        'activation_checkpoint.mode="selective"',
        'activation_checkpoint.selective_ac_option="products"',
    ],
    "two micro-batches": ["training.global_batch_size=4"],
    "sums in fp32": [
        "training.global_batch_size=4",
        "training.dtype=bfloat16",
        "training.accumulate=unsharded",
        "optimizer.implementation=for-loop",  # nothing to compile
    ],
    "recomputed": ['activation_checkpoint.mode="full"', "training.global_batch_size=4"],
    "random numbers": [],
    "experts": [],
    "documents": [],
}
SHIPPED = {"experts": "qwen3_moe_debug"}


@pytest.fixture(params=[pytest.param("cuda", marks=GPU), pytest.param("cpu", marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cpu":
        reruns(monkeypatch)
    torch.use_deterministic_algorithms(True, warn_only=True)  # some kernels add up in any order
    try:
        yield torch.device(request.param)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("how", ["step", "blocks"])
@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_are_the_steps(device: torch.device, case: str, how: str, tmp_path: Path) -> None:
    """Losses, norms and weights of 7 steps, of which one is skipped, and which are saved and resumed."""
    if how == "blocks" and (device.type == "cpu" or case == "documents"):
        pytest.skip("refused by name, or computed on a GPU alone")
    if device.type == "cpu" and "compiled" in case:
        pytest.skip("compiled steps are tried on the CPU elsewhere")
    expected, again = (steps(device, case, "none", tmp_path / name) for name in ("usual", "again"))
    assert_same(again, expected)  # the kernels repeat themselves
    assert_same(steps(device, case, how, tmp_path / "graphs"), expected)


def steps(device: torch.device, case: str, how: str, folder: Path) -> dict[str, Tensor]:
    """Numbers and weights by name."""
    changed = [*SMALL, *CASES[case], f"compile.cuda_graphs={how}"]
    recipe = load_recipe(SHIPPED.get(case, "llama3_debug"), changed).recipe
    if case == "random numbers":
        recipe = replace(recipe, converters=[Dropping()])
    found: dict[str, Tensor] = {}
    with Engine.build(recipe, device=device) as engine:
        for number in range(1, SAVED + 1):
            found |= step(engine, case, number, waits=how == "none" or number < SAVED)
        engine.save(folder / f"step-{SAVED}")
    with Engine.build(recipe, device=device) as engine:
        engine.load(folder / f"step-{SAVED}")
        for number in range(SAVED + 1, STEPS + 1):
            found |= step(engine, case, number, waits=True)
        return found | {name: p.detach().float().cpu() for name, p in engine.named_parameters()}


def step(engine: Engine, case: str, number: int, *, waits: bool) -> dict[str, Tensor]:
    batches = rows(engine, case, number)
    with refused_to_wait(engine.device) if not waits else contextlib.nullcontext():
        metrics = engine.forward_backward(batches)
        if number == BROKEN:
            next(p for _, p in engine.trained_parameters()).grad.view(-1)[:1].fill_(torch.nan)  # type: ignore[union-attr]
        metrics |= engine.optim_step()
    kept = ("loss", "loss_max", "grad_norm", "skipped_steps", "expert_load")
    return {f"{number} {name}": metrics[name].float().cpu() for name in kept if name in metrics}


def rows(engine: Engine, case: str, number: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(number)
    words = engine.recipe.model.vocab_size
    tokens = torch.randint(0, words, (engine.settings.accumulation, 2, 65), generator=draw)
    batches = []
    for some in tokens:
        batch: dict[str, Any] = {"tokens": some[:, :-1].contiguous(), "targets": some[:, 1:].contiguous()}
        if case == "documents":
            cut = int(torch.randint(1, 63, (), generator=draw))
            batch["document_ids"] = (torch.arange(64) >= cut).int().expand(2, 64).contiguous()
        batches.append(Batch({name: value.to(engine.device) for name, value in batch.items()}))
    return batches


@contextlib.contextmanager
def refused_to_wait(device: torch.device) -> Iterator[None]:
    """Any wait of the host for the GPU raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [n for n in found if not torch.equal(found[n].nan_to_num(), expected[n].nan_to_num())]
    assert not different, {n: (found[n] - expected[n]).abs().max().item() for n in different}
