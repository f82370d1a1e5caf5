"""Documents begin with BOS where transformers begins a text with it, wherever text is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.cli.conftest import Titan, titan  # noqa: F401 - a fixture
from tests.data.helpers import global_rows, make
from titancli.data import Chat, FillInTheMiddle, HFTokenizer, JsonLines, TextFiles, TokenShards
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols.batch import IGNORE
from titancli.registry.component import build

TEXTS = ["the end of a document", "def f(self): return it", "", "of <|begin|> it"]
# transformers 5 lets tokenizer.json decide, and not the add_bos_token of tokenizer_config.json.
CASES: dict[str, tuple[bool, dict[str, Any], bool]] = {
    "the post-processor": (True, {}, True),
    "nothing": (False, {}, False),
    "the config": (False, {"add_bos_token": True}, False),
    "the config against the post-processor": (True, {"add_bos_token": False}, True),
}
pytestmark = pytest.mark.usefixtures("cache")


def folder_of(bpe_folder: Path, folder: Path, processed: bool, config: dict[str, Any]) -> Path:
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if processed:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    kept = json.loads((bpe_folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**kept, **config}))
    return folder


def corpus(folder: Path) -> Path:
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    (folder.parent / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def tokens_of(config: Any, tokenizer: Any) -> list[int]:
    """Every token of an epoch once, in order."""
    found: list[int] = []
    for batch in make(config, tokenizer=tokenizer, seq_len=4, rows=1):
        [row] = batch["targets"].tolist()
        found += batch["tokens"][0].tolist()[:1] if not found else []
        found += [token for token in row if token != IGNORE]
    return found


@pytest.mark.parametrize("name", CASES)
def test_documents_are_token_for_token_what_transformers_makes_of_them(
    tmp_path: Path, bpe_folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    processed, config, adds = CASES[name]
    folder = folder_of(bpe_folder, tmp_path / "t", processed, config)
    tokenizer, theirs = build(HFTokenizer(path=folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.adds_bos is adds
    plain = [text.replace("<|begin|>", "") for text in TEXTS]  # its name in a text is text here
    texts = [text for text in plain if text]
    expected = [id for text in texts for id in [*theirs(text)["input_ids"], tokenizer.eos_id]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in plain))
    config_of: Any = {"paths": [tmp_path / "rows.jsonl"], "shuffle": False, "repeat": False}
    with caplog.at_level(logging.INFO):
        assert tokens_of(JsonLines(**config_of), tokenizer) == expected
    begin = f"with BOS ({tokenizer.bos_id})" if adds else "without BOS"
    assert f"documents begin {begin} and have the end marker ({tokenizer.eos_id}) after them" in caplog.text
    assert tokens_of(JsonLines(**config_of, cache_tokens=True), tokenizer) == expected
    for add_bos in (True, False):
        bos = [tokenizer.bos_id] * add_bos
        ids = [id for text in texts for id in [*bos, *tokenizer.encode(text), tokenizer.eos_id]]
        for cache_tokens in (True, False):
            data = JsonLines(**config_of, add_bos=add_bos, cache_tokens=cache_tokens)
            assert tokens_of(data, tokenizer) == ids
    without = JsonLines(**config_of, add_eos=False)
    assert tokens_of(without, tokenizer) == [id for id in expected if id != tokenizer.eos_id]


def test_packed_documents_begin_with_bos_and_masks_begin_there(tmp_path: Path, bpe_folder: Path) -> None:
    tokenizer = build(HFTokenizer(path=folder_of(bpe_folder, tmp_path / "t", True, {})))
    config: Any = {
        "paths": [corpus(tmp_path / "c")],
        "shuffle": False,
        "repeat": False,
        "document_mask": True,
    }
    for packing in ("stream", "best_fit"):
        data = make(TextFiles(**config, packing=packing), tokenizer=tokenizer, seq_len=31, rows=1)
        [batch] = list(data)
        starts = (batch["positions"][0] == 0).nonzero().flatten().tolist()
        first = [int(batch["tokens"][0, at]) for at in starts][:3]
        assert first == [tokenizer.bos_id] * 3


def test_a_resume_with_another_bos_is_refused_and_two_ranks_go_on_exactly(
    tmp_path: Path, bpe_folder: Path
) -> None:
    tokenizer = build(HFTokenizer(path=folder_of(bpe_folder, tmp_path / "t", True, {})))
    config = TextFiles(paths=[corpus(tmp_path / "c")])
    options: Any = {"tokenizer": tokenizer, "seq_len": 3}
    alone, _ = global_rows(config, 20, dp_size=1, rows=2, **options)
    first, state = global_rows(config, 5, dp_size=2, rows=2, **options)
    rest, _ = global_rows(config, 10, dp_size=1, rows=2, **options, state=state)
    assert first + rest == alone
    for other in ({"add_bos": False}, {"add_eos": False}):
        with pytest.raises(EnvironmentProblem, match=r"(bos|eos) was"):
            make(TextFiles(paths=config.paths, **other), **options).load_state_dict(state)


def test_bos_that_a_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"dataset\.add_bos: the tokenizer has no BOS token"):
        make(TextFiles(paths=[corpus(tmp_path / "c")], add_bos=True))


def test_shards_are_written_with_bos_and_shards_without_are_warned_of(
    titan: Titan,  # noqa: F811
    tmp_path: Path,
    bpe_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = folder_of(bpe_folder, tmp_path / "t", True, {})
    tokenizer = build(HFTokenizer(path=folder))
    texts = str(corpus(tmp_path / "c"))
    for name, flags in (("with", []), ("without", ["--no-bos"])):
        out = str(tmp_path / name)
        done = titan("data", "tokenize", texts, out, "--tokenizer", str(folder), "--workers", "1", *flags)
        assert done.code == 0 and ("documents begin with BOS" in done.err) == (name == "with")
        config = TokenShards(paths=[Path(out)], shuffle="off", repeat=False)
        found = tokens_of(config, tokenizer)
        assert (found[0] == tokenizer.bos_id) == (name == "with")
        assert ("begin without BOS" in caplog.text) == (name == "without")
    done = titan("data", "tokenize", texts, str(tmp_path / "with"), "--tokenizer", str(folder), "--no-bos")
    assert done.code == 5 and "bos_id was 0 and is None" in done.err


def test_the_text_of_a_conversation_begins_with_bos(tmp_path: Path, bpe_folder: Path) -> None:
    tokenizer = build(HFTokenizer(path=folder_of(bpe_folder, tmp_path / "t", True, {})))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": TEXTS[0]}))
    batch = next(iter(make(Chat(path=str(tmp_path / "rows.jsonl")), tokenizer=tokenizer, seq_len=64)))
    assert int(batch["tokens"][0, 0]) == tokenizer.bos_id


def test_bos_stays_first_where_a_middle_is_filled_in(tmp_path: Path, bpe_folder: Path) -> None:
    tokenizer = build(HFTokenizer(path=folder_of(bpe_folder, tmp_path / "t", True, {})))
    fim = FillInTheMiddle(rate=1.0, prefix="<|user|>", middle="<|late|>", suffix="<|end|>")
    kinds: Any = {"document_mask": True, "packing": "best_fit", "cache_tokens": True, "fim": fim}
    data = TextFiles(paths=[corpus(tmp_path / "c")], repeat=False, **kinds)
    [batch] = make(data, tokenizer=tokenizer, seq_len=64, rows=1)
    ids, starts = batch["tokens"][0], (batch["positions"][0] == 0).nonzero().flatten().tolist()[:3]
    assert [int(ids[at]) for at in starts] == [tokenizer.bos_id] * 3
    assert {int(ids[at + 1]) for at in starts} == {tokenizer.token_id("<|user|>")}
