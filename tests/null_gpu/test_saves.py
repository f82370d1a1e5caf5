"""Saves of tensors that lie on either of two GPUs: pinned, in the background, and before it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.tensors import RUN
from titancli.checkpoint import Checkpointer, load_checkpoint
from titancli.recipe.schema import Checkpoint


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_what_is_saved_is_of_its_step(mode: str, current: int, tmp_path: Path) -> None:
    """Weights change right after `save` returns, and a copy is over only when it was waited for."""
    torch.cuda.set_device(current)
    checkpointer = Checkpointer(
        tmp_path,
        Checkpoint(interval=1, async_mode=mode),  # type: ignore[arg-type]
        lock_text="recipe = 1\n",
        run_id=RUN,
        on_saved=lambda step, path: None,
    )
    tensors = {f"model.w{device}": torch.zeros(1025, 511).to(f"cuda:{device}") for device in (0, 1)}

    def fill(value: float) -> None:
        for tensor in tensors.values():
            tensor.copy_(torch.full_like(tensor, value, device="cpu"))  # a kernel would do nothing

    for step in (1, 2, 3):
        fill(step)
        checkpointer.save(step, tensors, {"step": step})
        fill(-1)
    checkpointer.wait()
    for step in (1, 2, 3):
        loaded = {name: torch.zeros(1025, 511) for name in tensors}
        assert load_checkpoint(tmp_path / f"step-{step}", loaded) == {"step": step}
        assert all(bool((tensor == step).all()) for tensor in loaded.values())
    torch.cuda.set_device(0)
