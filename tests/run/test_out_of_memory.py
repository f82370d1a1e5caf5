"""A run that runs out of memory says what was live and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.conftest import Finished
from titancli.engine.runners import WholeModel
from titancli.layout.degrees import Degrees
from titancli.observe.phases import phase
from titancli.planning.out_of_memory import advice, memory_report
from titancli.recipe import load_recipe

CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which "
    "1.00 GiB is free. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF"
)


def test_memory_that_runs_out_in_the_middle_of_a_verb_is_explained(
    train: Callable[..., Finished], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    forward = WholeModel.forward

    def full(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError(CUDA_SAYS)
        return forward(self, *arguments)

    monkeypatch.setattr(WholeModel, "forward", full)
    done = train("tiny.toml", "--run-dir", "r", "training.local_batch_size=8", "training.seq_len=64")
    assert done.code == 1
    first, *rest = done.err[done.err.index("out of memory in") :].splitlines()
    assert first == "out of memory in step 3 (forward): CUDA out of memory. Tried to allocate 2.00 GiB."
    assert rest[0].startswith("  live:      parameters ") and ", optimizer " in rest[0]
    assert rest[1].startswith("  estimate:  ") and "activations" in rest[1]
    [hint] = [line for line in rest if "(estimate: " in line]
    overrides = [word for word in hint.split() if "=" in word]
    assert overrides
    monkeypatch.undo()
    monkeypatch.chdir(here)  # what is to be typed is what is taken
    assert train("r", "--resume", *overrides, "training.steps=3").code == 0


def test_another_error_is_not_taken_for_it(
    train: Callable[..., Finished], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Any, *arguments: Any) -> Any:
        raise RuntimeError("some other error")

    monkeypatch.setattr(WholeModel, "forward", wrong)
    done = train("tiny.toml", "--run-dir", "r")
    assert done.code == 1 and "some other error" in done.err and "out of memory" not in done.err


def test_the_advice_saves_memory_on_a_device_of_any_size() -> None:
    recipe = load_recipe("llama3_8b").recipe
    degrees = Degrees(dp_shard=8)
    for device in ("NVIDIA H100 80GB HBM3", "Some Accelerator 9"):
        change = advice(recipe, degrees, device)
        assert change is not None and "=" in change and "estimate:" in change
    assert "parameters" in memory_report(recipe, degrees, "NVIDIA H100 80GB HBM3", {})


def test_the_phase_of_an_error_is_the_innermost_one() -> None:
    with pytest.raises(ValueError) as caught, phase("save"), phase("data"):
        raise ValueError
    assert caught.value.titan_phase == "data"  # type: ignore[attr-defined]
