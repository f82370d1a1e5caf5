"""What the ranks run: steps on matrices that are cut, and a small model that trains, stops and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.engine import cases
from titan_muon import Muon, sharded
from titan_muon.sharded import ShardedMuon
from titancli import Engine, load_recipe
from titancli.optimizers import AdamW

SHAPES = [(7, 5), (4, 9), (1, 6), (8, 8), (5, 2), (6, 7), (3, 5, 4), (4, 2, 6)]
"""Uneven over two ranks and over three; the third has no row for the second rank. The last are experts."""


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


PLACEMENTS: dict[str, list[Placement]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate(), Shard(0)],  # HSDP
    "column": [_StridedShard(0, split_factor=2), Shard(0)],  # FSDP2 after tensor parallelism, by style
    "row": [Shard(0), Shard(1)],
    "whole": [Shard(0), Replicate()],
    "twice": [Shard(0), Shard(0)],  # what no plan of titan's makes
    "experts": [_StridedShard(0, split_factor=2), Shard(0)],  # FSDP2 after expert parallelism
    "few experts": [Shard(1), Shard(0)],
}
EXPERTS: dict[str, str] = {"column": "experts", "row": "few experts"}
"""How stacks of matrices are cut where matrices are cut by a style."""


def stepped(cut: str | None, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    """Return the matrices and their momenta after three steps; `cut`: of PLACEMENTS, or "mixed", or None."""
    place = _place(cut)
    parameters = [nn.Parameter(place(value.to(dtype), i)) for i, value in enumerate(values(0))]
    optimizer = ShardedMuon(parameters, lr=0.1, **options)
    for step in range(1, 4):
        for i, (parameter, gradient) in enumerate(zip(parameters, values(step), strict=True)):
            parameter.grad = place(gradient.to(dtype), i)
        optimizer.step()
    tensors = [p.detach() for p in parameters] + [optimizer.state[p]["momentum_buffer"] for p in parameters]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def orthogonalisations(cut: str) -> int:
    """How many matrices this rank orthogonalises in one step."""
    seen = []
    place = _place(cut)
    parameters = [nn.Parameter(place(value, i)) for i, value in enumerate(values(0))]
    for i, (parameter, gradient) in enumerate(zip(parameters, values(1), strict=True)):
        parameter.grad = place(gradient, i)
    with patch.object(sharded, "orthogonal", lambda direction, group: seen.append(1) or direction.float()):
        ShardedMuon(parameters, lr=0.1).step()
    return len(seen)


def _place(cut: str | None) -> Any:
    if cut is None:
        return lambda value, i: value
    world = torch.distributed.get_world_size()
    if cut == "mixed" or len(PLACEMENTS[cut]) == 2:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("fsdp", "tp"))
    else:
        mesh = init_device_mesh("cpu", (world,))

    def place(value: torch.Tensor, i: int) -> DTensor:
        style = ("column", "row", "whole")[i % 3] if cut == "mixed" else cut
        return _cut(value, mesh, PLACEMENTS[EXPERTS.get(style, style) if value.ndim == 3 else style])

    return place


def _cut(value: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """As titan does: the right axis of the mesh first where the left one is strided."""
    if not isinstance(placements[0], _StridedShard):
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    inner = distribute_tensor(value, mesh[mesh.mesh_dim_names[1]], placements[1:], src_data_rank=None)
    pieces = inner.to_local().chunk(mesh.size(0), 0)
    rank = mesh.get_local_rank(0)
    local = pieces[rank] if rank < len(pieces) else inner.to_local()[:0]
    shape, stride = value.shape, value.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def trained(
    recipe: Path, steps: int, *, load: Path | None = None, save: Path | None = None
) -> dict[str, Any]:
    """Whole parameters and momenta after some steps of an engine."""
    engine = Engine.build(load_recipe(recipe).recipe)
    if load is not None:
        engine.load(load)
    for _ in range(steps):
        engine.forward_backward(_batch(engine))
        engine.optim_step()
    if save is not None:
        engine.save(save)
    tensors, _ = engine.save_state()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}


def _batch(engine: Engine) -> Any:
    from titancli import Batch

    tokens = torch.randint(0, 257, (4, 33), generator=torch.Generator().manual_seed(engine.step))
    rows = tokens.chunk(engine.mesh.degrees.dp)[engine.mesh.dp_rank]
    return Batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]})


def steps_of_an_engine(layout: cases.Layout) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's muon matrices after two steps, gathered, and whole ones with the same gradients."""
    optimizer = Muon(lr=0.05, fallback=AdamW(lr=1e-2, eps=1e-4))
    engine = Engine.build(replace(cases.recipe(layout), optimizer=optimizer))
    apart = ("tok_embeddings.weight", "output.weight")
    ours = {n: p for n, p in engine.named_parameters() if p.ndim > 1 and n not in apart and "gate" not in n}
    theirs = {name: nn.Parameter(cases.whole(parameter)) for name, parameter in ours.items()}
    reference = ShardedMuon(theirs.values(), lr=0.05) if theirs else None

    stepping: Any = engine.optimizer
    step_cut_ones = stepping.step

    def step_both() -> None:
        for name, parameter in ours.items():
            theirs[name].grad = cases.whole(parameter.grad) / stepping.grad_scale
        if reference is not None:
            reference.param_groups[0]["lr"] = engine.optimizer.param_groups[0]["lr"]  # by its schedule
            reference.step()
        step_cut_ones()

    stepping.step = step_both  # a hook would have gradients divided before
    for step in range(2):
        engine.forward_backward(cases.my_batches(engine, step))
        engine.optim_step()
    return {name: (cases.whole(ours[name]), theirs[name].detach()) for name in ours}


def orthogonalised(model: Any) -> list[str]:
    """Names of the parameters of a model that Muon updates itself."""
    from titancli.engine.build import on_meta, optimizer_of
    from titancli.models.roles import roles_of

    recipe = replace(cases.recipe(cases.Layout(config=model)), optimizer=Muon())
    built = on_meta(recipe)
    names = {parameter: name for name, parameter in built.named_parameters()}
    optimizer: Any = optimizer_of(recipe, list(built.named_parameters()), roles_of(built))
    return [names[parameter] for parameter in optimizer.parts[0].param_groups[0]["params"]]


def routers(layout: cases.Layout) -> dict[str, torch.Tensor]:
    """Return the routers of a model after three steps with Muon."""
    recipe = replace(cases.recipe(layout), optimizer=Muon(lr=0.02, fallback=AdamW(lr=1e-2, eps=1e-4)))
    engine = Engine.build(recipe)
    for step in range(3):
        engine.forward_backward(cases.my_batches(engine, step))
        engine.optim_step()
    return {n: p for n, p in cases.wholes(engine.named_parameters()).items() if "router" in n}


__all__ = ["Muon", "stepped", "steps_of_an_engine", "trained"]
