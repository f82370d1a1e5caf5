"""A small corpus, and a small BPE tokenizer trained on the spot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from titancli.observe.metrics import collector

END = {"__type": "AddedToken", "content": "<|end|>", "special": True}
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"


@pytest.fixture(autouse=True)
def nothing_reported() -> Iterator[None]:
    """No count is left from other tests, or for them."""
    collector.drain()
    yield
    collector.drain()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is kept between runs is kept here."""
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Nine documents: short, long, empty, and of several alphabets."""
    folder = tmp_path / "corpus"
    (folder / "deep" / "er").mkdir(parents=True)
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"document {i} " * (3 * i + 1))
    (folder / "deep" / "empty.txt").write_text("")
    (folder / "deep" / "greek.txt").write_text("μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος")
    (folder / "deep" / "er" / "code.md").write_text("def f():\n    return '<|end|>'\n" * 5)
    return folder


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.json (byte-level BPE of 300 tokens, and special ones) and its config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>", "<|user|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def function(self): return document the end of it " * 20], trainer)
    tokenizer.add_special_tokens(["<|late|>"])
    tokenizer.enable_truncation(7)  # what a tokenizer.json may ask for, and a pretraining corpus must not get
    tokenizer.enable_padding(length=16)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": END, "bos_token": "<|begin|>", "chat_template": TEMPLATE})
    )
    return folder
