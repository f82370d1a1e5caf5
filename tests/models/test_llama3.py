"""Llama 3 against its published sizes and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from titancli.models import Llama3, RopeScaling
from titancli.models.llama3.model import Llama3Model, LlamaHF, build

SIZES = {
    "debugmodel": 6_163_712,
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}
# FLOPs per token with rows of 8,192 (debugmodel: 2,048).
FLOPS = {"debugmodel": 7.159e7, "8B": 5.791e10, "70B": 4.814e11, "405B": 2.625e12}


def flavor(name: str) -> Llama3:
    values = dict(Llama3.flavors[name])
    values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
    return Llama3(**values)


@pytest.mark.parametrize("name", SIZES)
def test_a_flavor_has_its_published_parameter_count(name):
    with torch.device("meta"):
        model = build(flavor(name), seq_len=8192)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


@pytest.mark.parametrize("name", FLOPS)
def test_a_flavor_counts_its_published_flops(name):
    with torch.device("meta"):
        model = build(flavor(name), seq_len=8192)
    assert model.flops_per_token(2048 if name == "debugmodel" else 8192) == pytest.approx(
        FLOPS[name], rel=5e-4
    )


def test_every_parameter_is_in_the_tensor_plan():
    from fnmatch import fnmatchcase

    with torch.device("meta"):
        model = build(flavor("debugmodel"), seq_len=64)
    for name, _ in model.named_parameters():
        assert sum(fnmatchcase(name, pattern) for pattern in model.tensor_plan) == 1, name


VARIANTS = {
    "multi-head": {},
    "grouped": {"n_kv_heads": 2},
    "tied": {"tied": True, "n_kv_heads": 2},
    "head_dim": {"head_dim": 32},
    "scaled-rope": {
        "rope_scaling": RopeScaling(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
        ),
        "rope_theta": 10000.0,
    },
}


def pair(variant: str) -> tuple[Llama3Model, LlamaForCausalLM]:
    """Our model and transformers', the same random weights carried over through the Hugging Face form."""
    config = Llama3(dim=64, n_layers=2, n_heads=4, hidden_dim=96, vocab_size=128, **VARIANTS[variant])
    ours = build(config, seq_len=128)
    ours.init_weights(lambda name: torch.Generator().manual_seed(sum(map(ord, name))))
    form = LlamaHF(config)
    theirs = LlamaForCausalLM(LlamaConfig.from_dict({**form.config_json(), "attn_implementation": "eager"}))
    state = dict(pair for name, p in ours.named_parameters() for pair in form.to_hf(name, p.detach()))
    if config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    return ours, theirs.eval()


@pytest.mark.parametrize("length", [7, 96])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(record_property, variant, length):
    record_property("logits", "llama3")
    ours, theirs = pair(variant)
    tokens = torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = (ours(tokens) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_json_goes_both_ways(variant):
    config = Llama3(dim=64, n_layers=2, n_heads=4, hidden_dim=96, vocab_size=128, **VARIANTS[variant])
    keys = LlamaHF.from_config_json(LlamaHF(config).config_json())
    if "rope_scaling" in keys:
        keys["rope_scaling"] = RopeScaling(**keys["rope_scaling"])
    again = Llama3(**keys)
    assert LlamaHF(again).config_json() == LlamaHF(config).config_json()
    # what transformers itself writes is understood as well
    theirs = LlamaConfig.from_dict(LlamaHF(config).config_json()).to_dict()
    assert LlamaHF.from_config_json(theirs) == LlamaHF.from_config_json(LlamaHF(config).config_json())


def test_a_document_mask_equals_documents_apart():
    config = Llama3(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=128)
    model = build(config, seq_len=64)
    model.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
    first, second = torch.randint(0, 128, (1, 10)), torch.randint(0, 128, (1, 6))
    packed = torch.cat((first, second), dim=1)
    positions = torch.cat((torch.arange(10), torch.arange(6)))[None]
    ids = torch.tensor([[0] * 10 + [1] * 6], dtype=torch.int32)
    with torch.no_grad():
        together = model(packed, positions, ids)
        apart = torch.cat((model(first), model(second)), dim=1)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)


def test_a_config_that_llama3_cannot_express_is_refused():
    from titancli.errors import TitanError

    good = LlamaHF(flavor("debugmodel")).config_json()
    for change in ({"attention_bias": True}, {"hidden_act": "gelu"}, {"rope_scaling": {"rope_type": "yarn"}}):
        with pytest.raises(TitanError, match="llama3 does not have"):
            LlamaHF.from_config_json({**good, **change})


def test_a_compiled_block_takes_rows_of_another_length():
    """The second length makes the compiler take the length for a variable."""
    ours, _ = pair("grouped")
    compiled, _ = pair("grouped")
    for block in compiled.layers.values():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    for length in (8, 12, 20):
        tokens = torch.randint(0, 128, (2, length))
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens), ours(tokens), rtol=1e-5, atol=1e-5)
