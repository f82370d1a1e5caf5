"""gpt-oss against its published sizes and against transformers."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from titancli.checkpoint import export_hf, read_hf
from titancli.errors import TitanError
from titancli.models import GptOss
from titancli.models.blocks.moe import moe_layers
from titancli.models.blocks.state import named_state
from titancli.models.gpt_oss.model import ClampedExperts, GptOssHF, build
from titancli.models.sections import MoE, Yarn
from titancli.recipe import load_recipe
from titancli.registry import current
from titancli.registry.binding import bind

SIZES = {"debugmodel": 81_489_440, "20b": 20_914_757_184, "120b": 116_829_156_672}
# FLOPs per token with rows of 8,192, as published: as if every layer saw the whole row.
FLOPS = {"20b": 3.131e10, "120b": 4.529e10}
ROUTING = {"score_func": "softmax", "route_norm": True, "score_before_experts": False, "gate_bias": True}
EIGHT = MoE(num_experts=8, top_k=3, hidden_dim=48, **ROUTING)
YARN = Yarn(factor=4.0, original_max_position=32, truncate=False)
SMALL = dict(
    dim=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=128, sliding_window=16, moe=EIGHT,
    max_seq_len=256,
)  # fmt: skip
VARIANTS = {
    "as released": dict(yarn=YARN),
    "whole pairs": dict(yarn=Yarn(factor=8.0, original_max_position=16, beta_fast=16.0)),
    "no YaRN": dict(),
    "clamped much": dict(yarn=YARN, swiglu_limit=0.5, swiglu_alpha=3.0),
    "a key head each": dict(n_kv_heads=4),
    "balanced, tied": dict(
        yarn=YARN,
        tied=True,
        moe=MoE(num_experts=4, top_k=2, hidden_dim=48, load_balance_coeff=1e-3, **ROUTING),
    ),
}


def flavor(name: str) -> GptOss:
    return bind(GptOss, GptOss.flavors[name], current())


def small(variant: str, **changes) -> GptOss:
    return GptOss(**{**SMALL, **VARIANTS[variant], **changes})


@pytest.mark.parametrize("name", SIZES)
def test_a_flavor_has_its_published_parameter_count(name):
    with torch.device("meta"):
        model = build(flavor(name), seq_len=4096)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    if name in FLOPS:
        not_seen = 12 * (model.config.n_layers / 2) * 64 * 64 * (8192 - 128)
        assert model.flops_per_token(8192) + not_seen == pytest.approx(FLOPS[name], rel=5e-4)


def test_flops_are_those_that_torch_counts():
    """Of the forward, times 3. The formula has 128 keys for a query under a window and 64 numbers in a head:
    what is computed has blocks of two windows, and 72 numbers in a query and a key, for the sink."""
    length, width = 2048, 64 * 64
    with torch.device("meta"):
        model = build(flavor("debugmodel"), seq_len=length)
        tokens = torch.empty(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counted = 3 * counter.get_total_flops() / length
    formula = model.flops_per_token(length)
    attention = 2 * 12 * width * (length + 128)
    whole, window = 1 + 1 / length, 2 - 128 / length
    computed = 2 * 6 * width * (1 + 72 / 64) * (length * whole + 128 * window)
    assert counted == pytest.approx(formula - attention + computed, rel=1e-2)


def test_every_parameter_is_in_the_tensor_plan():
    with torch.device("meta"):
        model = build(flavor("debugmodel"), seq_len=64)
    for parameter, _ in model.named_parameters():
        assert sum(fnmatchcase(parameter, pattern) for pattern in model.tensor_plan) == 1, parameter
    assert len(model.experts) == 4


def made(config: GptOss):
    """Every parameter its own, biases and sinks too, so that one that is taken for another shows."""
    model = build(config, seq_len=128)
    model.init_weights(lambda name: torch.Generator().manual_seed(sum(map(ord, name))))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.Generator().manual_seed(sum(map(ord, name)))
            if "norm" in name:
                parameter.normal_(1.0, 0.2, generator=draw)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.5, generator=draw)
            elif "moe" in name:
                parameter.mul_(8)  # the experts weigh as much as the rest
    return model


def in_transformers(model) -> GptOssForCausalLM:
    form = GptOssHF(model.config)
    theirs = GptOssForCausalLM(GptOssConfig.from_dict({**form.config_json(), "attn_implementation": "eager"}))
    state = dict(pair for name, p in model.named_parameters() for pair in form.to_hf(name, p.detach()))
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.config.tied else [])
    return theirs.eval()


@pytest.mark.parametrize("length", [7, 96])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(record_property, variant, length):
    record_property("logits", "gpt_oss")
    """96 is past the window, past the window's blocks, and past the context of the first training."""
    ours = made(small(variant))
    theirs = in_transformers(ours)
    tokens = torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = (ours(tokens) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


def test_gradients_equal_transformers():
    ours = made(small("clamped much"))
    theirs = in_transformers(ours)
    tokens = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(2, 40, 128, generator=torch.Generator().manual_seed(2))
    (theirs(tokens).logits * weights).sum().backward()
    (ours(tokens) * weights).sum().backward()
    form, found = GptOssHF(ours.config), dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        ((hf_name, mine),) = form.to_hf(name, parameter.grad)
        wanted = found[hf_name].grad
        assert (mine - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_the_clamped_product_keeps_nothing_that_it_can_make_again():
    """And its gradients are those of the same operations one by one."""
    experts = ClampedExperts(16, 24, 4, alpha=1.7, limit=0.8)
    draw = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    x = torch.randn(11, 16, generator=draw, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = experts(x, torch.tensor([4, 0, 5, 2]))
    assert sum(kept) - sum(p.numel() for p in experts.parameters() if p.ndim == 3) <= 11 * (16 + 3 * 24) + 20
    weights = torch.randn(11, 16, generator=draw)
    mine = torch.autograd.grad((out * weights).sum(), [x, *experts.parameters()])
    rows = []
    for number, part in zip((0, 2, 3), x.split([4, 5, 2]), strict=True):
        gate, up = (part @ experts.w13[number].T + experts.w13_bias[number]).chunk(2, -1)
        gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
        inner = (up + 1) * gate * torch.sigmoid(1.7 * gate)
        rows.append(inner @ experts.w2[number].T + experts.w2_bias[number])
    torch.testing.assert_close(out, torch.cat(rows))
    wanted = torch.autograd.grad((torch.cat(rows) * weights).sum(), [x, *experts.parameters()])
    for one, other in zip(mine, wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_json_goes_both_ways(variant):
    config = small(variant)
    form = GptOssHF(config)
    keys = GptOssHF.from_config_json(form.config_json())
    assert GptOssHF(bind(GptOss, keys, current())).config_json() == form.config_json()
    # what transformers itself writes is understood as well
    assert GptOssHF.from_config_json(GptOssConfig.from_dict(form.config_json()).to_dict()) == keys


def test_a_config_json_without_rope_has_the_familys_own():
    config_json = GptOssHF(flavor("20b")).config_json()
    own = GptOssHF.from_config_json(GptOssConfig.from_dict(config_json).to_dict())
    del config_json["rope_scaling"]
    for written in (config_json, GptOssConfig.from_dict(config_json).to_dict()):
        assert bind(GptOss, GptOssHF.from_config_json(written), current()) == bind(GptOss, own, current())


@pytest.mark.parametrize("variant", ["as released", "balanced, tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_loads_in_transformers_and_comes_back_bit_for_bit(variant, dtype, tmp_path):
    ours = made(small(variant))
    form = GptOssHF(ours.config)
    state = {
        name: tensor.detach().to(torch.float32 if "expert_bias" in name else dtype)
        for name, tensor in named_state(ours)
    }
    export_hf(state, form, {}, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(state[name])
        tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(1))
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    # and as transformers writes it
    theirs.to(dtype).save_pretrained(tmp_path / "again")
    for folder in (tmp_path / "hf", tmp_path / "again"):
        reader = read_hf(folder, form)
        reader.check({name: tuple(tensor.shape) for name, tensor in state.items()})
        for name, tensor in state.items():
            assert torch.equal(reader.parameter(name), tensor), name
            assert reader.dtype(name) == tensor.dtype


def test_an_export_has_gate_and_up_in_turn():
    tensor = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    ((name, turned),) = GptOssHF(small("as released")).to_hf("layers.1.moe.experts.w13", tensor)
    assert (name, turned.shape) == ("model.layers.1.mlp.experts.gate_up_proj", (2, 4, 6))
    assert torch.equal(turned[0, :, 0], tensor[0, 0]) and torch.equal(turned[0, :, 1], tensor[0, 3])


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": False},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention"] * 36},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0}},
        {"quantization_config": {"quant_method": "mxfp4"}},
    ],
)
def test_a_config_that_gpt_oss_cannot_express_is_refused(change):
    good = GptOssHF(flavor("120b")).config_json()
    json.dumps(good)
    with pytest.raises(TitanError, match=r"gpt_oss does not have|quantised by 'mxfp4'") as raised:
        GptOssHF.from_config_json({**good, **change})
    if "quantization_config" in change:
        assert "model.dequantize()" in raised.value.hint


def test_routing_that_transformers_cannot_express_is_refused():
    config = small("as released", moe=MoE(hidden_dim=8, score_func="sigmoid"))
    with pytest.raises(TitanError, match=r"no moe.score_func = 'sigmoid', moe.route_norm = False"):
        GptOssHF(config).config_json()


@pytest.mark.parametrize("variant", ["as released", "a key head each"])
def test_a_cache_gives_the_logits_of_the_whole_row(variant):
    model = made(small(variant)).eval()
    tokens = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(3))
    cache = model.new_cache(40)
    with torch.no_grad():
        whole = model(tokens)
        model(tokens[:, :25], cache=cache)
        for at in range(25, 40):
            step = model(tokens[:, at : at + 1], cache=cache)
            torch.testing.assert_close(step[:, 0], whole[:, at], rtol=1e-4, atol=1e-4)


def test_initial_values():
    model = build(small("balanced, tied"), seq_len=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.init_weights(lambda name: torch.Generator().manual_seed(0))
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert not (name.endswith("bias") and parameter.any()), name
    assert float(model.layers["1"].moe.experts.w2.detach().std()) == pytest.approx(0.02 / 2, rel=0.1)
    assert not any(layer.expert_bias.any() for layer in moe_layers(model).values())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("model.moe.top_k=9", "top_k 9 is more than num_experts 8"),
        ("model.moe.num_shared_experts=1", "gpt_oss has no shared experts"),
        ("model.yarn.beta_fast=0.5", "beta_fast is not more than beta_slow"),
        ("model.n_kv_heads=7", "n_heads 64 is not divisible by n_kv_heads 7"),
        ("mesh.ep=3", "8"),
        (
            "mesh.cp=2 parallelize.context_parallel=ring",
            "the ring computes plain attention, and the model's has sinks, sliding windows",
        ),
    ],
)
def test_fields_that_do_not_fit_are_told(overrides, said):
    with pytest.raises(TitanError, match=said):
        load_recipe("llama3_debug", ["model.type=gpt_oss", "model.flavor=debugmodel", *overrides.split()])
