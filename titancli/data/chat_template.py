"""Conversations under a Hugging Face chat template: their ids, and which of them are the assistant's.

A template may mark assistant turns with `{% generation %}`. Without markers, turns are located in the
rendered text: the rendering of the messages before a turn, with the generation prompt, must be a prefix of
the whole. Templates without that property are rejected; nothing is guessed.

A turn ends with its end marker. The line break that many templates put after it (ChatML: `<|im_end|>\\n`) is
not part of the turn unless requested: sampling stops at the marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
Options = Mapping[str, Any] | None


class ChatRefused(RecipeError):
    """A chat template rejects a conversation; it may accept others."""


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        """Read the tokenizer's chat template.

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

    def ids(
        self, messages: Messages, options: Options = None, *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids of a conversation; `options` are other arguments of the template, such as `tools`.

        Raises:
            ChatRefused: the template rejects these messages.
        """
        asked = {"add_generation_prompt": add_generation_prompt, **(options or {})}
        return list(self._apply(messages, tokenize=True, return_dict=False, **asked))

    def ids_and_mask(
        self,
        messages: Messages,
        first: int = 0,
        options: Options = None,
        *,
        trailing_newline: bool = False,
    ) -> tuple[list[int], list[bool]]:
        """Return the ids, and which of them belong to assistant turns among `messages[first:]`.

        A token belongs to the turn that it begins in; a token with both the end marker and the line break
        after it belongs to the turn.

        Args:
            options: other arguments of the template, such as `tools`.
            trailing_newline: include the line break after the end marker.

        Raises:
            ChatRefused: the template rejects these messages.
            RecipeError: the template has no markers, and renders a turn differently when others follow.
        """
        if self.has_markers:
            return self._marked(messages, first, options, trailing_newline)
        render = partial(self._render, options=options)
        text = render(messages)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begin = partial(self._divergence, encoded)
        spans = assistant_spans(render, messages, first, str(self._folder), begin)
        if not trailing_newline:
            turns = [message for message in messages[first:] if message["role"] == "assistant"]
            spans = [
                (start, self._marker_end(text[start:end], message, start))
                for (start, end), message in zip(spans, turns, strict=True)
            ]
        mask = [  # a token that begins before the turn was not generated
            any(start <= at < end for start, end in spans) and after > at
            for at, after in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), mask

    def _divergence(self, encoded: Any, before: str) -> int:
        """Return where the first token begins that a text does not have in common with the conversation."""
        ids = self._tokenizer(before, add_special_tokens=False)["input_ids"]
        pairs = zip(encoded["input_ids"], ids, encoded["offset_mapping"], strict=False)
        return next((start for one, other, (start, _) in pairs if one != other), len(before))

    def _marker_end(self, turn: str, message: dict[str, Any], start: int) -> int:
        """Return the end of a turn that begins at `start`, without the whitespace after its end marker.

        The marker is an added token of the vocabulary, or whatever else follows the content. In a turn
        without one, the whitespace is its only end and is kept.
        """
        bare = turn.rstrip()
        said = (message.get("content") or "").strip()
        indent = len(bare) - len(bare.lstrip())
        at = indent if bare.startswith(said, indent) else bare.rfind(said)
        marked = bare.endswith(self._ends) or (
            "tool_calls" not in message and 0 <= at < len(bare) - len(said)
        )
        return start + len(bare if marked else turn)

    def _marked(
        self, messages: Messages, first: int, options: Options, trailing_newline: bool
    ) -> tuple[list[int], list[bool]]:
        asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(messages, **asked, **(options or {}))
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
        """Return the mask without whitespace tokens between an end marker and the end of a masked span."""
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

    def _render(
        self, messages: Messages, add_generation_prompt: bool = False, options: Options = None
    ) -> str:
        asked = {"add_generation_prompt": add_generation_prompt, **(options or {})}
        return str(self._apply(messages, tokenize=False, **asked))

    def _apply(self, messages: Messages, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # templates raise jinja exceptions of any class
            raise ChatRefused(
                f"the chat template in {self._folder} rejects a conversation: {error}",
                hint="check which roles the template allows, and in which order",
            ) from error


def assistant_spans(
    render: Callable[..., str],
    messages: Messages,
    first: int,
    folder: str,
    divergence: Callable[[str], int] = len,
) -> list[tuple[int, int]]:
    """Return the spans of the assistant turns among `messages[first:]` in the rendered text, in characters.

    A turn begins after its generation prompt, and ends with whatever the template puts after it. Where the
    prompt ends differently than a turn begins (`<think>`), the turn begins where they diverge.

    Args:
        render: `render(messages, add_generation_prompt)`.
        divergence: returns where a text diverges from the whole conversation.

    Raises:
        RecipeError: the template renders a turn, or the text before it, differently when others follow.
    """
    whole = render(messages, False)
    spans = []
    for number, message in enumerate(messages):
        if number < first or message["role"] != "assistant":
            continue
        before = render(messages[:number], True)
        start = len(before)
        if not whole.startswith(before) and whole.startswith(context := render(messages[:number], False)):
            start = max(len(context), divergence(before))
        end = _end(render(messages[: number + 1], False), whole, start, _said(message))
        if not whole.startswith(before[:start]) or end is None:
            raise RecipeError(
                f"the chat template in {folder} has no {{% generation %}} markers and renders turn "
                f"{number + 1} of a conversation differently when it is the last one, so the tokens of "
                f"the assistant cannot be identified",
                hint=REMEDY,
            )
        spans.append((start, end))
    return spans


def _said(message: Mapping[str, Any]) -> str:
    """Return what a turn is recognized by: its content, or the first tool that it calls."""
    if said := message.get("content"):
        return str(said)
    call: dict[str, Any] = next(iter(message.get("tool_calls") or ()), {})
    return str(call.get("function", call).get("name", ""))


def _end(until: str, whole: str, start: int, content: str) -> int | None:
    """Return the end of the turn that begins at `start`; None if it cannot be located.

    Args:
        until: the rendered conversation up to and including the turn.
    """
    if whole.startswith(until) and len(until) > start:
        return len(until)
    # Some templates (Qwen 3) put more into the last turn than into others; content and end are the same.
    first = start if until.startswith(whole[:start]) else 0
    for said in (content, content.strip(), content.rpartition("</think>")[2].strip()):
        at = until.find(said, first) if said else -1
        while at >= 0:
            begin = at if whole.startswith(until[at:], start) else _earliest(until, whole, first, at, start)
            if begin is not None:
                return start + len(until) - begin
            at = until.find(said, at + 1)
    return None


def _earliest(until: str, whole: str, first: int, last: int, start: int) -> int | None:
    """Return where, from `first` to `last`, the rest of the turn is what `whole` has at `start`: what stands
    before a call of a tool (`<tool_call>`) belongs to the turn."""
    return next((at for at in range(first, last) if whole.startswith(until[at:], start)), None)
