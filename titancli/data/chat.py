"""The `chat` dataset: rows of conversations, with targets where the assistant speaks.

A row holds one conversation or, packed, several whole ones that do not attend to each other: `document_ids`
and `positions` make a packed row equivalent to its conversations one by one. A conversation of n tokens takes
n - 1 positions of a row: its last token is a target, never an input.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from titancli.data import Chat
from titancli.data.chat_source import Rows, dataset_of, rows_of
from titancli.data.fitting import Conversation, PackedRows
from titancli.data.jsonl import BadRow
from titancli.data.prompt import has_chat_template, templated
from titancli.data.remarks import remark
from titancli.data.row_check import CUT
from titancli.data.row_formats import SAMPLED, Names, Talk, detected, require_answer, talk_of, words
from titancli.data.rows import RowDataset
from titancli.data.texts import Texts
from titancli.errors import RecipeError
from titancli.observe.metrics import collector, report
from titancli.protocols import Tokenizer

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class Masked:
    """Encodes conversations and masks the assistant's tokens; for a tokenizer without a chat template, a
    prompt and its answer as plain text."""

    def __init__(self, tokenizer: Any, *, trailing_newline: bool = False, texts: Texts | None = None) -> None:
        """Check that the tokenizer can mask assistant turns.

        Args:
            texts: encodes plain texts; None: one that reads the special tokens in them.

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
        self.texts = texts or Texts(tokenizer)
        self._templated = has_chat_template(tokenizer)
        parameters = inspect.signature(tokenizer.chat_with_mask).parameters
        self._chooses = "untrained" in parameters
        knows = "trailing_newline" in parameters
        if trailing_newline and not knows:
            raise RecipeError(
                f"dataset.trailing_newline: the chat template of {type(tokenizer).__name__} is not "
                f"known to add a line break after its end marker",
                hint="remove it",
            )
        self._options = {"trailing_newline": trailing_newline} if knows else {}

    def __call__(self, talk: Talk) -> tuple[list[int], list[bool]]:
        if talk.plain is not None and not self._templated:
            prompt, answer = talk.plain
            return self.texts(answer, prompt)
        options = {**self._options, **templated(self._tokenizer.chat_with_mask, talk.options)}
        if talk.untrained:
            if not self._chooses:
                raise BadRow("a message has weight 0, but the tokenizer cannot leave out single messages")
            options["untrained"] = talk.untrained
        return self._tokenizer.chat_with_mask(talk.messages, first=talk.first, **options)


class ConversationReader:
    """Turns rows into conversations."""

    def __init__(
        self, config: Chat, tokenizer: Any, seq_len: int, masked: Masked | None, read: Callable[[Row], Talk]
    ) -> None:
        """Create the reader; `masked` is None if every token is trained on."""
        self._config, self._tokenizer, self._seq_len = config, tokenizer, seq_len
        self._masked, self._read = masked, read
        self._texts = Texts(tokenizer, config.markers)
        self._templated = has_chat_template(tokenizer)
        self._cut = 0

    def __call__(self, row: Row) -> Conversation:
        """Return a row's conversation.

        Raises:
            BadRow: the row is not a conversation, or has nothing to train on.
            ChatRefused: the chat template rejects it.
        """
        ids, mask = self._encoded(self._read(row))
        longest = self._seq_len + 1
        if len(ids) > longest and self._config.too_long == "skip":
            raise BadRow(f"it has {len(ids)} tokens, but a row holds {longest} (training.seq_len)")
        found = Conversation(np.array(ids[:longest], np.int64), np.array(mask[:longest], bool))
        if not found.trained[1:].any():
            raise BadRow(f"none of its first {longest} tokens is trained on")
        if len(ids) > longest:
            self._cut += not collector.is_muted  # a check of the rows does not count
            remark(CUT, f"it has {len(ids)} tokens, and a row holds {longest} (training.seq_len)")
            report("cut_rows", self._cut, reduce="max")
        return found

    def _encoded(self, talk: Talk) -> tuple[list[int], list[bool]]:
        if talk.text is not None:
            return self._texts(talk.text)
        if self._masked is None:
            if talk.plain is not None and not self._templated:
                return self._texts("".join(talk.plain))
            chat = self._tokenizer.chat
            ids = chat(talk.messages, **templated(chat, talk.options))
            return ids, [True] * len(ids)
        require_answer(talk)
        return self._masked(talk)


def reader_of(config: Chat, rows: Rows, *, say: bool) -> tuple[str, Callable[[Row], Talk]]:
    """Return the format of a dataset's rows, and the function that reads them.

    Args:
        say: log the format.

    Raises:
        EnvironmentProblem: it is not known, or the first rows have different ones.
    """
    names = Names.of(config)
    chosen = config.format if config.format != "auto" else detected(rows.first(SAMPLED), names)
    if say:
        logger.info("rows: %s", words(chosen, names))
    return chosen, lambda row: talk_of(row, chosen, names)


def build(
    config: Chat, *, tokenizer: Tokenizer, seq_len: int, seed: int, dp_rank: int, **runtime: Any
) -> RowDataset:
    """Build `[dataset] type = "chat"`.

    Raises:
        EnvironmentProblem: there is nothing to read.
        RecipeError: the tokenizer has no chat template.
    """
    masked = None
    if config.train_on != "all":
        texts = Texts(tokenizer, config.markers)
        masked = Masked(tokenizer, trailing_newline=config.trailing_newline, texts=texts)
    rows = rows_of(config, "chat", seed=seed, dp_rank=dp_rank)
    chosen, talk = reader_of(config, rows, say=dp_rank == 0 and not collector.is_muted)
    names = ("train_on", "too_long", "pack", *(["trailing_newline"] if masked else []))
    others = {"markers": config.markers} if config.markers != "auto" else {}
    return dataset_of(
        config,
        "chat",
        ConversationReader(config, tokenizer, seq_len, masked, talk),
        PackedRows(seq_len, tokenizer.eos_id, pack=config.pack),
        {"format": chosen, **{name: getattr(config, name) for name in names}, **others},
        conversations=lambda one: (one,),
        rows_read=rows,
        templated=chosen not in ("text", "prompt_completion") or has_chat_template(tokenizer),
        tokenizer=tokenizer,
        seq_len=seq_len,
        seed=seed,
        dp_rank=dp_rank,
        **runtime,
    )
