"""The byte tokenizer, and Hugging Face ones trained on the spot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import make, stream
from titancli.data import ByteTokenizer, HFTokenizer, TextFiles
from titancli.data.packing import tokenizer_identity
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols import TokenizerDefaults
from titancli.registry.component import build

TEXT = "def f(self): return 'Ünïcödé 日本' # " * 4


@pytest.fixture
def folder(bpe_folder: Path, tmp_path: Path) -> Path:
    """A copy of the BPE tokenizer that a test may spoil."""
    return Path(shutil.copytree(bpe_folder, tmp_path / "tokenizer"))


def test_bytes_round_trip_and_stay_below_the_vocabulary() -> None:
    tokenizer = build(ByteTokenizer())
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == TEXT
    assert tokenizer.encode_batch([TEXT, ""]) == [ids, []]
    assert [a.tolist() for a in tokenizer.encode_arrays([TEXT, ""])] == [ids, []]
    assert max(ids) < tokenizer.eos_id < tokenizer.vocab_size == 257
    assert tokenizer.encode("\ud800") == [ord("?")]
    assert tokenizer.files == {}


def test_hf_round_trips_whole_texts_without_truncation_padding_or_special_tokens(bpe_folder: Path) -> None:
    tokenizer = build(HFTokenizer(path=bpe_folder))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode_batch([TEXT, "a", ""])[0] == ids
    assert [len(i) for i in tokenizer.encode_batch(["a", ""])] == [1, 0]
    arrays = tokenizer.encode_arrays([TEXT])
    assert arrays[0].dtype == np.int32 and arrays[0].tolist() == ids


def test_hf_vocabulary_reaches_to_the_last_added_token(bpe_folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = build(HFTokenizer(path=bpe_folder))
    late = Tokenizer.from_file(str(bpe_folder / "tokenizer.json")).token_to_id("<|late|>")
    assert tokenizer.vocab_size == late + 1


def test_a_special_tokens_name_in_a_document_is_plain_text(bpe_folder: Path) -> None:
    tokenizer = build(HFTokenizer(path=bpe_folder))
    for text in ("a <|end|> b", "<|begin|><|late|>"):
        ids = tokenizer.encode(text)
        assert not {0, 1, 2, tokenizer.vocab_size - 1} & set(ids)
        assert ids == tokenizer.encode_batch([text])[0] == tokenizer.encode_arrays([text])[0].tolist()
        assert tokenizer.decode(ids) == text


def test_hf_end_marker_comes_from_the_recipe_or_any_of_the_folders_files(folder: Path) -> None:
    assert build(HFTokenizer(path=folder)).eos_id == 1
    assert build(HFTokenizer(path=folder)).bos_id == 0
    assert build(HFTokenizer(path=folder, eos="<|user|>")).eos_id == 2
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(RecipeError, match=r"no file in .* defines the token that ends a text") as error:
        build(HFTokenizer(path=folder))
    assert "tokenizer.eos" in (error.value.hint or "")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    assert build(HFTokenizer(path=folder)).eos_id == 2
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|late|>"}))
    assert build(HFTokenizer(path=folder)).eos_id == build(HFTokenizer(path=folder)).vocab_size - 1
    assert build(HFTokenizer(path=folder)).bos_id is None
    with pytest.raises(RecipeError, match=r"'<\|no\|>' is not a token of"):
        build(HFTokenizer(path=folder, eos="<|no|>"))


def test_hf_packs_documents_like_any_tokenizer(bpe_folder: Path, corpus: Path) -> None:
    tokenizer = build(HFTokenizer(path=bpe_folder))
    paths = [corpus / "1.txt", corpus / "deep" / "er" / "code.md"]
    dataset = make(TextFiles(paths=paths, shuffle=False), tokenizer=tokenizer, rows=1)
    tokens = stream([path.read_text() for path in paths], tokenizer)
    assert next(iter(dataset))["tokens"][0].tolist() == tokens[:16]


def test_chat_uses_the_folders_template(bpe_folder: Path) -> None:
    tokenizer = build(HFTokenizer(path=bpe_folder))
    ids = tokenizer.chat([{"role": "user", "content": "def f"}])
    assert ids == [2, *tokenizer.encode("def f"), 1]


def test_chat_without_a_template_says_so(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    with pytest.raises(RecipeError, match=f"{folder} has no chat template"):
        build(HFTokenizer(path=folder)).chat([{"role": "user", "content": "hi"}])


def test_export_files_are_those_of_the_folder(bpe_folder: Path) -> None:
    files = build(HFTokenizer(path=bpe_folder)).files
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert all(Path(path).is_file() for path in files.values())


def test_identity_tells_tokenizers_apart(folder: Path) -> None:
    class Own(TokenizerDefaults):
        vocab_size, eos_id = 5, 4

        def __init__(self) -> None:
            self.files = {"words.txt": folder / "tokenizer_config.json"}

    before = tokenizer_identity(build(HFTokenizer(path=folder))), tokenizer_identity(Own())
    assert before == (tokenizer_identity(build(HFTokenizer(path=folder))), tokenizer_identity(Own()))
    assert tokenizer_identity(build(HFTokenizer(path=folder, eos="<|late|>"))) != before[0]
    (folder / "tokenizer_config.json").write_text("{}")
    assert tokenizer_identity(Own()) != before[1]


def test_bad_folders_are_named_with_a_way_out(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    sentencepiece = tmp_path / "sentencepiece"
    sentencepiece.mkdir()
    (sentencepiece / "tokenizer.model").write_text("x")
    for path, said, hint in (
        (tmp_path / "gone", "gone does not exist", "titan download"),
        (empty, r"empty has no tokenizer\.json \(it has nothing at all\)", "titan download"),
        (sentencepiece, r"no tokenizer\.json \(it has tokenizer\.model\)", "AutoTokenizer"),
        (folder / "tokenizer.json", "is not a folder", "the folder that contains it"),
    ):
        with pytest.raises(EnvironmentProblem, match=said) as error:
            build(HFTokenizer(path=path))
        assert hint in (error.value.hint or "")
    (folder / "tokenizer.json").write_text("{]")
    with pytest.raises(EnvironmentProblem, match=r"tokenizer\.json cannot be read as a tokenizer"):
        build(HFTokenizer(path=folder))


def test_only_chat_needs_transformers(bpe_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from titancli.data import HFTokenizer;"
        "from titancli.registry.component import build;"
        f"build(HFTokenizer(path=Path({str(bpe_folder)!r}))).encode('x');"
        "sys.exit(1 if {'transformers', 'datasets', 'torch'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_good_tokenizer_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titancli.data import trial

    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    started, run = [], trial.subprocess.run

    def counted(*given: Any, **named: Any) -> Any:
        started.append(given)
        return run(*given, **named)

    monkeypatch.setattr(trial.subprocess, "run", counted)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    assert trial.try_tokenizer(path) == trial.try_tokenizer(path)
    assert len(started) == 1
    path.write_text(path.read_text().replace('"a"', '"b"'))
    trial.try_tokenizer(path)
    assert len(started) == 2
