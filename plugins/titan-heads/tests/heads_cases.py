"""What the ranks run: a small model with a head, on some layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.engine.cases import LENGTH, ROWS, VOCABULARY, Layout, recipe, wholes
from titan_heads import Classification, Embedding, Reward
from titancli import IGNORE, Batch, Engine

LOSSES: dict[str, Any] = {
    "reward": Reward(center=0.1),
    "classes": Classification(classes=["a", "b", "c"]),
    "value": Classification(problem_type="regression"),
    "embedding": Embedding(pool="mean", temperature=0.5),
}
UNITS = {"reward": 2, "embedding": 2}


def rows_of(name: str) -> Batch:
    """All rows of a step; documents of uneven lengths, in rows of classes two, and one row is padding."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    targets = torch.full_like(tokens, IGNORE)
    ends = torch.randint(3, LENGTH, (ROWS,), generator=generator)
    batch: dict[str, Tensor] = {"tokens": tokens, "targets": targets}
    for row, end in enumerate(ends.tolist()):
        targets[row, end] = 1
    if name in UNITS:
        targets[-UNITS[name] :] = IGNORE
        if name == "reward":
            batch["margin"] = torch.rand(ROWS, generator=generator)
        return Batch(batch, unit=UNITS[name])
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    batch["document_ids"] = ((places > 2).int() + (places > ends[:, None]).int()).int()
    batch["positions"] = torch.where(places > 2, places - 3, places)
    targets[:-1, 2] = 1
    targets[-1] = IGNORE
    batch["labels"] = torch.randint(0, 3, (ROWS, LENGTH), generator=generator)
    if name == "value":
        batch["labels"] = torch.rand(ROWS, LENGTH, generator=generator)
    return Batch(batch)


def mine(engine: Engine, name: str) -> list[Batch]:
    settings, dp = engine.settings, engine.mesh.degrees.dp
    pieces = rows_of(name).split(ROWS // dp // settings.accumulation)
    return [pieces[k * dp + engine.mesh.dp_rank] for k in range(settings.accumulation)]


def step(layout: Layout, name: str) -> dict[str, Tensor]:
    """Numbers and gradients of a step, and the weights after it."""
    with Engine.build(recipe(replace(layout, loss=LOSSES[name]))) as engine:
        metrics = engine.forward_backward(mine(engine, name))
        told = {key: value for key, value in metrics.items() if key not in ("tokens", "loss_max")}
        found = {key: torch.tensor(float(value)) for key, value in told.items()}
        found["evaluated"] = engine.evaluate(mine(engine, name))["loss"].clone()
        weight = engine.pending.weight
        gradients = (
            (f"grad {n}", p.grad / weight) for n, p in engine.named_parameters() if p.grad is not None
        )
        found |= wholes(gradients)
        engine.optim_step()
        return found | wholes(engine.named_parameters())
