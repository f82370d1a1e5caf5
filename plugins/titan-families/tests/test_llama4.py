"""What is Llama 4's own; what holds for every family is in `test_families.py`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4Config, Llama4ForConditionalGeneration

from tests.models.families import CHUNK, LLAMA4
from titan_families import Llama4
from titancli.checkpoint import export_hf, read_hf
from titancli.errors import TitanError
from titancli.models.blocks.hf import DecoderHF
from titancli.models.blocks.moe import moe_layers
from titancli.models.blocks.state import named_state
from titancli.registry import current
from titancli.registry.binding import bind
from titancli.registry.component import build


def test_which_blocks_have_experts_and_which_have_rope():
    model = build(LLAMA4.variant("iRoPE"), seq_len=64)
    blocks = model.layers.values()
    assert [block.moe is not None for block in blocks] == [False, True, False, True]
    assert [block.attention.reach.chunk for block in blocks] == [CHUNK, None, CHUNK, None]
    assert [block.attention.is_plain_softmax for block in blocks] == [False, True, False, True]


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
    found = bind(Llama4, Llama4.from_config_json({"model_type": "llama4", "text_config": text}), current())
    for name in ("17bx16e", "17bx16e_irope"):
        assert found == replace(LLAMA4.flavor(name), head_dim=128)
    text |= {
        "interleave_moe_layer_step": 2,
        "moe_layers": list(range(1, 48, 2)),
        "num_local_experts": 128,
        "max_position_embeddings": 1048576,
        "rope_scaling": None,
        "use_qk_norm": False,
    }
    found = bind(Llama4, Llama4.from_config_json(text), current())
    for name in ("17bx128e", "17bx128e_irope"):
        assert found == replace(LLAMA4.flavor(name), head_dim=128)


def test_the_text_model_of_a_folder_that_sees_images_too(tmp_path):
    ours = LLAMA4.model("Scout")
    form = DecoderHF(ours.config)
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
    state = {name: tensor.detach() for name, tensor in named_state(ours)}
    export_hf(state, form, {}, tmp_path / "text")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
    both.language_model.load_state_dict(text.state_dict())
    both.save_pretrained(tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["model_type"] == "llama4"
    keys = Llama4.from_config_json(written)
    again = DecoderHF(bind(Llama4, keys, current()))
    assert again.config_json() == form.config_json()
    reader = read_hf(tmp_path / "hf", again)
    reader.check({name: tuple(tensor.shape) for name, tensor in state.items()})
    assert all(torch.equal(reader.parameter(name), tensor) for name, tensor in state.items())


def test_initial_values_of_experts_are_those_of_matrices():
    model = build(LLAMA4.variant("Maverick"), seq_len=64)
    model.init_weights(lambda name: torch.Generator().manual_seed(0))
    for number, layer in moe_layers(model).items():
        assert not layer.expert_bias.any()
        assert float(layer.experts.w13.detach().std()) == pytest.approx(0.02, rel=0.1), number


@pytest.mark.parametrize("change", [change for _, change in LLAMA4.refused])
def test_what_is_refused_is_refused_of_a_text_model_inside_too(change):
    good = DecoderHF(LLAMA4.flavor("debugmodel_irope")).config_json()
    with pytest.raises(TitanError, match=f"llama4 does not support|{LLAMA4.refusals}"):
        Llama4.from_config_json({"model_type": "llama4", "text_config": {**good, **change}})
