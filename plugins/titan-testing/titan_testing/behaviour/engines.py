"""Small engines, and their gradients and weights by name, gathered for comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titancli import IGNORE, Batch
from titancli.engine import Engine
from titancli.losses import CrossEntropy
from titancli.models import Llama3, Qwen3
from titancli.models.sections import MoE
from titancli.optimizers import AdamW, WarmupStableDecay
from titancli.parallel import Decoder
from titancli.recipe.schema import ActivationCheckpoint, Mesh, Pipeline, Training

ROWS, LENGTH, VOCABULARY = 4, 16, 64


def small_model() -> Llama3:
    """Return a Llama 3 with two layers, whose sizes are multiples of 16 even on two ranks."""
    return Llama3(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, hidden_dim=128, vocab_size=VOCABULARY)


def small_experts() -> Qwen3:
    """Return a Qwen 3 with two layers of four experts, whose sizes are multiples of 64."""
    moe = MoE(num_experts=4, top_k=2, hidden_dim=64, score_func="softmax")
    return Qwen3(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=16, vocab_size=VOCABULARY, moe=moe)


def engine_of(
    model: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
    converters: Any = (),
    parallelize: Any = None,
    recompute: str = "none",
    mesh: dict[str, int] | None = None,
    weights: str | None = None,
) -> Engine:
    """Build an engine in fp32 without schedule or clipping; on one rank unless a mesh is given."""
    mesh = {"dp_shard": 1, **(mesh or {})}
    rows = ROWS // (mesh["dp_shard"] * mesh.get("dp_replicate", 1))
    return Engine.of(
        model or small_model(),
        device="cpu",
        loss=loss or CrossEntropy(),
        optimizer=optimizer or AdamW(lr=1e-2, eps=1e-4),
        converters=list(converters),
        parallelize=parallelize or Decoder(),
        training=Training(
            steps=10,
            seq_len=LENGTH,
            mixed_precision_param="float32",
            max_norm=0.0,
            seed=7,
            local_batch_size=rows,
        ),
        lr_scheduler=WarmupStableDecay(warmup_steps=0, decay_ratio=0.0, min_lr_factor=1.0),
        activation_checkpoint=ActivationCheckpoint(mode=recompute),  # type: ignore[arg-type]
        pipeline=Pipeline(first_stage_less_layers=0, last_stage_less_layers=0),
        mesh=Mesh(**mesh),
        weights=weights,
    )


def batch_of(vocabulary: int = VOCABULARY, seed: int = 0, rows: int = ROWS) -> Batch:
    """Return rows of random tokens with different numbers of targets; the last row has none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (rows, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, : LENGTH * row // max(1, rows - 1)] = IGNORE
    positions = torch.arange(LENGTH).repeat(rows, 1)
    return Batch({"tokens": tokens[:, :-1].contiguous(), "targets": targets, "positions": positions})


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded as a plain copy. Collective."""
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().clone()


def gradients(engine: Engine, *batches: Batch) -> dict[str, Tensor]:
    """Return the gradients of the loss's sum over batches, in one call, and clear them."""
    engine.forward_backward(list(batches))
    found = {
        name: whole(parameter.grad)
        for name, parameter in engine.trained_parameters()
        if parameter.grad is not None
    }
    engine.clear_gradients()
    return found


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in engine.named_parameters()}


def step(engine: Engine, batch: Batch, lr: float | None = None) -> None:
    engine.forward_backward(batch)
    engine.optim_step(lr)
