"""What is Qwen 3's own; what holds for every family is in `test_families.py`."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.models.families import QWEN3
from titancli.models.blocks.hf import DecoderHF
from titancli.models.blocks.moe import moe_layers
from titancli.registry.component import build


def test_a_bias_that_balancing_has_moved_is_not_lost_in_silence(caplog):
    form = DecoderHF(QWEN3.variant("balanced experts"))
    with caplog.at_level(logging.WARNING):
        assert list(form.to_hf("layers.0.moe.expert_bias", torch.zeros(4))) == []
        assert not caplog.records
        for layer in (0, 1):
            assert list(form.to_hf(f"layers.{layer}.moe.expert_bias", torch.ones(4))) == []
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "a Hugging Face folder cannot hold the biases that balance the experts"
    ]


def test_experts_begin_as_matrices_of_their_depth():
    model = build(QWEN3.variant("balanced experts"), seq_len=64)
    model.init_weights(lambda name: torch.Generator().manual_seed(0))
    assert float(model.layers["1"].moe.experts.w2.detach().std()) == pytest.approx(0.02 / 2, rel=0.1)


def test_after_a_step_every_layer_is_balanced_by_its_own_counts():
    model = QWEN3.model("balanced experts")
    model(torch.randint(0, 128, (2, 12))).sum().backward()
    counts = model.token_counts()
    assert {name: int(count.sum()) for name, count in counts.items()} == {
        "layers.0.moe": 48,
        "layers.1.moe": 48,
    }
    model.after_step(counts)
    for name, layer in moe_layers(model).items():
        even = counts[name].float().mean()
        torch.testing.assert_close(layer.expert_bias, 1e-3 * (even - counts[name]).sign())
    model.forget_token_counts()
    assert not any(count.any() for count in model.token_counts().values())


def test_the_flavors_have_the_context_and_the_rotary_base_of_the_releases():
    for name in (name for name in QWEN3.sizes if not name.startswith("debugmodel")):
        config = QWEN3.flavor(name)
        assert (config.max_seq_len, config.rope_theta) == (40960, 1000000.0), name
