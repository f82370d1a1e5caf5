"""Conversations under a Hugging Face chat template: their ids, and which of them an assistant said.

A template may mark what the assistant says with `{% generation %}`. Where it has no markers, the turns are
found in the rendered text: what is rendered of the messages before a turn, with the prompt to generate it,
must be how the whole begins. A template for which that does not hold is refused: nothing is guessed.

A turn ends with its end marker. The line break that many templates put behind it (ChatML: `<|im_end|>\n`) is
no part of the turn unless it is asked for: a model that has said the marker is not sampled from any further.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from titancli.errors import RecipeError

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REMEDY = (
    "put {% generation %} and {% endgeneration %} around the assistant's messages in chat_template.jinja, "
    'or train on all tokens (dataset.train_on = "all")'
)

Messages = Sequence[dict[str, Any]]


class ChatRefused(RecipeError):
    """A conversation that a chat template does not take; others it may."""


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        """
        Raises:
            RecipeError: there is none.
        """
        if not tokenizer.chat_template:
            raise RecipeError(
                f"the tokenizer in {folder} has no chat template",
                hint="add a chat_template.jinja to the folder, or use the tokenizer of an instruct model",
            )
        self._tokenizer, self._folder = tokenizer, folder
        self.text = str(tokenizer.chat_template)
        self.has_markers = MARKERS.search(self.text) is not None
        added = {token: i for token, i in tokenizer.get_added_vocab().items() if token.strip()}
        self._ends, self._end_ids = tuple(added), frozenset(added.values())

    def ids(self, messages: Messages, *, add_generation_prompt: bool = False) -> list[int]:
        """
        Raises:
            ChatRefused: the template does not take these messages.
        """
        return list(
            self._apply(
                messages, tokenize=True, return_dict=False, add_generation_prompt=add_generation_prompt
            )
        )

    def ids_and_mask(
        self, messages: Messages, first: int = 0, *, trailing_newline: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Ids, and which of them belong to assistant turns among `messages[first:]`.

        A token belongs to where it begins; one that holds the end marker and the line break behind it is the
        turn's.

        Args:
            trailing_newline: with the line break behind the end marker.

        Raises:
            ChatRefused: the template does not take these messages.
            RecipeError: it has no markers, and renders a turn in another way when others follow.
        """
        if self.has_markers:
            return self._marked(messages, first, trailing_newline)
        text = self._render(messages)
        spans = assistant_spans(self._render, messages, first, str(self._folder))
        if not trailing_newline:
            turns = [message for message in messages[first:] if message["role"] == "assistant"]
            spans = [
                (start, self._marker_end(text[start:end], message, start))
                for (start, end), message in zip(spans, turns, strict=True)
            ]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [  # a token that begins before a turn was no answer to it
            any(start <= at < end for start, end in spans) and after > at
            for at, after in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), mask

    def _marker_end(self, turn: str, message: dict[str, Any], start: int) -> int:
        """Where a turn that begins at `start` ends without the space behind its end marker.

        The marker is a token that was added to the vocabulary, or what else stands behind the content. Of a
        turn without one the space is all that ends it, and stays.
        """
        bare = turn.rstrip()
        said = (message.get("content") or "").strip()
        indent = len(bare) - len(bare.lstrip())
        at = indent if bare.startswith(said, indent) else bare.rfind(said)
        marked = bare.endswith(self._ends) or (
            "tool_calls" not in message and 0 <= at < len(bare) - len(said)
        )
        return start + len(bare if marked else turn)

    def _marked(self, messages: Messages, first: int, trailing_newline: bool) -> tuple[list[int], list[bool]]:
        found = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = [bool(flag) for flag in found["assistant_masks"]]
        turns = sum(message["role"] == "assistant" for message in messages)
        earlier = sum(message["role"] == "assistant" for message in messages[:first])
        if earlier:
            runs = [(flag, len(list(run))) for flag, run in groupby(mask)]
            if sum(flag for flag, _ in runs) != turns:
                raise ChatRefused(
                    f"the chat template in {self._folder} marks {sum(flag for flag, _ in runs)} spans "
                    f"in a conversation with {turns} assistant turns"
                )
            mask, seen = [], 0
            for flag, length in runs:
                seen += flag
                mask += [flag and seen > earlier] * length
        ids = list(found["input_ids"])
        return ids, mask if trailing_newline else self._without_newlines(ids, mask)

    def _without_newlines(self, ids: list[int], mask: list[bool]) -> list[bool]:
        """The mask without tokens of space that stand between an end marker and the end of a stretch."""
        result, at = list(mask), 0
        for flag, run in groupby(mask):
            start, at = at, at + len(list(run))
            last = at
            while flag and last > start and not self._tokenizer.decode([ids[last - 1]]).strip():
                if ids[last - 1] in self._end_ids:
                    break
                last -= 1
            if flag and start < last < at and ids[last - 1] in self._end_ids:
                result[last:at] = [False] * (at - last)
        return result

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        return self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, messages: Messages, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # jinja raises what the template says, of any class
            raise ChatRefused(
                f"the chat template in {self._folder} rejects a conversation: {error}",
                hint="check which roles the template allows, and in which order",
            ) from error


def assistant_spans(
    render: Callable[..., str], messages: Messages, first: int, folder: str
) -> list[tuple[int, int]]:
    """Where the assistant turns among `messages[first:]` begin and end in the rendered text, in characters.

    A turn begins after the prompt to generate it, and ends with what the template puts behind it.

    Args:
        render: `render(messages, add_generation_prompt)`.

    Raises:
        RecipeError: the template renders what is before a turn, or a turn, in another way when others follow.
    """
    whole = render(messages, False)
    spans = []
    for number, message in enumerate(messages):
        if number < first or message["role"] != "assistant":
            continue
        before = render(messages[:number], True)
        end = _end(render(messages[: number + 1], False), whole, len(before), message.get("content") or "")
        if not whole.startswith(before) or end is None:
            raise RecipeError(
                f"the chat template in {folder} has no {{% generation %}} markers and renders turn "
                f"{number + 1} of a conversation differently when it is the last one, so the tokens of "
                f"the assistant cannot be identified",
                hint=REMEDY,
            )
        spans.append((len(before), end))
    return spans


def _end(until: str, whole: str, start: int, content: str) -> int | None:
    """Where the turn that begins at `start` ends.

    Args:
        until: the text of the conversation up to and with the turn.
    """
    if whole.startswith(until) and len(until) > start:
        return len(until)
    # Some templates (Qwen 3) put more into the last turn than into others; its content and its end are alike.
    first = start if until.startswith(whole[:start]) else 0
    for said in (content, content.strip()):
        at = until.find(said, first) if said else -1
        while at >= 0:
            if whole.startswith(until[at:], start):
                return start + len(until) - at
            at = until.find(said, at + 1)
    return None
