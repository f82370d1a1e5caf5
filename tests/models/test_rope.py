"""Stretched rotary frequencies against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from titancli.models.blocks.rope import yarn_frequencies
from titancli.models.sections import Yarn


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "theta", "factor"), [(64, 1e4, 40.0), (64, 1.5e5, 32.0), (16, 1e4, 4.0)]
)
def test_yarn_frequencies_are_those_of_transformers(head_dim, theta, factor, truncate):
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": truncate,
    }
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope
    )
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    found = yarn_frequencies(head_dim, theta, Yarn(factor=factor, truncate=truncate))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
