"""The text model of a folder that holds more: read, compared with the whole model fed text, and exported."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from titan_transformers import HFCausalLM
from titan_transformers.model import build
from titan_transformers.weights import FolderForm
from titancli.checkpoint import export_hf, read_hf
from titancli.errors import RecipeError
from titancli.models.blocks.state import named_state

TEXT: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=96,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SEEN: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
QWEN_SEEN: dict[str, Any] = dict(
    depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64
)
MROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", {**TEXT, "sliding_window": 6}, SEEN),
    "mistral3": ("Mistral3ForConditionalGeneration", {**TEXT, "model_type": "mistral"}, SEEN),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {**TEXT, "rope_parameters": MROPE}, QWEN_SEEN),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {**TEXT, "rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**QWEN_SEEN, "deepstack_visual_indexes": [0]},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {**TEXT, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "global_head_dim": 16},
        SEEN,
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8},
        {**SEEN, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
}
"""By type: the class of the whole, what its text model is, and what sees."""


def whole_model(model_type: str) -> Any:
    kind, text, seen = WHOLE[model_type]
    config = CONFIG_MAPPING[model_type](text_config=text, vision_config=seen)
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).eval()


def read_into_ours(folder: Path) -> tuple[Any, FolderForm]:
    config = HFCausalLM(config=folder)
    with torch.device("meta"):
        model = build(config, seq_len=16)
    model.to_empty(device="cpu")
    model.tie()
    form = FolderForm(config)
    reader = read_hf(folder, form)
    mine = dict(named_state(model))
    reader.check({name: tuple(value.shape) for name, value in mine.items()})
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(reader.parameter(name))
    return model.eval(), form


@pytest.mark.parametrize(
    "model_type", [pytest.param(n, marks=() if n == "qwen2_5_vl" else pytest.mark.slow) for n in WHOLE]
)
@torch.no_grad()
def test_the_text_model_is_the_whole_one_fed_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str
) -> None:
    theirs = whole_model(model_type)
    for module in theirs.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path / "whole")
    with caplog.at_level(logging.WARNING):
        model, form = read_into_ours(tmp_path / "whole")
    assert "ignoring tensors outside the text model" in caplog.text
    tokens = torch.randint(3, 90, (2, 12))
    meant = theirs(input_ids=tokens).logits
    assert meant.abs().max() > 0.1
    torch.testing.assert_close(model(tokens), meant, rtol=1e-4, atol=1e-4)
    export_hf(dict(named_state(model)), form, {}, tmp_path / "text")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
    assert type(again).__name__.endswith("ForCausalLM")
    torch.testing.assert_close(again(input_ids=tokens).logits, meant, rtol=1e-4, atol=1e-4)


def test_names_of_older_folders(tmp_path: Path) -> None:
    form = FolderForm(HFCausalLM(config={"model_type": "llama"}))
    assert (
        form.known_as("language_model.model.layers.0.mlp.up_proj.weight")
        == "model.layers.0.mlp.up_proj.weight"
    )
    assert form.known_as("model.language_model.norm.weight") == "model.norm.weight"
    assert form.known_as("language_model.lm_head.weight") == "lm_head.weight"


def test_layers_that_see_images_are_refused(write_config: Callable[[dict[str, Any]], Path]) -> None:
    values = CONFIG_MAPPING["mllama"]().to_dict() | {"model_type": "mllama"}
    with pytest.raises(RecipeError, match="mllama_text_model: ") as caught, torch.device("meta"):
        build(HFCausalLM(config=write_config(values)), seq_len=16)
    assert "no causal language model of this type" in caught.value.message


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(values: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(values, default=str))
        return tmp_path

    return write
