"""A small Llama 3 with random weights, and the same in transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from titancli.models import Llama3, RopeScaling
from titancli.models.llama3 import Llama3Model, LlamaHF, build

SMALL: dict[str, Any] = dict(dim=64, n_layers=2, n_heads=4, hidden_dim=96, vocab_size=128)
VARIANTS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped": {"n_kv_heads": 2},
    "tied": {"tied": True, "n_kv_heads": 1},
    "scaled-rope": {
        "n_kv_heads": 2,
        "rope_theta": 10000.0,
        "rope_scaling": RopeScaling(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16
        ),
    },
}


def small(variant: str = "grouped") -> Llama3Model:
    """Weights are wide apart, so that what is most probable is clearly so."""
    model = build(Llama3(**SMALL, **VARIANTS[variant]), seq_len=64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.eval()


def in_transformers(model: Llama3Model) -> LlamaForCausalLM:
    form = LlamaHF(model.config)
    theirs = LlamaForCausalLM(LlamaConfig.from_dict(form.config_json()))
    state = dict(pair for name, p in model.named_parameters() for pair in form.to_hf(name, p.detach()))
    theirs.load_state_dict(state, strict=False)  # a tied head has no tensor of its own
    theirs.tie_weights()
    return theirs.eval()


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed)
    )
