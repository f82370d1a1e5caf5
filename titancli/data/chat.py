"""The `chat` dataset: rows of conversations, with targets where the assistant speaks.

A row holds one conversation or, packed, several whole ones that do not attend to each other: `document_ids`
and `positions` make a packed row equivalent to its conversations one by one. A conversation of n tokens takes
n - 1 positions of a row: its last token is a target, never an input.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from titancli.data import Chat
from titancli.data.chat_source import check_messages, dataset_of
from titancli.data.fitting import Conversation, PackedRows
from titancli.data.jsonl import BadRow, value_of
from titancli.data.rows import RowDataset
from titancli.errors import RecipeError
from titancli.observe.metrics import report
from titancli.protocols import Tokenizer


class Masked:
    """Encodes conversations and masks the assistant's tokens."""

    def __init__(self, tokenizer: Any, *, trailing_newline: bool = False) -> None:
        """Check that the tokenizer can mask assistant turns.

        Raises:
            RecipeError: the tokenizer cannot tell which tokens are the assistant's, or whether they include a
                line break after the end marker.
        """
        if tokenizer.chat_with_mask is None:
            raise RecipeError(
                f"the tokenizer ({type(tokenizer).__name__}) cannot tell which tokens are the assistant's",
                hint="use a tokenizer with chat_with_mask, such as hf",
            )
        self._tokenizer = tokenizer
        knows = "trailing_newline" in inspect.signature(tokenizer.chat_with_mask).parameters
        if trailing_newline and not knows:
            raise RecipeError(
                f"dataset.trailing_newline: the chat template of {type(tokenizer).__name__} is not "
                f"known to add a line break after its end marker",
                hint="remove it",
            )
        self._options = {"trailing_newline": trailing_newline} if knows else {}

    def __call__(self, messages: list[dict[str, Any]], first: int = 0) -> tuple[list[int], list[bool]]:
        return self._tokenizer.chat_with_mask(messages, first=first, **self._options)


class ConversationReader:
    """Turns rows into conversations."""

    def __init__(self, config: Chat, tokenizer: Any, seq_len: int, masked: Masked | None) -> None:
        """Create the reader; `masked` is None if every token is trained on."""
        self._config, self._tokenizer, self._seq_len = config, tokenizer, seq_len
        self._masked = masked
        self._cut = 0

    def __call__(self, row: dict[str, Any]) -> Conversation:
        """Return a row's conversation.

        Raises:
            BadRow: the row is not a conversation, or has nothing to train on.
            ChatRefused: the chat template rejects it.
        """
        key = self._config.messages
        messages = check_messages(key, value_of(row, key))
        if self._masked is None:
            ids = self._tokenizer.chat(messages)
            mask = [True] * len(ids)
        else:
            if not any(message["role"] == "assistant" for message in messages):
                raise BadRow(f"{key!r} has no assistant message")
            ids, mask = self._masked(messages)
        longest = self._seq_len + 1
        if len(ids) > longest and self._config.too_long == "skip":
            raise BadRow(f"it has {len(ids)} tokens, but a row holds {longest} (training.seq_len)")
        found = Conversation(np.array(ids[:longest], np.int64), np.array(mask[:longest], bool))
        if not found.trained[1:].any():
            raise BadRow(f"none of its first {longest} tokens is trained on")
        if len(ids) > longest:
            self._cut += 1
            report("cut_rows", self._cut, reduce="max")
        return found


def build(config: Chat, *, tokenizer: Tokenizer, seq_len: int, **runtime: Any) -> RowDataset:
    """Build `[dataset] type = "chat"`.

    Raises:
        EnvironmentProblem: there is nothing to read.
        RecipeError: the tokenizer has no chat template.
    """
    masked = Masked(tokenizer, trailing_newline=config.trailing_newline) if config.train_on != "all" else None
    names = ("messages", "train_on", "too_long", "pack", *(["trailing_newline"] if masked else []))
    return dataset_of(
        config,
        "chat",
        ConversationReader(config, tokenizer, seq_len, masked),
        PackedRows(seq_len, tokenizer.eos_id, pack=config.pack),
        {name: getattr(config, name) for name in names},
        tokenizer=tokenizer,
        seq_len=seq_len,
        **runtime,
    )
