"""Text as it comes: whole characters, for every kind of tokenizer, and cut exactly at a stop text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from titancli.data.byte_tokenizer import ByteTokenizer
from titancli.rl.text import StopText, TextStream

TEXTS = [
    "Hello world, hello a b",
    "日本語のテキスト and ünïcödé 🦀🦀 done",
    "  two  spaces\n\nand\ttabs \n",
    "naïve 👩‍👩‍👧‍👦 family",
]


def byte_fallback() -> Tokenizer:
    """As Llama 2's: words begin with a space mark, and what has no token is spelt in bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for piece in [*"▁abcdefghijklmnopqrstuvwxyz,", "▁a", "▁h", "▁hello", "el", "lo"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("e", "l"), ("l", "o"), ("▁", "a"), ("▁", "h")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]  # type: ignore[list-item]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_level() -> Tokenizer:
    """As GPT-2's and Llama 3's: every byte is a character of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Wrapped:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


TOKENIZERS: dict[str, Any] = {
    "bytes": ByteTokenizer(),
    "byte-level": Wrapped(byte_level()),
    "byte-fallback": Wrapped(byte_fallback()),
}


def pieces(tokenizer: Any, ids: list[int], prompt: list[int]) -> list[str]:
    stream = TextStream(tokenizer.decode, prompt)
    return [*(stream.feed(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_make_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    for cut in range(len(ids)):
        if "\ufffd" in tokenizer.decode(ids[:cut]):
            continue  # a prompt does not end within a character
        found = pieces(tokenizer, ids[cut:], ids[:cut])
        assert tokenizer.decode(ids[:cut]) + "".join(found) == text
        assert not any("\ufffd" in piece for piece in found)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_text_comes_out_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids, [])) == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_bytes_that_make_no_character_are_marked_once_they_cannot(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(pieces(tokenizer, ids, [])) == tokenizer.decode(ids)


def test_a_character_is_shown_with_its_last_token() -> None:
    assert pieces(TOKENIZERS["bytes"], list("a日b".encode()), []) == ["a", "", "", "日", "b", ""]


def test_a_leading_space_of_a_completion_is_kept() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    prompt, whole = tokenizer.encode("hello"), tokenizer.encode("hello hello")
    assert "".join(pieces(tokenizer, whole[len(prompt) :], prompt)) == " hello"
    # from a prompt that is all bytes of one long character run, too
    prompt, whole = tokenizer.encode("日本"), tokenizer.encode("日本日")
    assert "".join(pieces(tokenizer, whole[len(prompt) :], prompt)) == "日"


# ------------------------------------------------------------------------------------------- stop texts


def stopped(chunks: list[str], stops: list[str]) -> tuple[list[str], bool]:
    cutter = StopText(stops)
    shown = []
    for chunk in chunks:
        text, found = cutter.feed(chunk)
        shown.append(text)
        if found:
            return shown, True
    return [*shown, cutter.flush()], False


def cut(text: str, stops: list[str]) -> str:
    """Text before the stop text that is complete first: the plainest way."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


LETTERS = st.text("ab\n", max_size=12)


@settings(max_examples=400, deadline=None)
@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_text_is_cut_exactly_however_it_comes(chunks: list[str], stops: list[str]) -> None:
    shown, found = stopped(chunks, stops)
    text = "".join(chunks)
    assert "".join(shown) == cut(text, stops)
    assert found == any(stop in text for stop in stops)


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    shown, found = stopped(["one\n", "two\n", "\nthree"], ["\n\n"])
    assert (shown, found) == (["one", "\ntwo", ""], True)
    assert stopped(["one\n", "two"], ["\n\n"]) == (["one", "\ntwo", ""], False)
    assert stopped(["one\n"], ["\n\n"]) == (["one", "\n"], False)
