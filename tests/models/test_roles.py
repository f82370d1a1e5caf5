"""What each parameter is to an optimizer: declared by the families, found by modules in other models."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.families import FAMILIES
from tests.models.hf_configs import CONFIGS, GEMMA4, HRM, LLAMA, LONGCAT, PHI3
from tests.rows import rows
from titan_transformers import HFCausalLM
from titancli.converters import LoRA
from titancli.converters.lora import Adapters
from titancli.models.roles import roles_of
from titancli.registry.component import build, completed


def found(model: Any) -> dict[str, str]:
    """What is not `matrix` of all that an optimizer could take for one, its layers as one."""
    roles, named = roles_of(model), dict(model.named_parameters())
    assert roles.keys() == named.keys()
    assert all(p.ndim > 1 for name, p in named.items() if roles[name] == "matrix")
    assert any(role == "matrix" for role in roles.values())
    several = {name for name, p in named.items() if p.ndim > 1 and roles[name] != "matrix"}
    return {re.sub(r"\d+", "*", name): roles[name] for name in sorted(several)}


ENDS = {"tok_embeddings.weight": "embedding", "output.weight": "output"}
GATE = {"layers.*.moe.router.gate.weight": "router"}
BUNDLED: dict[str, dict[str, str]] = {
    "llama3": ENDS,
    "olmo3": ENDS,
    "gemma3": ENDS,
    "granite": ENDS,
    "qwen3": ENDS | GATE,
    "mixtral": ENDS | GATE,
    "llama4": ENDS | GATE,
    "glm4_moe": ENDS | GATE,
    "deepseek_v3": ENDS | GATE,
    "gpt_oss": ENDS | GATE | {"layers.*.moe.experts.w*_bias": "other"},  # of each expert one
    "qwen3_next": ENDS
    | GATE
    | {"layers.*.attention.conv": "other", "layers.*.moe.shared_gate.weight": "router"},
}


def test_each_family_has_a_row() -> None:
    assert BUNDLED.keys() == {family.name for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families_declare_what_is_no_matrix(family: Any) -> None:
    seen: dict[str, str] = {}
    for variant in family.variants:
        config = family.variant(variant)
        with torch.device("meta"):
            here = found(build(config, seq_len=16))
        assert ("output.weight" in here) != bool(config.tied)
        seen |= here
    assert seen == BUNDLED[family.name]


THEIRS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "llama": (LLAMA, {"model.embed_tokens.weight": "embedding", "lm_head.weight": "output"}),
    "llama, tied": (CONFIGS["llama, tied"], {"model.embed_tokens.weight": "embedding"}),
    "gemma3": (CONFIGS["gemma3"], {"model.embed_tokens.weight": "embedding"}),
    "phi3": (PHI3, {"model.embed_tokens.weight": "embedding", "lm_head.weight": "output"}),
    "hrm": (HRM, {"model.embed_tokens.weight": "embedding", "lm_head.weight": "output"}),
    # its linear layers are transformers' Conv1D
    "gpt2": (CONFIGS["gpt2"], {"transformer.wte.weight": "embedding", "transformer.wpe.weight": "embedding"}),
    "gpt_neox": (
        CONFIGS["gpt_neox"],
        {"gpt_neox.embed_in.weight": "embedding", "lm_head.weight": "output"},
    ),
    "gemma4": (
        GEMMA4,
        {"model.embed_tokens.weight": "embedding", "model.embed_tokens_per_layer.weight": "embedding"},
    ),
    "qwen3_moe": (
        CONFIGS["experts"],
        {
            "model.embed_tokens.weight": "embedding",
            "lm_head.weight": "output",
            "model.layers.*.mlp.gate.weight": "router",
        },
    ),
    # a router that is a linear layer within a module; experts that are not titan's
    "longcat_flash": (
        LONGCAT,
        {
            "model.embed_tokens.weight": "embedding",
            "lm_head.weight": "output",
            "model.layers.*.mlp.router.classifier.weight": "router",
            "model.layers.*.mlp.experts.gate_up_proj": "other",
            "model.layers.*.mlp.experts.down_proj": "other",
        },
    ),
    # a router that is a linear layer itself, of which the base says it and not the whole
    "llama4": (
        {
            **LLAMA,
            "model_type": "llama4_text",
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 1,
        },
        {
            "model.embed_tokens.weight": "embedding",
            "lm_head.weight": "output",
            "model.layers.*.feed_forward.router.weight": "router",
            "model.layers.*.feed_forward.experts.gate_up_proj": "other",  # its experts are not titan's
            "model.layers.*.feed_forward.experts.down_proj": "other",
        },
    ),
    "qwen3_next": (
        {
            **LLAMA,
            "model_type": "qwen3_next",
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        {
            "model.embed_tokens.weight": "embedding",
            "lm_head.weight": "output",
            "model.layers.*.linear_attn.conv*d.weight": "other",
            "model.layers.*.mlp.gate.weight": "router",
            "model.layers.*.mlp.shared_expert_gate.weight": "other",  # one row
        },
    ),
}


@pytest.mark.parametrize("name", rows(THEIRS, slow=("hrm", "phi3", "gpt_neox", "qwen3_next")))
def test_models_of_transformers_say_what_is_no_matrix(name: str) -> None:
    from titan_transformers.model import TransformersModel

    values, expected = THEIRS[name]
    with torch.device("meta"):
        assert found(TransformersModel(HFCausalLM(config=values))) == expected


class Other(nn.Module):
    """As a third party's, which declares nothing."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(16, 8)
        self.first = nn.Conv1d(8, 8, 3)
        self.inner = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 1), nn.LayerNorm(8))
        self.own = nn.Parameter(torch.empty(8, 8))
        self.output = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
        if tied:
            self.output[1].weight = self.tok.weight
        self.experts: dict[str, nn.Module] = {}


REST = {"tok.weight": "embedding", "first.weight": "other", "own": "other", "inner.*.weight": "other"}


@pytest.mark.parametrize("tied", [False, True])
def test_other_models_are_read_by_their_modules(tied: bool) -> None:
    with torch.device("meta"):
        model = completed("model", Other(tied=tied))
    roles = roles_of(model)
    assert [name for name, role in roles.items() if role == "matrix"] == ["inner.0.weight", "inner.1.weight"]
    assert found(model) == REST | {"output.*.weight": "output"}
    assert roles["inner.0.bias"] == "other" and roles["output.0.bias"] == "output"
    assert roles.get("output.1.weight", "tied") == ("tied" if tied else "output")


def test_a_declaration_comes_first() -> None:
    with torch.device("meta"):
        model: Any = completed("model", Other())
    model.roles = {"inner.0.*": "router", "inner.*": "modulation", "own": "matrix"}
    roles = roles_of(model)
    assert roles["inner.0.weight"] == "router" and roles["inner.1.weight"] == "modulation"
    assert roles["own"] == "matrix" and roles["tok.weight"] == "embedding"


def test_adapters_are_matrices_and_so_are_layers_that_a_converter_has_swapped() -> None:
    from titan_float8 import Float8Linear
    from titancli.layout.degrees import Degrees

    family = next(family for family in FAMILIES if family.name == "llama3")
    for config, own in (
        (LoRA(rank=2), "lora_a"),
        (Float8Linear(recipe="rowwise", skip=["output"]), "weight"),
    ):
        with torch.device("meta"):
            model = build(family.variant("grouped"), seq_len=16)
        converter = build(config, mesh=Degrees(), compile=False)
        converter.convert(model)
        assert isinstance(converter, Adapters) == (own == "lora_a")
        assert roles_of(model)[f"layers.0.attention.wq.{own}"] == "matrix"
        assert roles_of(model)["output.weight"] == "output"
