"""The arithmetic that is computed is the arithmetic that is done, what runs again in backward included."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.planning.measure import planned, recipe
from titancli.parallel.activation_checkpoint import apply_activation_checkpoint
from titancli.planning import trace
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


@pytest.fixture(autouse=True)
def _attention_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the whole square of attention."""
    assert trace._share_seen({}) == 1.0  # of other operators
    monkeypatch.setattr(trace, "_share_seen", lambda given: float(not given))


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
    """Of a pass through the blocks, as one of each kind was measured."""
    work = planned(found, 1).work
    kinds = work.kinds(range(len(work.blueprint.kinds)))
    return sum(count * one.flops for kind, count in kinds.items() for one in work.piece(*kind).operators)


@pytest.mark.parametrize("window", [1, 7, 33])
@pytest.mark.parametrize(("length", "keys"), [(33, 33), (5, 33), (1, 33)])
def test_pairs_of_queries_and_keys_that_are_computed(length: int, keys: int, window: int) -> None:
    places = range(keys - length, keys)
    assert trace.seen(length, keys, window) == sum(min(place + 1, window) for place in places)


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
