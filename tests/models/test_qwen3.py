"""Qwen 3, dense and mixture of experts, against its published sizes and against transformers."""

from __future__ import annotations

import json
import logging
from fnmatch import fnmatchcase

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from titancli.checkpoint import export_hf, read_hf
from titancli.errors import TitanError
from titancli.models import Qwen3
from titancli.models.blocks.moe import moe_layers
from titancli.models.blocks.state import named_state
from titancli.models.qwen3.model import Qwen3HF, build
from titancli.models.sections import MoE
from titancli.registry import current
from titancli.registry.binding import bind

SIZES = {
    "debugmodel": 31_987_968,
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
    "debugmodel_moe": 315_758_848,
    "30B-A3B": 30_532_122_624,
    "235B-A22B": 235_093_634_560,
}
# FLOPs per token with rows of 8,192 (debug models: 2,048), of the flavors whose weights are not tied: the
# published ones leave a tied output's product out.
FLOPS = {
    "8B": 5.991e10,
    "14B": 1.041e11,
    "32B": 2.434e11,
    "debugmodel_moe": 7.086e8,
    "30B-A3B": 3.758e10,
    "235B-A22B": 2.051e11,
}
ROUTING = {"score_func": "softmax", "route_norm": True, "score_before_experts": False}
SMALL = dict(dim=64, n_layers=2, n_heads=4, head_dim=24, vocab_size=128, rope_theta=10000.0)
VARIANTS = {
    "multi-head": dict(hidden_dim=96),
    "grouped": dict(hidden_dim=96, n_kv_heads=2),
    "tied": dict(hidden_dim=96, n_kv_heads=2, tied=True),
    "experts": dict(n_kv_heads=2, moe=MoE(num_experts=8, top_k=3, hidden_dim=48, **ROUTING)),
    "experts, not renormalised": dict(
        moe=MoE(num_experts=8, top_k=2, hidden_dim=48, **{**ROUTING, "route_norm": False})
    ),
    "balanced experts": dict(
        moe=MoE(num_experts=4, top_k=2, hidden_dim=48, load_balance_coeff=1e-3, **ROUTING)
    ),
}


def flavor(name: str) -> Qwen3:
    return bind(Qwen3, Qwen3.flavors[name], current())


def small(variant: str, **changes) -> Qwen3:
    return Qwen3(**{**SMALL, **VARIANTS[variant], **changes})


@pytest.mark.parametrize("name", SIZES)
def test_a_flavor_has_its_published_parameter_count(name):
    with torch.device("meta"):
        model = build(flavor(name), seq_len=4096)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


@pytest.mark.parametrize("name", FLOPS)
def test_a_flavor_counts_its_published_flops(name):
    with torch.device("meta"):
        model = build(flavor(name), seq_len=4096)
    length = 2048 if name.startswith("debug") else 8192
    assert model.flops_per_token(length) == pytest.approx(FLOPS[name], rel=5e-4)


@pytest.mark.parametrize("name", ["debugmodel", "debugmodel_moe"])
def test_flops_are_those_that_torch_counts(name):
    """Of the forward, times 3; torch counts attention whole, as the formula does."""
    length = 2048
    with torch.device("meta"):
        model = build(flavor(name), seq_len=length)
        tokens = torch.empty(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert 3 * counter.get_total_flops() / length == pytest.approx(model.flops_per_token(length), rel=1e-2)


@pytest.mark.parametrize("name", ["debugmodel", "debugmodel_moe"])
def test_every_parameter_is_in_the_tensor_plan(name):
    with torch.device("meta"):
        model = build(flavor(name), seq_len=64)
    for parameter, _ in model.named_parameters():
        assert sum(fnmatchcase(parameter, pattern) for pattern in model.tensor_plan) == 1, parameter
    assert len(model.experts) == (8 if name == "debugmodel_moe" else 0)


def made(config: Qwen3):
    model = build(config, seq_len=128)
    model.init_weights(lambda name: torch.Generator().manual_seed(sum(map(ord, name))))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # each its own, so that a norm that is taken for another shows
                parameter.normal_(1.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
            elif "moe" in name:
                parameter.mul_(8)  # the experts weigh as much as the rest
    return model


def in_transformers(model) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """The same weights, put where transformers has them in memory: gate and up joined, experts stacked."""
    form = Qwen3HF(model.config)
    dense = model.config.moe is None
    config_class = Qwen3Config if dense else Qwen3MoeConfig
    config = config_class.from_dict({**form.config_json(), "attn_implementation": "eager"})
    theirs = (Qwen3ForCausalLM if dense else Qwen3MoeForCausalLM)(config)
    state = {}
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            state |= dict(form.to_hf(name, parameter.detach()))
    for name, layer in moe_layers(model).items():
        place = name.replace("layers", "model.layers").replace(".moe", ".mlp.experts")
        experts = layer.experts
        state[f"{place}.gate_up_proj"] = torch.cat((experts.w1, experts.w3), dim=1).detach()
        state[f"{place}.down_proj"] = experts.w2.detach()
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.config.tied else [])
    return theirs.eval()


@pytest.mark.parametrize("length", [7, 96])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(record_property, variant, length):
    record_property("logits", "qwen3")
    ours = made(small(variant))
    theirs = in_transformers(ours)
    tokens = torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = (ours(tokens) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_json_goes_both_ways(variant):
    config = small(variant)
    form = Qwen3HF(config)
    keys = Qwen3HF.from_config_json(form.config_json())
    assert Qwen3HF(bind(Qwen3, keys, current())).config_json() == form.config_json()
    # what transformers itself writes is understood as well
    written = (Qwen3Config if config.moe is None else Qwen3MoeConfig).from_dict(form.config_json())
    assert Qwen3HF.from_config_json({**written.to_dict(), "model_type": form.model_type}) == keys


@pytest.mark.parametrize("variant", ["tied", "experts", "balanced experts"])
def test_an_export_loads_in_transformers_and_comes_back_bit_for_bit(variant, tmp_path):
    ours = made(small(variant))
    form = Qwen3HF(ours.config)
    state = {name: tensor.detach() for name, tensor in named_state(ours)}
    export_hf(state, form, {}, tmp_path / "hf")
    tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    # and as transformers writes it
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path / "hf", tmp_path / "again"):
        reader = read_hf(folder, form)
        reader.check({name: tuple(tensor.shape) for name, tensor in state.items()})
        for name, tensor in state.items():
            assert torch.equal(reader.parameter(name), tensor), name
            assert reader.dtype(name) == tensor.dtype
    if ours.config.moe is not None:
        assert "model.layers.1.mlp.experts.3.up_proj.weight" in reader._places


def test_a_bias_that_balancing_has_moved_is_not_lost_in_silence(caplog):
    ours = made(small("balanced experts"))
    form = Qwen3HF(ours.config)
    with caplog.at_level(logging.WARNING):
        assert list(form.to_hf("layers.0.moe.expert_bias", torch.zeros(4))) == []
        assert not caplog.records
        for layer in (0, 1):
            assert list(form.to_hf(f"layers.{layer}.moe.expert_bias", torch.ones(4))) == []
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the biases that balanced the experts have no place in a Hugging Face folder"
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_a_config_that_qwen3_cannot_express_is_refused(change):
    good = Qwen3HF(flavor("30B-A3B")).config_json()
    json.dumps(good)
    with pytest.raises(TitanError, match=r"qwen3 does not have|quantised by 'fp8'"):
        Qwen3HF.from_config_json({**good, **change})


def test_routing_that_transformers_cannot_express_is_refused():
    config = small("experts", moe=MoE(hidden_dim=8, score_func="sigmoid"))
    with pytest.raises(TitanError, match=r"no moe.score_func = 'sigmoid', moe.score_before_experts = True"):
        Qwen3HF(config).config_json()


@pytest.mark.parametrize("variant", ["grouped", "experts"])
def test_a_cache_gives_the_logits_of_the_whole_row(variant):
    model = made(small(variant)).eval()
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(3))
    cache = model.new_cache(12)
    with torch.no_grad():
        whole = model(tokens)
        model(tokens[:, :7], cache=cache)
        for at in range(7, 12):
            step = model(tokens[:, at : at + 1], cache=cache)
            torch.testing.assert_close(step[:, 0], whole[:, at], rtol=1e-4, atol=1e-5)


def test_initial_values_leave_no_bias():
    model = build(small("balanced experts"), seq_len=64)
    for layer in moe_layers(model).values():
        layer.expert_bias.fill_(float("nan"))
    model.init_weights(lambda name: torch.Generator().manual_seed(0))
    assert all(not layer.expert_bias.any() for layer in moe_layers(model).values())
    assert float(model.layers["1"].moe.experts.w2.detach().std()) == pytest.approx(0.02 / 2, rel=0.1)


def test_after_a_step_every_layer_is_balanced_by_its_own_counts():
    model = made(small("balanced experts"))
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
    for name in (name for name in SIZES if not name.startswith("debugmodel")):
        config = bind(Qwen3, Qwen3.flavors[name], current())
        assert (config.max_seq_len, config.rope_theta) == (40960, 1000000.0), name
