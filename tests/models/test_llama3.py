"""What is Llama 3's own; what holds for every family is in `test_families.py`."""

from __future__ import annotations

import torch

from tests.models.families import LLAMA3
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.models import Llama3


def test_what_smollm2_has_in_its_config_besides_changes_nothing():
    good = hf_form(LLAMA3.variant("tied")).config_json()
    more = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    assert Llama3.from_config_json({**good, **more}) == Llama3.from_config_json(good)


def test_a_compiled_block_takes_rows_of_another_length():
    """The second length makes the compiler take the length for a variable."""
    ours, compiled = LLAMA3.model("grouped"), LLAMA3.model("grouped")
    for block in compiled.layers.values():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    for length in (8, 12, 20):
        tokens = torch.randint(0, 128, (2, length))
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens), ours(tokens), rtol=1e-5, atol=1e-5)
