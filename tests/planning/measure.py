"""The memory of a real step of one rank, on fake tensors: what `titancli.planning` is held against."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titancli.distributed.private import forget_meshes
from titancli.engine.build import build_engine
from titancli.engine.engine import Engine
from titancli.engine.first_weights import allocate
from titancli.models.blocks.moe import moe_layers
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import Estimate, estimate
from titancli.protocols.batch import Batch
from titancli.recipe import load_recipe
from titancli.recipe.schema import Recipe

CPU = torch.device("cpu")


def recipe(*overrides: str) -> Recipe:
    """A small Llama that is not all loss: two layers, few words."""
    small = ["model.n_layers=2", "model.n_kv_heads=4", "model.vocab_size=256", "training.seq_len=512"]
    return load_recipe("llama3_debug", [*small, *overrides]).recipe


def planned(recipe: Recipe, world: int, device: str = "cpu") -> Estimate:
    found = estimate(recipe, recipe.degrees(world), DEVICES[device])
    assert found is not None
    return found


def measured(recipe: Recipe, world: int) -> float:
    """The peak of the second step of rank 0, in bytes, as torch's own tracker has it."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.Tensor, "item", lambda tensor: 2.0)  # a fake tensor has no number to give
        stack.callback(forget_meshes)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        stack.callback(dist.destroy_process_group)
        tracker = MemTracker()

        def fill(parts: list[Any]) -> None:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            for part in parts:
                allocate(part, CPU)
                for experts in moe_layers(part).values():
                    experts.force_load_balance()

        engine = build_engine(Engine, recipe, device=CPU, frozen=False, fill=fill)
        batches = [_batch(recipe) for _ in range(engine.settings.accumulation)]
        _step(engine, batches)  # the first one, after which there is optimizer state
        tensors = [tensor for batch in batches for tensor in batch.values()]
        # The tracker takes DTensors among the state for as large as the whole: it is given what they hold.
        tensors += [
            t.to_local() if isinstance(t, DTensor) else t
            for state in engine.optimizer.state.values()
            for t in state.values()
        ]
        tracker.track_external(*engine.parts, *tensors)
        with tracker:
            _step(engine, batches)
        found: Any = tracker.get_tracker_snapshot("peak")
        return float(found[CPU]["Total"])


def _step(engine: Engine, batches: list[Batch]) -> None:
    engine.forward_backward(batches)
    engine.optim_step()


def _batch(recipe: Recipe) -> Batch:
    shape = (recipe.training.local_batch_size, recipe.training.seq_len)
    names = ("tokens", "targets", "positions")
    return Batch({name: torch.zeros(shape, dtype=torch.int64, device=CPU) for name in names})
