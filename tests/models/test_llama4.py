"""Llama 4 against its published sizes and against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
)

from titancli.checkpoint import export_hf, read_hf
from titancli.errors import RecipeError, TitanError
from titancli.models import Llama4, RopeScaling
from titancli.models.blocks.moe import moe_layers
from titancli.models.blocks.state import named_state
from titancli.models.llama4 import AttnTemperature
from titancli.models.llama4.model import Llama4HF, Llama4Model, build
from titancli.models.sections import MoE
from titancli.recipe import load_recipe
from titancli.registry import current
from titancli.registry.binding import bind

SIZES = {
    "debugmodel": 15_017_216,
    "debugmodel_irope": 15_017_216,
    "17bx16e": 107_769_861_120,
    "17bx16e_irope": 107_769_861_120,
    "17bx128e": 400_711_848_960,
    "17bx128e_irope": 400_711_848_960,
}
# FLOPs per token with rows of 8,192 (debug models: 2,048). The published figure of debugmodel_irope counts
# its chunks as whole rows, and is left out.
FLOPS = {
    "debugmodel": 7.516e7,
    "17bx16e": 1.210e11,
    "17bx16e_irope": 1.210e11,
    "17bx128e": 1.211e11,
    "17bx128e_irope": 1.211e11,
}
EXPERTS = MoE(num_experts=4, top_k=1, hidden_dim=48, num_shared_experts=1)
SMALL = dict(
    dim=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=24, vocab_size=128, rope_theta=10000.0, moe=EXPERTS
)
CHUNK = 20
IROPE = dict(every_n_layers_nope=2, fixed_attn_block_size=CHUNK)
TEMPERATURE = AttnTemperature(floor_scale=8, attn_scale=0.4)
INTERLEAVED = dict(interleave_moe_layer_step=2, hidden_dim=96)
STRETCHED = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position=32)
VARIANTS = {
    "plain": {},
    "interleaved, tied": dict(**INTERLEAVED, tied=True),
    "iRoPE": dict(**INTERLEAVED, **IROPE),
    "chunks alone": dict(fixed_attn_block_size=CHUNK),
    "Scout": dict(**IROPE, rope_scaling=STRETCHED, qk_norm=True, attn_temperature=TEMPERATURE, head_dim=None),
    "Maverick": dict(
        **INTERLEAVED,
        **IROPE,
        attn_temperature=TEMPERATURE,
        moe=replace(EXPERTS, num_experts=8, top_k=2, load_balance_coeff=1e-3),
    ),
}


def flavor(name: str) -> Llama4:
    return bind(Llama4, Llama4.flavors[name], current())


def small(variant: str) -> Llama4:
    return Llama4(**{**SMALL, **VARIANTS[variant]})


def made(config: Llama4) -> Llama4Model:
    model = build(config, seq_len=128)
    model.init_weights(lambda name: torch.Generator().manual_seed(sum(map(ord, name))))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # each its own, so that a norm that is taken for another shows
                parameter.normal_(1.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
            elif "layers" in name:
                parameter.mul_(8)  # the blocks weigh as much as the embedding
    return model


def in_transformers(model: Llama4Model) -> Llama4ForCausalLM:
    form = Llama4HF(model.config)
    theirs = Llama4ForCausalLM(
        Llama4TextConfig.from_dict({**form.config_json(), "attn_implementation": "eager"})
    )
    state = dict(pair for name, p in model.named_parameters() for pair in form.to_hf(name, p.detach()))
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.config.tied else [])
    return theirs.eval()


def tokens(length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SIZES)
def test_a_flavor_has_its_published_size_and_flops(name):
    with torch.device("meta"):
        model = build(flavor(name), seq_len=8192)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    if name in FLOPS:
        length = 2048 if name.startswith("debug") else 8192
        assert model.flops_per_token(length) == pytest.approx(FLOPS[name], rel=5e-4)
    for parameter, _ in model.named_parameters():
        assert sum(fnmatchcase(parameter, pattern) for pattern in model.tensor_plan) == 1, parameter


@pytest.mark.parametrize("name", ["debugmodel", "debugmodel_irope"])
def test_flops_are_those_that_torch_counts(name):
    """Of the forward, times 3; torch counts attention whole, as the formula does."""
    length = 2048
    with torch.device("meta"):
        model = build(flavor(name), seq_len=length)
        row = torch.empty(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(row)
    assert 3 * counter.get_total_flops() / length == pytest.approx(model.flops_per_token(length), rel=1e-2)


def test_which_blocks_have_experts_and_which_have_rope():
    model = build(small("iRoPE"), seq_len=64)
    blocks = model.layers.values()
    assert [block.moe is not None for block in blocks] == [False, True, False, True]
    assert [block.attention.reach.chunk for block in blocks] == [CHUNK, None, CHUNK, None]
    assert [block.attention.is_plain_softmax for block in blocks] == [False, True, False, True]


@pytest.mark.parametrize("length", [7, 97])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(record_property, variant, length):
    record_property("logits", "llama4")
    ours = made(small(variant))
    theirs = in_transformers(ours)
    with torch.no_grad():
        expected = theirs(tokens(length)).logits
        difference = (ours(tokens(length)) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


def test_gradients_equal_transformers():
    ours = made(small("Scout"))
    theirs, form = in_transformers(ours), Llama4HF(ours.config)
    for model in (lambda x: ours(x), lambda x: theirs(x).logits):
        model(tokens(41)).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = dict(pair for name, p in ours.named_parameters() for pair in form.to_hf(name, p.grad))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_json_goes_both_ways(variant):
    form = Llama4HF(small(variant))
    keys = Llama4HF.from_config_json(form.config_json())
    assert Llama4HF(bind(Llama4, keys, current())).config_json() == form.config_json()
    # what transformers itself writes is understood as well
    written = Llama4TextConfig.from_dict(form.config_json()).to_dict()
    assert Llama4HF.from_config_json(written) == keys


def test_a_released_config_is_that_of_its_flavor():
    """With the keys of Meta's folders, which leave lists that follow from a number empty."""
    text = {
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "vocab_size": 202048,
        "max_position_embeddings": 10485760,
        "attention_chunk_size": 8192,
        "interleave_moe_layer_step": 1,
        "moe_layers": list(range(48)),
        "no_rope_layers": [],
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "use_qk_norm": True,
    }
    found = bind(Llama4, Llama4HF.from_config_json({"model_type": "llama4", "text_config": text}), current())
    for name in ("17bx16e", "17bx16e_irope"):
        assert found == replace(flavor(name), head_dim=128)
    text |= {
        "interleave_moe_layer_step": 2,
        "moe_layers": list(range(1, 48, 2)),
        "num_local_experts": 128,
        "max_position_embeddings": 1048576,
        "rope_scaling": None,
        "use_qk_norm": False,
    }
    found = bind(Llama4, Llama4HF.from_config_json(text), current())
    for name in ("17bx128e", "17bx128e_irope"):
        assert found == replace(flavor(name), head_dim=128)


@pytest.mark.parametrize("variant", ["interleaved, tied", "Maverick"])
def test_an_export_loads_in_transformers_and_comes_back_bit_for_bit(variant, tmp_path):
    ours = made(small(variant))
    form = Llama4HF(ours.config)
    state = {name: tensor.detach() for name, tensor in named_state(ours)}
    export_hf(state, form, {}, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert isinstance(theirs, Llama4ForCausalLM)
    with torch.no_grad():
        expected = theirs(tokens(33)).logits
        assert (ours(tokens(33)) - expected).abs().max() <= 1e-5 * expected.abs().max()
    # and as transformers writes it
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path / "hf", tmp_path / "again"):
        same(folder, form, state)
    experts = ours.config.moe
    stacked = read_hf(tmp_path / "again", form)._empty("model.layers.3.feed_forward.experts.gate_up_proj")
    assert stacked.shape == (experts.num_experts, 64, 2 * experts.hidden_dim)


def same(folder: Path, form: Llama4HF, state: dict[str, torch.Tensor]) -> None:
    """The folder holds these parameters, bit for bit."""
    reader = read_hf(folder, form)
    reader.check({name: tuple(tensor.shape) for name, tensor in state.items()})
    for name, tensor in state.items():
        assert torch.equal(reader.parameter(name), tensor), name
        assert reader.dtype(name) == tensor.dtype


def test_the_text_model_of_a_folder_that_sees_images_too(tmp_path):
    ours = made(small("Scout"))
    form = Llama4HF(ours.config)
    vision = dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=28
    )
    config = Llama4Config(
        text_config=form.config_json(),
        vision_config=dict(
            **vision, patch_size=14, vision_output_dim=64, projector_input_dim=64, projector_output_dim=64
        ),
    )
    both = Llama4ForConditionalGeneration(config)
    both.language_model.load_state_dict(in_transformers(ours).state_dict())
    both.save_pretrained(tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["model_type"] == "llama4"
    keys = Llama4HF.from_config_json(written)
    again = Llama4HF(bind(Llama4, keys, current()))
    assert again.config_json() == form.config_json()
    state = {name: tensor.detach() for name, tensor in named_state(ours)}
    same(tmp_path / "hf", again, state)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"moe_layers": [0, 3]},
        {"moe_layers": []},
        {"no_rope_layers": [1, 0, 0, 1]},
        {"layer_types": ["chunked_attention"] * 4},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
    ],
)
def test_a_config_that_llama4_cannot_express_is_refused(change):
    good = Llama4HF(small("iRoPE")).config_json()
    json.dumps(good)
    refusal = "llama4 does not have|quantised by 'compressed-tensors'|no layers of experts|in no others"
    with pytest.raises(TitanError, match=refusal):
        Llama4HF.from_config_json({**good, **change})
    with pytest.raises(TitanError, match=refusal):
        whole = {"model_type": "llama4", "text_config": {**good, **change}}
        Llama4HF.from_config_json(whole)


def test_routing_that_transformers_cannot_express_is_refused():
    config = replace(small("plain"), moe=MoE(hidden_dim=8, route_norm=True))
    with pytest.raises(TitanError, match=r"Llama 4 has no moe.route_norm = True, moe.num_shared_experts = 0"):
        Llama4HF(config).config_json()


@pytest.mark.parametrize("variant", ["Scout", "Maverick"])
def test_a_cache_gives_the_logits_of_the_whole_row(variant):
    """Over the edge of a chunk, and with rows that begin at different places."""
    model = made(small(variant)).eval()
    row = tokens(CHUNK + 12, rows=1)
    with torch.no_grad():
        whole, tail = model(row), model(row[:, 5:])
        both, padding = torch.cat((row, row)), torch.tensor([0, 5])  # five in front do not count
        cache = model.new_cache(CHUNK + 12, padding=padding)
        model(both[:, : CHUNK - 3], cache=cache)
        for at in range(CHUNK - 3, CHUNK + 12):
            step = model(both[:, at : at + 1], cache=cache)[:, 0]
            expected = torch.cat((whole[:, at], tail[:, at - 5]))
            torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-4)


def test_documents_in_one_row_equal_documents_apart():
    """Chunks and temperature count from a document's own beginning."""
    model = made(small("Scout"))
    row = tokens(70, rows=1)
    first, second = row[:, :27], row[:, 27:]
    positions = torch.cat((torch.arange(27), torch.arange(43)))[None]
    ids = torch.tensor([[0] * 27 + [1] * 43], dtype=torch.int32)
    with torch.no_grad():
        together = model(row, positions, ids)
        apart = torch.cat((model(first), model(second)), dim=1)
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.interleave_moe_layer_step=9"], "none of the 4 blocks would have experts"),
        (["model.flavor=17bx16e", "model.interleave_moe_layer_step=2"], "need a hidden_dim"),
        (["model.interleave_moe_layer_step=1"], "remove hidden_dim"),
        (["model.flavor=debugmodel", "model.attn_temperature={}"], "and there are none: see every_n_layers"),
        (["model.moe.top_k=9"], "top_k 9 is more than num_experts 8"),
        (["mesh.dp_shard=6", "mesh.ep=6"], "ep = 6 does not divide n_experts 8"),
        (["mesh.cp=2", "parallelize.context_parallel=ring"], "the ring computes plain .* has chunks"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("llama4_debug", overrides)


def test_initial_values_of_experts_are_those_of_matrices():
    model = build(small("Maverick"), seq_len=64)
    model.init_weights(lambda name: torch.Generator().manual_seed(0))
    for number, layer in moe_layers(model).items():
        assert not layer.expert_bias.any()
        assert float(layer.experts.w13.detach().std()) == pytest.approx(0.02, rel=0.1), number
