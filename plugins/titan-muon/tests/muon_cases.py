"""What the ranks run: steps on matrices that are cut, and a small model that trains, stops and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titan_muon import Muon
from titan_muon.sharded import ShardedMuon
from titancli import Engine, load_recipe

SHAPES = [(7, 5), (4, 9), (1, 6), (8, 8), (5, 2)]
"""Uneven over two ranks and over three; the third has no row for the second rank."""


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def stepped(cut: str | None, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    """The matrices and their momenta after three steps; cut: rows, columns, replicated (HSDP), or None."""
    place = _place(cut)
    parameters = [nn.Parameter(place(value.to(dtype))) for value in values(0)]
    optimizer = ShardedMuon(parameters, lr=0.1, **options)
    for step in range(1, 4):
        for parameter, gradient in zip(parameters, values(step), strict=True):
            parameter.grad = place(gradient.to(dtype))
        optimizer.step()
    tensors = [p.detach() for p in parameters] + [optimizer.state[p]["momentum_buffer"] for p in parameters]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def _place(cut: str | None) -> Any:
    if cut is None:
        return lambda value: value
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if cut == "replicated" else (world,))
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "replicated": [Replicate(), Shard(0)]}[cut]
    return lambda value: distribute_tensor(value, mesh, placements)


def trained(
    recipe: Path, steps: int, *, load: Path | None = None, save: Path | None = None
) -> dict[str, Any]:
    """Whole parameters and momenta after some steps of an engine."""
    engine = Engine.build(load_recipe(recipe).recipe)
    if load is not None:
        engine.load(load)
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for _ in range(steps):
        engine.forward_backward(_batch(engine.step, rank, world))
        engine.optim_step()
    if save is not None:
        engine.save(save)
    tensors, _ = engine.save_state()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}


def _batch(step: int, rank: int, world: int) -> Any:
    from titancli import Batch

    tokens = torch.randint(0, 257, (4, 33), generator=torch.Generator().manual_seed(step))
    rows = tokens.chunk(world)[rank]
    return Batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]})


__all__ = ["Muon", "stepped", "trained"]
