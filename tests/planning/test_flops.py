"""The arithmetic that is computed is the arithmetic that is done, what runs again in backward included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.planning.measure import planned, recipe
from titancli.parallel.activation_checkpoint import apply_activation_checkpoint
from titancli.planning.blocks import forwards
from titancli.recipe import load_recipe
from titancli.recipe.schema import Recipe
from titancli.registry.component import build

ROWS, LENGTH = 2, 32
MOE = (
    "model.type=qwen3",
    *(f"model.{size}" for size in ("dim=256", "n_heads=8", "head_dim=32")),
    "model.moe={num_experts=8, top_k=2, hidden_dim=256, score_before_experts=false}",
)
LLAMA4 = (
    "model.type=llama4",
    "model.flavor=debugmodel_irope",
    *(f"model.{size}" for size in ("n_layers=4", "fixed_attn_block_size=16", "vocab_size=256")),
)
GPT_OSS = (
    "model.type=gpt_oss",
    *(f"model.{size}" for size in ("dim=256", "n_heads=8", "n_kv_heads=4", "head_dim=32")),
    "model.sliding_window=8",
    "model.moe={num_experts=8, top_k=2, hidden_dim=256, gate_bias=true, score_before_experts=false}",
)


@pytest.mark.parametrize("family", [(), MOE, LLAMA4, GPT_OSS], ids=["dense", "experts", "llama4", "gpt_oss"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_all_that_is_multiplied_in_the_blocks(mode: str, family: tuple[str, ...]) -> None:
    found = recipe(
        *family,
        f"activation_checkpoint.mode={mode}",
        f"training.local_batch_size={ROWS}",
        f"training.seq_len={LENGTH}",
    )
    assert counted(found) == expected(found)


@pytest.mark.parametrize("more", [(), ("model.q_lora_rank=64", "activation_checkpoint.mode=full")])
def test_all_that_is_multiplied_where_keys_and_values_come_from_a_latent(more: tuple[str, ...]) -> None:
    size = (f"training.local_batch_size={ROWS}", f"training.seq_len={LENGTH}")
    found = load_recipe("deepseek_v3_debug", [*size, *more]).recipe
    assert counted(found) == expected(found)


def expected(found: Recipe) -> float:
    """Of a pass through the blocks, as it is computed."""
    work = planned(found, 1).work
    return sum(
        times * kernel.flops + kernel.backward_flops
        for block, recompute, count in work.kinds(range(len(work.shape.blocks)))
        for kernel, times in count * list(forwards(block, work, recompute))
        if kernel.kind != "attention"
    )


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("chunk", [None, 1, 5, 16, 40])
def test_keys_that_a_query_sees_on_average(window: int | None, chunk: int | None) -> None:
    work = replace(planned(recipe(), 1).work, seq_len=33)
    layer = replace(work.shape.blocks[0].attention, window=window, chunk=chunk)
    seen = [min(place % (chunk or 33) + 1, window or 33) for place in range(33)]
    assert work.seen(layer) == pytest.approx(sum(seen) / 33)
    assert layer.most(33) == max(seen)


def counted(found: Recipe) -> int:
    """The same by torch's own counter."""
    model = build(found.model, seq_len=LENGTH)
    model.norm = model.output = None
    model.init_weights(lambda name: torch.Generator().manual_seed(0))
    apply_activation_checkpoint(model.layers, found.activation_checkpoint)
    tokens = torch.randint(0, found.model.vocab_size, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    by_op = counter.get_flop_counts()["Global"]
    return sum(count for op, count in by_op.items() if "attention" not in str(op))
