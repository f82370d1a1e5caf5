"""Where asynchronous saves copy a state to: a few slabs of host memory, allocated once."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.tensors import RUN
from titancli.checkpoint import Checkpointer, staging
from titancli.checkpoint.format.storage import Pieces, pieces_of
from titancli.checkpoint.staging import Staging
from titancli.recipe.schema import Checkpoint

SLAB = 1 << 12


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is allocated, in bytes."""
    sizes: list[int] = []
    make = staging.slab_of
    monkeypatch.setattr(staging, "SLAB", SLAB)
    monkeypatch.setattr(staging, "slab_of", lambda size, pinned: sizes.append(size) or make(size, pinned))
    return sizes


def state() -> dict[str, Tensor]:
    """Pieces of which one is larger than a slab, and one has nothing; 15,012 bytes in all."""
    tensors = {f"layers.{n}": torch.randn(8, 16) for n in range(16)}
    more = {"embedding": torch.randn(100, 16), "step": torch.tensor(3.0), "none": torch.empty(0, 4)}
    return tensors | more | {"moment": torch.randn(101, dtype=torch.bfloat16), "count": torch.tensor(7)}


def copied(kept: Pieces) -> dict[str, Tensor]:
    return {item.index.fqn: kept.resolve(item) for item in kept.items}


def test_a_state_is_copied_into_few_slabs_and_the_second_copy_allocates_nothing(slabs: list[int]) -> None:
    tensors, kept = state(), Staging(pinned=True)
    for step in range(3):
        for tensor in tensors.values():
            tensor.add_(1)
        found = copied(kept.copy(pieces_of(tensors)))
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
            assert found[name].data_ptr() % staging.ALIGNED == 0 or not tensor.numel()
        if step == 0:
            begun = list(slabs)
    places = sorted((x.data_ptr(), x.numel() * x.itemsize) for x in found.values() if x.numel())
    assert all(at + size <= after for (at, size), (after, _) in pairwise(places))
    needed = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    assert slabs == begun and len(slabs) < 6
    assert needed <= sum(slabs) < 1.15 * needed
    assert all(size & (size - 1) == 0 for size in slabs)  # what torch would round up pinned memory to


def test_another_state_gets_other_buffers(slabs: list[int]) -> None:
    kept = Staging(pinned=False)
    kept.copy(pieces_of({"a": torch.ones(4)}))
    found = copied(kept.copy(pieces_of({"a": torch.ones(4), "b": torch.ones(4, dtype=torch.bfloat16)})))
    assert [found["a"].tolist(), found["b"].tolist()] == [[1.0] * 4] * 2 and len(slabs) == 2


def test_what_a_run_will_save_is_reserved_in_a_thread_before_the_first_save(
    slabs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, make = threading.Event(), staging.slab_of
    monkeypatch.setattr(staging, "slab_of", lambda *given: gate.wait(20) and make(*given))
    section = Checkpoint(async_mode="async_with_pinned_mem")
    checkpointer, tensors = Checkpointer(tmp_path, section, lock_text="", run_id=RUN), state()
    checkpointer.reserve(tensors)  # returns at once
    assert not slabs
    gate.set()
    checkpointer.save(1, tensors, {})
    reserved = list(slabs)
    checkpointer.save(2, tensors, {})
    checkpointer.wait()
    assert slabs == reserved and {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2"}


def test_memory_that_is_not_there_is_an_error_of_the_copy_and_the_next_tries_again(
    slabs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kept = staging.slab_of, Staging(pinned=True)

    def fails(size: int, pinned: bool) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(staging, "slab_of", fails)
    kept.reserve(pieces_of(state()))
    with pytest.raises(RuntimeError, match="out of memory"):
        kept.copy(pieces_of(state()))
    monkeypatch.setattr(staging, "slab_of", make)
    tensors = state()
    assert torch.equal(copied(kept.copy(pieces_of(tensors)))["embedding"], tensors["embedding"])
