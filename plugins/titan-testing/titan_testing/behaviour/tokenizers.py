"""Tokenizers: ids within the vocabulary, text that survives a round trip, and consistent batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan_testing.behaviour.subject import Check, Subject
from titancli.errors import TitanError

TEXTS = ["", "a", "The end.", "def f(x):\n    return x + 1\n", "naïve Ἀχιλῆος 東京 🙂", "  two  spaces \t"]
TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "5."},
]


def ids(subject: Subject) -> Iterator[str]:
    """Check that all ids, including the end marker, are below vocab_size, and that no text yields an end
    marker."""
    tokenizer = subject.build()
    size, end = tokenizer.vocab_size, tokenizer.eos_id
    if not 0 <= end < size:
        yield f"eos_id is {end}, but vocab_size is {size}"
    for text in TEXTS:
        found = tokenizer.encode(text)
        if wrong := [i for i in found if type(i) is not int or not 0 <= i < size]:
            yield f"encode({text!r}) gives {wrong[0]!r}: ids are integers below vocab_size, {size}"
        if end in found:
            yield f"encode({text!r}) contains eos_id: a text would end in the middle"
    if tokenizer.encode(""):
        yield f"encode('') gives {tokenizer.encode('')}: it must not add special tokens"


def round_trip(subject: Subject) -> Iterator[str]:
    """Check that decoded text survives a round trip, and that the end marker is dropped."""
    tokenizer = subject.build()
    for text in TEXTS:
        once = tokenizer.decode(tokenizer.encode(text))
        if not isinstance(once, str) or (text.isascii() and text.strip() and not once.strip()):
            yield f"decode(encode({text!r})) is {once!r}"
            continue
        twice = tokenizer.decode(tokenizer.encode(once))
        if twice != once:
            yield f"{once!r} comes back as {twice!r}"
    found = tokenizer.encode("The end.")
    if tokenizer.decode([*found, tokenizer.eos_id]) != tokenizer.decode(found):
        yield "decode does not remove the end marker"


def many(subject: Subject) -> Iterator[str]:
    """Check that a batch of texts gives the same ids as its texts one by one, in every form."""
    tokenizer = subject.build()
    wanted = [list(tokenizer.encode(text)) for text in TEXTS]
    forms = {"encode_batch": tokenizer.encode_batch}
    if tokenizer.encode_arrays(TEXTS) is not None:
        forms["encode_arrays"] = tokenizer.encode_arrays
    for name, encode in forms.items():
        found = [[int(i) for i in row] for row in encode(TEXTS)]
        for text, one, other in zip(TEXTS, wanted, found, strict=True):
            if one != other:
                yield f"{name} and encode differ for {text!r}: {other} and {one}"
                break


def again(subject: Subject) -> Iterator[str]:
    """Check that a second instance has the same ids and the same identity."""
    from titancli.data.packing import tokenizer_identity

    one, other = subject.build(), subject.build()
    if tokenizer_identity(one) != tokenizer_identity(other):
        yield "a second instance has a different fingerprint: a resume would be rejected"
    if [one.encode(text) for text in TEXTS] != [other.encode(text) for text in TEXTS]:
        yield "a second instance returns different ids"


def chat(subject: Subject) -> Iterator[str]:
    """Check that a conversation has ids, or a TitanError reports a missing template; and that masks match
    the ids."""
    tokenizer = subject.build()
    try:
        found = tokenizer.chat(TALK)
    except TitanError:
        return
    if wrong := [i for i in found if not 0 <= i < tokenizer.vocab_size]:
        yield f"chat gives {wrong[0]}, but vocab_size is {tokenizer.vocab_size}"
    prompt = tokenizer.chat(TALK[:3], add_generation_prompt=True)
    if tokenizer.chat_with_mask is not None:
        yield from _mask(tokenizer, found, prompt)


def _mask(tokenizer: Any, found: list[int], prompt: list[int]) -> Iterator[str]:
    masked, mask = tokenizer.chat_with_mask(TALK)
    if list(masked) != list(found) or len(mask) != len(found):
        yield "chat_with_mask returns different ids than chat, or a mask of a different length"
        return
    last, only = tokenizer.chat_with_mask(TALK, first=3)
    if any(only[: len(prompt)]) or not any(only[len(prompt) :]) or list(last) != list(found):
        yield "chat_with_mask(first=3) must select only the last answer, after the prompt to generate it"
    if not any(mask[: len(prompt)]):
        yield "chat_with_mask selects nothing of the first answer"


CHECKS: dict[str, dict[str, Check]] = {
    "tokenizer": {"ids": ids, "round trip": round_trip, "batches": many, "again": again, "chat": chat}
}
