"""Of folders of models that see images, the text model is read by the family that computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from titancli.checkpoint.hf.detect_model import hf_form, model_of
from titancli.checkpoint.hf.folder import read_hf
from titancli.errors import EnvironmentProblem
from titancli.models.blocks.state import named_state
from titancli.registry.component import build

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
EYES: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIGLIP = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VL",
        "titan/qwen3",
        {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {**EYES, "deepstack_visual_indexes": []},
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        "titan-families/glm4_moe",
        {
            **TEXT,
            **EXPERTS,
            "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        },
        EYES,
    ),
    "gemma3": ("Gemma3", "titan/gemma3", TEXT, {**SIGLIP, "image_size": 28, "patch_size": 14}),
}


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_the_text_model_of_a_folder_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    import transformers

    name, family, text, eyes = MODELS[kind]
    tied = kind == "gemma3"
    config = getattr(transformers, f"{name}Config")(
        text_config=dict(text, tie_word_embeddings=tied), vision_config=eyes, tie_word_embeddings=tied
    )
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    drawn = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.2, generator=drawn)
    theirs.save_pretrained(tmp_path)
    found, _, ours_config = model_of(tmp_path, None)
    assert found == family
    reader, ours = read_hf(tmp_path, hf_form(ours_config)), build(ours_config, seq_len=16)
    state = dict(named_state(ours))
    reader.check({name: tuple(tensor.shape) for name, tensor in state.items()})
    for key, tensor in state.items():
        tensor.copy_(reader.parameter(key))
    tokens = torch.randint(0, 60, (2, 16), generator=drawn)
    meant = theirs(input_ids=tokens).logits
    assert float((ours(tokens=tokens) - meant).abs().max() / meant.abs().max()) < 1e-5


def test_experts_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    """Qwen3-VL-MoE, by the family and by `hf_causal_lm`."""
    import transformers

    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    config = transformers.Qwen3VLMoeConfig(
        text_config={**TEXT, **sizes, "rope_parameters": rope},
        vision_config={**EYES, "deepstack_visual_indexes": []},
    )
    transformers.Qwen3VLMoeForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(EnvironmentProblem, match="Qwen3-VL-MoE") as caught:
        model_of(tmp_path, None)
    assert "Qwen3-30B-A3B" in str(caught.value.hint)
    _, _, ours = model_of(tmp_path, "hf_causal_lm")
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in named_state(build(ours, seq_len=16))}
    with pytest.raises(EnvironmentProblem, match="Qwen3-VL-MoE"):
        read_hf(tmp_path, hf_form(ours)).check(shapes)
