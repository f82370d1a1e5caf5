"""Small models and tokenizers as GGUF files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs the gguf package: pip install ./plugins/titan-gguf")
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from tests.models.families import FAMILIES
from titan_gguf.export import Model, write_model
from titan_gguf.tokens import DIGIT, GPT2, Vocabulary, vocabulary
from titancli.checkpoint.format.tensors import MemoryTensors
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.models.blocks.state import named_state

PYTHON = os.environ.get("TITAN_LLAMACPP", "")
there = pytest.mark.skipif(
    not PYTHON, reason="needs llama.cpp: TITAN_LLAMACPP=PYTHON, one in which llama-cpp-python is installed"
)
WRITTEN = {"llama3", "qwen3", "gpt_oss", "mixtral", "olmo3", "gemma3", "granite"}
REFUSED = {
    ("qwen3", "experts, not renormalised"): "norm_topk_prob = false",
    ("qwen3", "YaRN, experts"): "attention_factor of YaRN",
    ("gpt_oss", "clamped much"): "swiglu_alpha, swiglu_limit = (3.0, 0.5)",
    ("gpt_oss", "balanced, tied"): "tie_word_embeddings = true",
    ("mixtral", "window, head_dim"): "sliding_window = 16",
    ("olmo3", "tied, head_dim"): "tie_word_embeddings = true",
    ("gemma3", "stretched"): "query_pre_attn_scalar = 40, where it takes 24",
}
"""Variants that llama.cpp does not compute, with what is said."""
CASES = [(family.name, name) for family in FAMILIES if family.name in WRITTEN for name in family.variants]
WORKING = [case for case in CASES if case not in REFUSED]
TEXT = (
    "It's the 21st of 12/2024, and I'll say: 3.14159 isn't 1,234,567 — you've been told!\n\n"
    "  naïve café, Ünïcode; Ελληνικά; русский; 你好世界; हिन्दी 🦙🙂\t"
    "def f(x_1):\r\n    return {'a': [x_1 ** 2]}\n"
)


def family(name: str, **changes: Any) -> Any:
    """Return a family of tests/models, with room for the 257 tokens of bytes, and the heads' usual scale."""
    found = next(one for one in FAMILIES if one.name == name)
    usual = {"query_pre_attn_scalar": 24} if name == "gemma3" else {}
    return dataclasses.replace(found, small={**found.small, "vocab_size": 300, **usual, **changes})


def weights(name: str, variant: str, **changes: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the config and the weights of a small model."""
    made = family(name, **changes)
    model = made.model(variant)
    return made.variant(variant), {key: value.detach().clone() for key, value in named_state(model)}


def model_of(config: Any, state: dict[str, Tensor], kind: str = "f32") -> Model:
    return Model(MemoryTensors(state), hf_form(config), kind)


def write(model: Model, file: Path, words: Vocabulary | None = None) -> None:
    write_model(
        file,
        model,
        words or vocabulary({}, model.rows, []),
        progress=lambda *_: None,
        say=lambda line: None,
    )


def splitter(rules: tuple[str, ...]) -> Any:
    """Make a pre-tokenizer of these rules, as `KNOWN` names them."""
    steps: list[Any] = []
    for rule in rules:
        if rule == DIGIT:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif rule != GPT2:
            steps.append(pre_tokenizers.Split(Regex(rule), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GPT2 in rules))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def trained(rules: tuple[str, ...], *, size: int = 400) -> Tokenizer:
    """Train a tokenizer of merged bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter(rules)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def sentencepieces(*, prefixed: bool) -> Tokenizer:
    """Make a tokenizer like those of Gemma (nothing before a text) and Llama 2 (a space before it)."""
    alphabet = sorted({char for char in TEXT.replace(" ", "▁") if char.isascii() or char == "▁"})
    steps = [normalizers.Replace(" ", "▁")]
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps]) if prefixed else steps[0]
    plain = Tokenizer(models.BPE())
    plain.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=150, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False
    )
    plain.train_from_iterator([TEXT.encode("ascii", "ignore").decode()] * 3, trainer)
    data = json.loads(plain.to_str())
    pieces = list(data["model"]["vocab"])
    tokens = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    data["model"] |= {
        "vocab": {token: id_ for id_, token in enumerate(tokens)},
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
    }
    made = Tokenizer.from_str(json.dumps(data))
    made.add_special_tokens(["<unk>", "<bos>", "<eos>"])
    made.encode_special_tokens = True
    return made


def files_of(tokenizer: Tokenizer, **config: Any) -> dict[str, bytes]:
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def few_rows(config: Any, rows: int) -> tuple[Any, dict[str, Tensor]]:
    """Return the config with this many tokens, and weights for it."""
    made = dataclasses.replace(config, vocab_size=rows)
    from titancli.registry.component import build

    model = build(made, seq_len=128)
    model.init_weights(lambda name: torch.Generator().manual_seed(sum(map(ord, name))))
    return made, {key: value.detach().clone() for key, value in named_state(model)}
