"""`--verify` compares in rows longer than windows and chunks, so that a wrong one shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.families import GEMMA3, GPT_OSS, LLAMA4, MIXTRAL, OLMO3, QWEN3, Family
from titan_transformers import HFCausalLM
from titancli.checkpoint.format.tensors import MemoryTensors
from titancli.checkpoint.hf.compare import COMPARED, _lengths, verdict, verify_tokens
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.folder import export_hf
from titancli.models.blocks.state import named_state
from titancli.models.qwen3 import FactorYarn
from titancli.models.sections import Yarn

WINDOW = 90
"""More than a short row."""


def written(family: Family, variant: str, folder: Path, **changes: Any) -> Any:
    """Export a model of a family; return its config and tensors."""
    config = family.variant(variant, max_seq_len=512, **changes)
    model = family.model(variant)
    tensors = {name: tensor.detach() for name, tensor in named_state(model)}
    export_hf(tensors, hf_form(config), {}, folder)
    return config, MemoryTensors(tensors)


def good(config: Any, tensors: Any, folder: Path) -> bool:
    return verdict(config, tensors, folder, None, hf_form(config))[1]


@pytest.mark.parametrize(
    ("family", "variant", "changes", "key", "wrong"),
    [
        (MIXTRAL, "window, head_dim", {"sliding_window": WINDOW}, "sliding_window", WINDOW - 20),
        (OLMO3, next(iter(OLMO3.variants)), {"sliding_window": WINDOW}, "sliding_window", WINDOW + 30),
        (GEMMA3, next(iter(GEMMA3.variants)), {"sliding_window": WINDOW}, "sliding_window", WINDOW - 20),
        (LLAMA4, "chunks alone", {"fixed_attn_block_size": WINDOW}, "attention_chunk_size", WINDOW - 20),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_a_wrong_window_shows(
    tmp_path: Path, family: Family, variant: str, changes: dict[str, Any], key: str, wrong: int
) -> None:
    config, tensors = written(family, variant, tmp_path / "hf", **changes)
    assert good(config, tensors, tmp_path / "hf")
    file = tmp_path / "hf/config.json"
    keys = json.loads(file.read_text())
    assert keys[key] == WINDOW
    file.write_text(json.dumps({**keys, key: wrong}))
    assert not good(config, tensors, tmp_path / "hf")


def test_rows_are_longer_than_windows() -> None:
    def lengths(config: Any) -> tuple[tuple[int, ...], list[str]]:
        return tuple(verify_tokens(config).shape), _lengths(config)[1]

    def sizes(**more: Any) -> HFCausalLM:
        from tests.models.hf_configs import LLAMA

        keys = {**LLAMA, "model_type": "qwen2", "max_position_embeddings": 65536, **more}
        return HFCausalLM(config={key: "null" if value is None else value for key, value in keys.items()})

    assert lengths(QWEN3.variant("grouped")) == ((2, COMPARED), [])
    yarn = QWEN3.variant("grouped", rope_scaling=FactorYarn(factor=4.0, original_max_position=700))
    assert lengths(yarn) == ((1, 700 + COMPARED), [])
    far = GPT_OSS.variant(
        "as released", max_seq_len=131072, yarn=Yarn(factor=32.0, original_max_position=8192)
    )
    assert lengths(far) == ((1, 16 + COMPARED), ["original_max_position_embeddings = 8,192"])
    assert lengths(MIXTRAL.variant("as released", sliding_window=4096, max_seq_len=4096)) == ((2, 64), [])
    unused = sizes(use_sliding_window=False, sliding_window=4096)
    assert lengths(unused) == ((2, COMPARED), [])
    assert lengths(sizes(use_sliding_window=True, sliding_window=4096))[0] == (1, 4096 + COMPARED)
    assert torch.equal(verify_tokens(yarn), verify_tokens(yarn))
