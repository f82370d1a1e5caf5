"""Tokenizers as metadata, with llama.cpp's tokens where it is installed; what it has not is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, TokenType
from gguf_cases import PYTHON, few_rows, files_of, model_of, sentencepieces, there, trained, weights, write
from tokenizers import processors

from titan_gguf.tokens import KNOWN, WHOLE_TOKENS, vocabulary
from titan_gguf.verify import TEXTS, run_llamacpp, texts_for
from titancli.data.byte_tokenizer import ByteTokenizer
from titancli.errors import EnvironmentProblem, UsageError
from titancli.models import Llama3

NAMES = sorted(KNOWN.items(), key=lambda one: one[1])


def changed(files: dict[str, bytes], **parts: Any) -> dict[str, bytes]:
    data = json.loads(files["tokenizer.json"])
    for key, value in parts.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            data[key] |= value
        else:
            data[key] = value
    return files | {"tokenizer.json": json.dumps(data).encode()}


@pytest.mark.parametrize("rules, name", NAMES, ids=[name for _, name in NAMES])
def test_the_pre_tokenizer_is_found_by_its_expressions(rules: tuple[str, ...], name: str) -> None:
    files = files_of(trained(rules, size=300))
    assert vocabulary(files, 320, []).pre == name
    merged = changed(files, model={"ignore_merges": True})
    assert vocabulary(merged, 320, []).pre == WHOLE_TOKENS.get(name, name)


@pytest.mark.parametrize(
    "parts, what",
    [
        ({"pre_tokenizer": None}, "no pre-tokenizer"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]}}, "Whitespace"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}}, "a space"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer ['Lowercase']"),
    ],
)
def test_what_is_not_known_to_split_as_llama_cpp_is_refused(parts: dict[str, Any], what: str) -> None:
    files = changed(files_of(trained(("GPT-2's",), size=300)), **parts)
    with pytest.raises(UsageError) as caught:
        vocabulary(files, 320, [])
    assert what in str(caught.value) and "--pre NAME" in str(caught.value.hint)
    assert vocabulary(files, 320, [], pre="falcon").pre == "falcon"


def test_tokens_that_no_merges_make_are_refused_where_llama_cpp_always_merges() -> None:
    rules = next(rules for rules, name in KNOWN.items() if name == "qwen2")
    files = files_of(trained(rules, size=300))
    data = json.loads(files["tokenizer.json"])
    data["model"]["vocab"]["zebra"] = len(data["model"]["vocab"]) + 5
    data["model"]["ignore_merges"] = True
    with pytest.raises(UsageError, match="tokens that no merges make"):
        vocabulary(files | {"tokenizer.json": json.dumps(data).encode()}, 320, [])


def test_kinds_ids_and_templates() -> None:
    tokenizer = trained(("GPT-2's",), size=300)
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", end)]
    )
    tokenizer.enable_padding(length=8)  # of a tokenizer.json that was saved so, and not of its texts
    files = files_of(
        tokenizer, bos_token="<|end|>", eos_token={"content": "<|end|>"}, chat_template="{{ a }}"
    )
    made = vocabulary(files, 310, [7, end])
    assert made.ids == {"bos": end, "eos": end, "eot": 7}
    assert made.adds == {"bos": True, "eos": False}
    assert made.templates == "{{ a }}"
    assert made.kinds[end] == TokenType.CONTROL
    assert made.kinds[tokenizer.token_to_id("<think>")] == TokenType.USER_DEFINED
    assert made.tokens[309] == "[PAD309]" and made.kinds[309] == TokenType.UNUSED
    assert made.merges[0].count(" ") == 1
    own = vocabulary(files | {"chat_template.jinja": b"{{ b }}"}, 310, [], eos=3, bos=4)
    assert own.templates == "{{ b }}" and own.ids["eos"] == 3 and own.ids["bos"] == 4
    several = [{"name": "default", "template": "x"}, {"name": "tools", "template": "y"}]
    assert vocabulary(files_of(tokenizer, chat_template=several), 310, []).templates == several


def test_a_file_has_what_the_vocabulary_says(tmp_path: Path) -> None:
    config, state = weights("llama3", "grouped", vocab_size=310)
    files = files_of(trained(("GPT-2's",), size=300), eos_token="<|end|>", chat_template="{{ messages }}")
    model = model_of(config, state)
    write(model, tmp_path / "m.gguf", vocabulary(files, model.rows, []))
    reader = GGUFReader(tmp_path / "m.gguf")

    def value(key: str) -> Any:
        field = reader.get_field(f"tokenizer.{key}")
        return None if field is None else field.contents()

    assert value("ggml.model") == "gpt2" and value("ggml.pre") == "gpt-2"
    assert len(value("ggml.tokens")) == len(value("ggml.token_type")) == 310
    assert value("ggml.tokens")[value("ggml.eos_token_id")] == "<|end|>"
    assert value("chat_template") == "{{ messages }}"
    assert value("ggml.add_bos_token") is False


def test_a_tokenizer_that_is_too_large_or_of_another_kind_is_refused() -> None:
    files = files_of(trained(("GPT-2's",), size=300))
    with pytest.raises(EnvironmentProblem, match="but the model has 280 tokens"):
        vocabulary(files, 280, [])
    said: list[str] = []
    size = len(json.loads(files["tokenizer.json"])["model"]["vocab"])
    vocabulary(files, size, [], say=said.append)
    assert said == ["left out, since the model has no row for them: <think>"]
    with pytest.raises(UsageError, match="no tokenizer 'Unigram'"):
        vocabulary(changed(files, model={"type": "Unigram"}), 320, [])
    with pytest.raises(EnvironmentProblem, match=r"tokenizer\.json is damaged"):
        vocabulary({"tokenizer.json": b"{"}, 320, [])
    with pytest.raises(EnvironmentProblem, match=r"tokenizer\.json is damaged"):
        vocabulary({"tokenizer.json": b"[" * 100_000}, 320, [])
    with pytest.raises(EnvironmentProblem, match=r"tokenizer\.json is damaged"):
        vocabulary(changed(files, model={"vocab": "x"}), 320, [])
    with pytest.raises(EnvironmentProblem, match="byte has 257 tokens, but the model has 128"):
        vocabulary({}, 128, [])


@pytest.mark.parametrize("prefixed", [False, True])
def test_sentencepiece_has_scores_in_the_order_of_its_merges(prefixed: bool) -> None:
    tokenizer = sentencepieces(prefixed=prefixed)
    made = vocabulary(files_of(tokenizer, bos_token="<bos>", unk_token="<unk>"), 500, [2])
    data = json.loads(tokenizer.to_str())
    first = "".join(data["model"]["merges"][0])
    last = "".join(data["model"]["merges"][-1])
    assert made.model == "llama" and made.space_prefix is prefixed
    assert made.scores[made.tokens.index(first)] > made.scores[made.tokens.index(last)]
    assert made.kinds[:4] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE]
    assert made.ids == {"bos": 1, "unk": 0, "eos": 2}
    with pytest.raises(UsageError, match="does not compute Lowercase"):
        vocabulary(changed(files_of(tokenizer), normalizer={"type": "Lowercase"}), 500, [])


@pytest.mark.llamacpp
@there
@pytest.mark.parametrize(
    "kind", ["byte", "sentencepiece", "sentencepiece, prefixed", *sorted(KNOWN.values())]
)
def test_llama_cpp_has_the_same_tokens(kind: str, tmp_path: Path) -> None:
    tokenizer: Any
    if kind == "byte":
        tokenizer, files = ByteTokenizer(), {}
        texts = {text: tokenizer.encode(text) for text in TEXTS}
    else:
        rules = {name: rules for rules, name in KNOWN.items()}.get(kind, ())
        tokenizer = trained(rules) if rules else sentencepieces(prefixed="prefixed" in kind)
        tokenizer.encode_special_tokens = True
        files = files_of(tokenizer, unk_token="<unk>")
        texts = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS}
    small = Llama3(dim=64, n_layers=1, n_heads=2, hidden_dim=96, vocab_size=500)
    config, state = few_rows(small, 500)
    model = model_of(config, state)
    write(model, tmp_path / "m.gguf", vocabulary(files, model.rows, []))
    found = run_llamacpp(PYTHON, tmp_path / "m.gguf", [1, 2], list(texts))
    other = [text for text, ids in zip(texts, found["texts"], strict=True) if ids != texts[text]]
    assert other == [text for text in TEXTS if text not in texts_for(kind)]
