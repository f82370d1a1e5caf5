"""The family that docs/plugins.md adds, against transformers."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from titancli.checkpoint import export_hf, read_hf
from titancli.errors import EnvironmentProblem
from titancli.models.blocks.hf import DecoderHF
from titancli.models.blocks.state import named_state
from titancli.registry.component import build

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    block = re.search(r"<!-- file: titan_mistral.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None and block[1].count("\n") <= 120
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "titan_mistral.py").write_text(block[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("titan_mistral").Mistral
        del sys.modules["titan_mistral"]


@pytest.mark.parametrize("window", [None, 8])
def test_its_logits_and_its_folder_are_those_of_transformers(
    mistral: Any, window: int | None, tmp_path: Path
):
    config = mistral(**mistral.flavors["tiny"], sliding_window=window)
    model = build(config, seq_len=32)
    model.init_weights(lambda name: torch.Generator().manual_seed(sum(map(ord, name))))
    state = {name: tensor.detach() for name, tensor in named_state(model)}
    export_hf(state, DecoderHF(config), {}, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    reader = read_hf(tmp_path / "hf", DecoderHF(config))
    assert all(torch.equal(reader.parameter(name), tensor) for name, tensor in state.items())


def test_what_its_table_does_not_have_is_refused(mistral: Any):
    config_json = DecoderHF(mistral(**mistral.flavors["tiny"])).config_json()
    assert mistral(**mistral.from_config_json(config_json)) == mistral(**mistral.flavors["tiny"]).explicit()
    with pytest.raises(EnvironmentProblem, match="attention_bias = True, which the model mistral does not"):
        mistral.from_config_json({**config_json, "attention_bias": True})
    with pytest.raises(KeyError, match="hidden_size"):
        mistral.from_config_json({"model_type": "mistral"})
