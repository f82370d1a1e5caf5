"""What the ranks run: a small model that trains with one of the optimizers, stops and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.engine import cases
from titancli import Engine


def trained(
    layout: cases.Layout,
    optimizer: Any,
    steps: int = 3,
    *,
    load: Path | None = None,
    save: Path | None = None,
) -> dict[str, torch.Tensor]:
    """Return whole parameters and state after some steps of an engine."""
    with Engine.build(replace(cases.recipe(layout), optimizer=optimizer)) as engine:
        if load is not None:
            engine.load(load)
        while engine.step < steps:
            engine.forward_backward(cases.my_batches(engine, engine.step))
            engine.optim_step()
        if save is not None:
            engine.save(save)
        tensors, _ = engine.save_state()
        return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in tensors.items()}


def losses(layout: cases.Layout, converters: list[Any], first: int, last: int) -> list[float]:
    """Return the losses of steps `first` to `last`, without training."""
    with Engine.build(replace(cases.recipe(layout), converters=converters)) as engine:
        found = []
        for step in range(first, last):
            engine.step = step
            found.append(float(engine.forward_backward(cases.my_batches(engine, 0))["loss"]))
            engine.clear_gradients()
        return found
