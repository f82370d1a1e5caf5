"""What the ranks of test_ema_adapters.py run."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.converters.lora_cases import lora_recipe
from tests.engine import cases
from titan_optimizers import EMA
from titan_optimizers.elementwise import local
from titancli import Engine
from titancli.converters import LoRA
from titancli.registry.component import build


def averaged(
    layout: cases.Layout, base: Path, lora: LoRA, decay: float, steps: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return this rank's shards of the average, of the average in fp64, and of the first weights."""
    with Engine.build(lora_recipe(layout, base, lora)) as engine:
        callback = build(EMA(decay=decay), engine=engine, run=None)
        engine.hooks.add(callback)

        def weights() -> dict[str, torch.Tensor]:
            trained = dict(engine.trained_parameters())
            return {name: local(p.detach()).double().clone() for name, p in trained.items()}

        first = expected = weights()
        for step in range(steps):
            engine.forward_backward(cases.my_batches(engine, step))
            engine.optim_step()
            now = weights()
            expected = {name: decay * value + (1 - decay) * now[name] for name, value in expected.items()}
        found = {name: local(value).clone() for name, value in callback.tensors().items()}
        assert found.keys() == expected.keys()
        moved = [name for name, value in expected.items() if not torch.equal(value, first[name])]
        return {name: (found[name], expected[name], first[name]) for name in moved}
