"""titan-gguf: names, tokens and templates of others are in the file as they are, read with gguf's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_cases import files_of, model_of, trained, weights, write

pytest.importorskip("gguf")
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer

from tests.security.writers import HOSTILE, UTF8, Writer, check_comments, check_rows
from titan_gguf.newfile import refuse_file
from titan_gguf.tokens import vocabulary
from titancli.errors import EnvironmentProblem, UsageError

WRITERS = [
    Writer("GGUF", "titan_gguf.tokens:Vocabulary", "titan_gguf.tokens titan_gguf.export"),
    Writer("name of a GGUF file", "titan_gguf.newfile:refuse_file", "titan_gguf.newfile"),
]
OWN = {"titan_gguf.verify titan_gguf.llamacpp": "JSON in ASCII for a child process, and numbers"}
ROWS = 330
KEY = "tokenizer.chat_template"


def test_what_writes_has_a_row() -> None:
    check_rows("titan_gguf", WRITERS, OWN)
    check_comments("titan_gguf", {})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained(("GPT-2's",), size=300)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(*weights("llama3", "grouped", vocab_size=ROWS))


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_file_says_the_same(text: str, tokenizer: Tokenizer, model: Any, tmp_path: Path) -> None:
    own = Tokenizer.from_str(tokenizer.to_str())
    if text in UTF8 and text:
        own.add_tokens([AddedToken(text, special=True, normalized=False)])
    files = files_of(own, chat_template=text, eos_token=text)
    if text not in UTF8:
        with pytest.raises(EnvironmentProblem, match=r"tokenizer_config.json: the chat template .*surrogate"):
            vocabulary(files, ROWS, [])
        return
    words = vocabulary(files, ROWS, [])
    write(model, tmp_path / "m.gguf", words)
    found = fields(tmp_path / "m.gguf")
    assert found["general.name"] == "m" and found.get(KEY, "") == text
    tokens = found["tokenizer.ggml.tokens"]
    assert tokens == words.tokens and len(tokens) == ROWS
    if text:
        assert tokens[found["tokenizer.ggml.eos_token_id"]] == text
    plain = vocabulary(files_of(own, chat_template="plain", eos_token=text), ROWS, [])
    write(model, tmp_path / "plain.gguf", plain)
    assert found.keys() | {KEY} == fields(tmp_path / "plain.gguf").keys()


@pytest.mark.parametrize("text", UTF8[:-1])
def test_templates_keep_their_names(text: str, tokenizer: Tokenizer, model: Any, tmp_path: Path) -> None:
    """In their order, with characters that GGUF's keys allow; a changed name is reported."""
    several = [("default", text), (text, "a"), ("tools", text), ("rag", "b")]
    listed = [{"name": name, "template": template} for name, template in several]
    told: list[str] = []
    words = vocabulary(files_of(tokenizer, chat_template=listed), ROWS, [], say=told.append)
    known = words.templates[1]["name"]  # type: ignore[index]
    assert known.replace("_", "a").isalnum() and known.isascii() and len(known) == len(text)
    assert (known == text) == (told == [])
    assert told == [] or repr(text) in told[0]
    write(model, tmp_path / "m.gguf", words)
    found = fields(tmp_path / "m.gguf")
    assert found.get(KEY) == text
    assert found[f"{KEY}s"] == [known, "tools", "rag"]
    assert {key: value for key, value in found.items() if key.startswith(f"{KEY}.")} == {
        f"{KEY}.{known}": "a",
        f"{KEY}.tools": text,
        f"{KEY}.rag": "b",
    }


@pytest.mark.parametrize(
    "template",
    [
        5,
        {"a": "b"},
        ["x"],
        [{"name": "x"}],
        [{"name": 5, "template": 6}],
        [{"name": "", "template": "x"}],
        [{"name": "x", "template": ""}],
    ],
    ids=str,
)
def test_templates_of_other_types(template: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(EnvironmentProblem, match=r"tokenizer_config\.json: chat_template is neither"):
        vocabulary(files_of(tokenizer, chat_template=template), ROWS, [])


def test_two_templates_of_one_name(tokenizer: Tokenizer) -> None:
    several = [{"name": name, "template": "x"} for name in ("a-b", "a_b")]
    with pytest.raises(EnvironmentProblem, match="two chat templates would have the name 'a_b'"):
        vocabulary(files_of(tokenizer, chat_template=several), ROWS, [])


def test_a_template_that_is_not_text(tokenizer: Tokenizer) -> None:
    files = files_of(tokenizer) | {"chat_template.jinja": b"caf\xe9"}
    with pytest.raises(EnvironmentProblem, match=r"chat_template\.jinja is damaged"):
        vocabulary(files, ROWS, [])


@pytest.mark.parametrize("text", HOSTILE)
def test_a_model_is_named_as_its_file(text: str, model: Any, tmp_path: Path) -> None:
    file = tmp_path / f"{text.replace('/', '').replace(chr(0), '') or 'x'}.gguf"
    if text not in UTF8:
        with pytest.raises(UsageError, match="is not valid UTF-8"):
            refuse_file(file)
        return
    write(model, file)
    assert fields(file)["general.name"] == file.stem
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
