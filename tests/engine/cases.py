"""What the ranks run: a small Llama 3 on a given layout, the same weights and data on each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from titancli.engine import Engine
from titancli.loops import Pretrain
from titancli.losses import CrossEntropy
from titancli.models import Llama3
from titancli.optimizers import AdamW, WarmupStableDecay
from titancli.parallel import Decoder
from titancli.protocols.batch import Batch
from titancli.recipe.schema import (
    ActivationCheckpoint,
    Compile,
    Mesh,
    Pipeline,
    Recipe,
    Training,
)

ROWS, LENGTH, VOCABULARY = 8, 16, 64
MODEL: dict[str, Any] = dict(
    dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=VOCABULARY
)


@dataclass(frozen=True)
class Layout:
    mesh: dict[str, int] = field(default_factory=dict)
    micro_batches: int = 1
    accumulate: str = "sharded"
    activation_checkpoint: dict[str, Any] = field(default_factory=lambda: {"mode": "none"})
    compile: str | None = None
    tied: bool = False
    dtype: str = "float32"
    reshard: str = "default"
    loss: Any = CrossEntropy()  # noqa: RUF009 - a frozen config
    pipeline: dict[str, Any] = field(default_factory=dict)
    context_parallel: str = "allgather"
    model: dict[str, Any] = field(default_factory=dict)
    """Other sizes than MODEL's."""
    config: Any = None
    """Another model's config, in place of Llama 3's."""
    converters: list[Any] = field(default_factory=list)
    documents: bool = False
    """Whether rows hold several documents that do not see each other."""


def small(mesh: dict[str, int] | None = None, **more: Any) -> Layout:
    """Of two layers: the fewest that two stages share."""
    return Layout(mesh or {}, model={"n_layers": 2}, **more)


def recipe(layout: Layout, **training: Any) -> Recipe:
    dp = layout.mesh.get("dp_replicate", 1) * layout.mesh.get("dp_shard", 1)
    settings = dict(
        steps=10,
        seq_len=LENGTH,
        local_batch_size=ROWS // dp // layout.micro_batches,
        global_batch_size=ROWS,
        accumulate=layout.accumulate,
        mixed_precision_param=layout.dtype,
        seed=7,
        max_norm=0.5,
    )
    return Recipe(
        model=layout.config or Llama3(**{**MODEL, **layout.model}, tied=layout.tied),
        tokenizer=None,
        dataset=None,
        converters=layout.converters,
        mesh=Mesh(**{"dp_shard": 1, **layout.mesh}),
        pipeline=Pipeline(first_stage_less_layers=0, last_stage_less_layers=0, **layout.pipeline),
        parallelize=Decoder(reshard_after_forward=layout.reshard, context_parallel=layout.context_parallel),
        activation_checkpoint=ActivationCheckpoint(**layout.activation_checkpoint),
        compile=Compile(enable=layout.compile is not None, backend=layout.compile or "inductor"),
        optimizer=AdamW(lr=1e-2, eps=1e-4),
        lr_scheduler=WarmupStableDecay(warmup_steps=0),
        loss=layout.loss,
        training=Training(**{**settings, **training}),
        loop=Pretrain(),
        launcher=None,
    )


def whole_batch(step: int = 0, documents: bool = False) -> Batch:
    """All rows of a step. Targets are unevenly many, so that an average of averages would be wrong."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, : 2 * row] = -100
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": targets}
    if documents:
        starts = torch.rand(ROWS, LENGTH, generator=generator) < 0.2
        starts[:, 0] = True
        places = torch.arange(LENGTH).expand(ROWS, LENGTH)
        batch["document_ids"] = starts.cumsum(1).int()
        batch["positions"] = places - torch.where(starts, places, 0).cummax(1).values
    return Batch(batch)


def my_batches(engine: Engine, step: int = 0, documents: bool = False) -> list[Batch]:
    """This rank's micro-batches: the same rows of the step on any layout, all ranks together."""
    settings, dp = engine.settings, engine.mesh.degrees.dp
    pieces = whole_batch(step, documents).split(ROWS // dp // settings.accumulation)
    return [pieces[k * dp + engine.mesh.dp_rank] for k in range(settings.accumulation)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().clone()


def wholes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors made whole by name, as `whole` does, but in one exchange, which all ranks take part in."""
    return assembled({name: part(tensor) for name, tensor in tensors})


def assembled(mine: dict[str, Part]) -> dict[str, torch.Tensor]:
    """Tensors made whole from the parts of all ranks, which all take part."""
    import torch.distributed as dist

    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    result = {name: torch.full(shape, torch.nan) for name, (shape, _, _) in mine.items()}
    for name, into in result.items():
        for _, place, values in (theirs[name] for theirs in everyones if name in theirs):
            into[place] = torch.from_numpy(values)
    return result


Part = tuple[torch.Size, tuple[slice, ...], Any]
"""The shape of the whole, and what one rank has of it: where, and the values, as an array, since pickling
tensors takes longer than the steps that made them."""


def part(tensor: torch.Tensor) -> Part:
    """What this rank has of a tensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor.shape, (), tensor.detach().float().clone().numpy()
    assert not any(placement.is_partial() for placement in tensor.placements)
    local = tensor.to_local().detach().float().clone()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    place = tuple(slice(start, start + length) for start, length in zip(offsets, local.shape, strict=True))
    return tensor.shape, place, local.numpy()


def gradients(layout: Layout) -> dict[str, torch.Tensor]:
    """Gradients of one step, divided as the optimizer step would, and the loss."""
    engine = Engine.build(recipe(layout))
    metrics = engine.forward_backward(my_batches(engine))
    result = wholes((name, p.grad / engine.pending.weight) for name, p in engine.named_parameters())
    return {**result, "loss": metrics["loss"].clone(), "loss_max": metrics["loss_max"].clone()}


def training(layout: Layout, steps: int = 3) -> dict[str, torch.Tensor]:
    """Weights after some steps, and every loss and norm on the way."""
    engine = Engine.build(recipe(layout))
    result: dict[str, torch.Tensor] = {}
    for step in range(steps):
        metrics = engine.forward_backward(my_batches(engine, step)) | engine.optim_step()
        result[f"loss {step}"] = metrics["loss"].clone()
        result[f"norm {step}"] = metrics["grad_norm"].clone()
    return result | wholes(engine.named_parameters())


def initial_weights(layout: Layout) -> dict[str, torch.Tensor]:
    return wholes(Engine.build(recipe(layout)).named_parameters())
