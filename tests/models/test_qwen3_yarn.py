"""YaRN of released Qwen 3 folders, in every form in which transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from titancli.checkpoint.hf.detect_model import hf_form
from titancli.models import Qwen3
from titancli.recipe.config_json import bind_model
from titancli.registry.component import build

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FORMS: dict[str, dict[str, Any]] = {
    "of the model card": CARD,
    "older key": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "own attention factor": {**CARD, "attention_factor": 1.5},
    "usual attention factor": {**CARD, "attention_factor": 1.1386294361119891},
    "betas": {**CARD, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "no original length": {"rope_type": "yarn", "factor": 4.0},
    "scales": {**CARD, "mscale": 1.0, "mscale_all_dim": 0.5},
    "one scale": {**CARD, "mscale": 0.7},
    "factor below 1": {**CARD, "factor": 0.5},
}


@pytest.mark.parametrize("form", list(FORMS))
def test_yarn_is_that_of_transformers(form: str) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        Qwen3Config(**SIZES, rope_theta=1e4, rope_scaling=dict(FORMS[form]), attn_implementation="eager")
    ).eval()
    keys = {"model_type": "qwen3", **SIZES, "rope_theta": 1e4, "rope_scaling": FORMS[form]}
    config = bind_model(Qwen3, Qwen3.from_config_json(keys), Path("config.json"))
    ours = build(config, seq_len=128)
    there, of = dict(theirs.named_parameters()), hf_form(config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(of.from_hf(name, [there[source] for source in of.sources(name)]))
        tokens = torch.randint(0, 64, (2, 120))
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens=tokens), expected, rtol=1e-5, atol=1e-5)
        # What is written is read again, by both.
        written = of.config_json()
        assert bind_model(Qwen3, Qwen3.from_config_json(written), Path("config.json")) == config
        again = AutoModelForCausalLM.from_config(
            Qwen3Config(**{k: v for k, v in written.items() if k not in ("architectures", "model_type")})
        )
        again.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(again.eval()(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_window_of_turns() -> None:
    model = Qwen3(
        dim=32,
        n_layers=1,
        n_heads=4,
        hidden_dim=48,
        vocab_size=64,
        rope_scaling=bind_yarn(beta_fast=0.5),
    )
    recipe: Any = type("Recipe", (), {"training": type("T", (), {"seq_len": 8})})
    assert ("rope_scaling.beta_fast", "beta_fast must be greater than beta_slow") in list(model.check(recipe))


def bind_yarn(**values: float) -> Any:
    from titancli.models.qwen3 import FactorYarn

    return FactorYarn(factor=4.0, **values)  # type: ignore[arg-type]
