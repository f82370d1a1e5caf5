"""A tokenizer with added tokens: `recipe new` proposes, and errors name, that the vocabulary grows."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from tests.cli.conftest import Titan
from tests.cli.test_new_finetune import CHAT, SMALL, TEMPLATE
from tests.cli.test_new_recipe import LLAMA
from tests.generate.models import make_tokenizer
from titancli.checkpoint import CheckpointReader
from titancli.data.hf_tokenizer import HFTokenizer
from titancli.errors import EnvironmentProblem
from titancli.recipe import load_recipe
from titancli.recipe.vocabulary import ids_in

ADDED = ["<|think|>", "<|/think|>", "<|tool|>"]
FEW = (*SMALL, "training.global_batch_size=2", "training.seq_len=64", "checkpoint.interval=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose tokenizer has three tokens that its embedding lacks, as users make them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    there = make_tokenizer(tmp_path / "hf")
    config = json.loads((there / "tokenizer_config.json").read_text())
    (there / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    tokenizer = Tokenizer.from_file(str(there / "tokenizer.json"))
    keys = {key: value for key, value in LLAMA.items() if key != "model_type"}
    rows = tokenizer.get_vocab_size()
    LlamaForCausalLM(LlamaConfig(**{**keys, "vocab_size": rows})).save_pretrained(there)
    tokenizer.add_special_tokens([AddedToken(token) for token in ADDED])
    tokenizer.save(str(there / "tokenizer.json"))
    (tmp_path / "chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 8)
    return there


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(checkpoint)
    return {name: reader.read(name).clone() for name in reader.names()}


@pytest.mark.parametrize("adapters", [[], ["--lora"]], ids=["all weights", "lora"])
def test_added_tokens_train_as_written(titan: Titan, folder: Path, adapters: list[str]) -> None:
    done = titan("recipe", "new", "mine.toml", "--from-hf", "hf", "--sft", "chats.jsonl", *adapters)
    assert done.code == 0, done.err
    ids = HFTokenizer(folder).vocab_size
    assert tomllib.loads(Path("mine.toml").read_text())["weights_vocab"] == "grow"
    assert load_recipe("mine.toml").recipe.model.vocab_size == ids
    options = ("--unset", "training.epochs", *FEW, "lr_scheduler.total_steps=4")
    done = titan("train", "mine.toml", *options, "--run-dir", "whole")
    assert done.code == 0, done.err
    assert f"from {ids - 3} to {ids} ids" in done.err
    assert ("no adapter trains the 3 new rows" in done.err) is bool(adapters)
    assert titan("train", "mine.toml", *options, "training.steps=1", "--run-dir", "parts").code == 0
    done = titan("train", "parts", "--resume", "training.steps=2")
    assert done.code == 0, done.err
    one, other = (tensors(Path(run) / "checkpoints/step-2") for run in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    done = titan("convert-checkpoint", "whole", "out", "--to", "hf", "--verify")
    assert done.code == 0, done.err
    assert json.loads(Path("out/config.json").read_text())["vocab_size"] == ids
    if adapters:
        done = titan("convert-checkpoint", "whole", "peft", "--to", "peft")
        assert done.code == 2
        assert "peft would not find the new rows" in done.err


def test_the_refusal_can_be_pasted(titan: Titan, folder: Path) -> None:
    assert titan("recipe", "new", "mine.toml", "--from-hf", "hf", "--sft", "chats.jsonl").code == 0
    text = Path("mine.toml").read_text()
    Path("mine.toml").write_text(re.sub(r"weights_vocab.*\n", "", text))
    options = ("--unset", "training.epochs", *FEW, "training.steps=1")
    done = titan("train", "mine.toml", *options, "--run-dir", "refused")
    assert done.code == 5
    pasted = re.search(r"set (weights_vocab=grow) (model.vocab_size=\d+)", done.err)
    assert pasted is not None
    assert titan("train", "mine.toml", *options, *pasted.groups(), "--run-dir", "run").code == 0
    done = titan("train", "mine.toml", *options, pasted[2], "--run-dir", "other")
    assert done.code == 3
    assert 'set weights_vocab = "grow" to add rows, or in [model]: vocab_size' in done.err
    even = (pasted[1], "model.vocab_size=320")  # a multiple for tensor parallelism is the user's choice
    assert titan("train", "mine.toml", *options, *even, "--run-dir", "even").code == 0


def test_checkpoints_do_not_grow(titan: Titan, folder: Path) -> None:
    assert titan("convert-checkpoint", "hf", "base", "--to", "titan").code == 0
    assert titan("recipe", "new", "mine.toml", "--from-hf", "hf", "--sft", "chats.jsonl").code == 0
    options = ("--unset", "training.epochs", *FEW, "training.steps=1", "--run-dir", "run")
    more = load_recipe("mine.toml").data["model"]
    keys = [f"model.{key}={json.dumps(value)}" for key, value in more.items()]
    done = titan("train", "mine.toml", *options, *keys, "weights=base")
    assert done.code == 3
    assert "the vocabulary of a checkpoint cannot grow" in done.err
    assert titan("convert-checkpoint", "base", "OUT", "--to", "hf").code == 0
    assert titan("train", "mine.toml", *options, *keys, "weights=OUT").code == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("tokenizer.path=nowhere",), "tokenizer.json cannot be read"),
        (("tokenizer.path=hf://owner/name",), "set model.vocab_size"),
        (("checkpoint.initial_load_model_only=false",), "only initial weights of a Hugging Face folder"),
        (("weights_vocab=shrink",), "weights_vocab"),
    ],
)
def test_growth_without_a_size(titan: Titan, folder: Path, overrides: tuple[str, ...], words: str) -> None:
    assert titan("recipe", "new", "mine.toml", "--from-hf", "hf", "--sft", "chats.jsonl").code == 0
    done = titan("validate", "mine.toml", *overrides)
    assert done.code == 3
    assert words in done.err + done.out


def test_ids_are_those_of_the_tokenizer(tmp_path: Path, folder: Path) -> None:
    assert ids_in(folder) == HFTokenizer(folder).vocab_size
    unigram: dict[str, Any] = {"model": {"vocab": [["a", 0.0], ["b", 0.0]]}, "added_tokens": [{"id": 7}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert ids_in(tmp_path) == 8
    for text in ("[" * 100_000, "{}", '{"model": {"vocab": {"a": "x"}}}', '{"model": {"vocab": []}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(EnvironmentProblem, match="is damaged"):
            ids_in(tmp_path)
