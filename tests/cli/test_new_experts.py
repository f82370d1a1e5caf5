"""`titan recipe new --from-hf` of models with experts: what it writes trains as it is."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Titan
from tests.cli.test_new_finetune import CHAT, TEMPLATE
from tests.generate.models import make_tokenizer
from tests.models.families import (
    DEEPSEEK,
    GLM4_MOE,
    GPT_OSS,
    LLAMA4,
    MIXTRAL,
    QWEN3,
    QWEN3_NEXT,
    Family,
)
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.folder import export_hf
from titancli.models.blocks.state import named_state
from titancli.registry.component import build

SMALL = ("training.steps=1", "training.global_batch_size=1", "training.seq_len=64")
WITH_EXPERTS = [
    (QWEN3, "experts"),
    (QWEN3_NEXT, "as released"),
    (GPT_OSS, "as released"),
    (LLAMA4, "iRoPE"),
    (DEEPSEEK, "V2"),
    (DEEPSEEK, "V3"),
    (MIXTRAL, "as released"),
    (GLM4_MOE, next(iter(GLM4_MOE.variants))),
]


def folder_of(family: Family, variant: str, folder: Path) -> Path:
    """A folder of the family with a tokenizer and a chat template, as one of the Hub."""
    tokenizer = make_tokenizer(folder.parent / "tokenizer")
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    model = family.variant(variant, vocab_size=300, max_seq_len=128)
    made = build(model, seq_len=128)
    made.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
    files = {path.name: path for path in tokenizer.iterdir()}
    export_hf(dict(named_state(made)), hf_form(model), files, folder)
    return folder


@pytest.mark.parametrize("adapters", [None, "lora", "qlora"])
@pytest.mark.parametrize(("family", "variant"), WITH_EXPERTS, ids=lambda one: getattr(one, "name", one))
def test_experts_train_as_written(
    titan: Titan, tmp_path: Path, family: Family, variant: str, adapters: str | None
) -> None:
    folder_of(family, variant, tmp_path / "hf")
    Path("chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    data = [f"--{adapters}", "chats.jsonl"] if adapters else ["--sft", "chats.jsonl"]
    done = titan("recipe", "new", "mine.toml", "--from-hf", "hf", *data)
    assert done.code == 0, done.err
    done = titan("train", "mine.toml", "--unset", "training.epochs", *SMALL, "--run-dir", "run")
    assert done.code == 0, done.err
    assert Path("run/checkpoints/step-1").is_dir()
    made = tomllib.loads(Path("mine.toml").read_text())
    assert ("converters" in made) is (adapters is not None)
