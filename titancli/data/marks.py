"""Find where the texts of messages stand in a rendered conversation, by marks.

A mark is a word that occurs nowhere else. The template renders the conversation with marks in every content,
thought, and call of a tool. Without its marks, that rendering must equal the rendering of the conversation
itself; so whatever a template does with a text (trim, escape, split, move), its place is known, not guessed.
What has no mark in the rendering was left out by the template.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from titancli.errors import RecipeError

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thought, which templates may leave out of earlier turns."""

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""Renders messages, with or without the generation prompt; raises ChatRefused."""


class ChatRefused(RecipeError):
    """A chat template rejects a conversation; it may accept others."""


class Leaf(NamedTuple):
    """A text of a message."""

    message: int
    """Number of the message."""
    path: tuple[str | int, ...]
    """Keys that lead to the text from the message."""
    kind: Literal["content", "thought", "call", "argument"]
    text: str

    @property
    def name(self) -> str:
        """Return the text's place as messages name it: `messages[1].tool_calls[0].function.name`."""
        keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return f"messages[{self.message}]{''.join(keys)}"


class Mark(NamedTuple):
    """A mark in the rendered conversation."""

    leaf: int
    """Index of its text."""
    offset: int
    """Characters of the text before it."""
    at: int
    """Characters of the rendering before it, not counting marks."""


def leaves_of(messages: Messages) -> list[Leaf]:
    """Return the texts of messages that a rendering must contain."""
    return [Leaf(number, *found) for number, message in enumerate(messages) for found in _texts(message)]


def _texts(message: dict[str, Any]) -> Iterator[tuple[Any, Any, str]]:
    content = message.get("content")
    if isinstance(content, str):
        yield ("content",), "content", content
    elif isinstance(content, list):
        for number, part in enumerate(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield ("content", number, "text"), "content", part["text"]
    for key in THOUGHTS:
        if isinstance(thought := message.get(key), str):
            yield (key,), "thought", thought
    for number, call in enumerate(message.get("tool_calls") or ()):
        nested = isinstance(call.get("function"), dict)
        path = ("tool_calls", number, *(["function"] if nested else []))
        function = call["function"] if nested else call
        if isinstance(function.get("name"), str):
            yield (*path, "name"), "call", function["name"]
        for keys, text in _strings(function.get("arguments")):
            yield (*path, "arguments", *keys), "argument", text


def _strings(value: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the strings in a JSON value, each with the keys that lead to it."""
    if isinstance(value, str):
        yield (), value
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            for keys, text in _strings(inner):
                yield (key, *keys), text


class Trace:
    """A rendered conversation and the places of its texts."""

    def __init__(self, render: Render, messages: Messages, *, prompt: bool = False) -> None:
        """Render messages.

        Args:
            prompt: add the generation prompt.

        Raises:
            ChatRefused: the template rejects the messages.
        """
        self._render, self._prompt = render, prompt
        self.messages, self.leaves = messages, leaves_of(messages)
        self.text = render(messages, prompt)
        self.marks: list[Mark] = []
        """In the order of the rendering."""
        self.marked: tuple[str, Messages] = self.text, messages
        """The rendering with marks, and the messages that it is of; without marks if the template rejects
        them."""
        self._tag = _unused(self.text, self.leaves)
        self._places: list[Sequence[int]] = [
            _ends_of(leaf) if self._is_marked(leaf) else () for leaf in self.leaves
        ]
        self.followed = self._follow(self._places)
        """Whether the marked conversation renders as the conversation itself."""
        if not self.followed:
            self._places = [self._alone(number) for number in range(len(self.leaves))]
            self.followed = self._follow(self._places)

    def _is_marked(self, leaf: Leaf) -> bool:
        """Return whether a text gets marks: an empty one only if it is all that an answer has."""
        message = self.messages[leaf.message]
        alone = len(list(_texts(message))) == 1 and message["role"] == "assistant"
        return bool(leaf.text.strip()) or (alone and leaf.kind == "content")

    def _follow(self, places: Sequence[Sequence[int]]) -> bool:
        """Put marks into the texts, at these offsets; return whether the rendering is otherwise the same."""
        self._marked = [_copied(message) for message in self.messages]
        self.marked = self.text, self.messages
        self._numbers = [(leaf, offset) for leaf, offsets in enumerate(places) for offset in offsets]
        numbers = itertools.count()
        for leaf, offsets in zip(self.leaves, places, strict=True):
            if offsets:
                words = [f"{self._tag}{next(numbers)}z" for _ in offsets]
                _set(self._marked[leaf.message], leaf.path, _with_marks(leaf.text, offsets, words))
        try:
            rendered = self._render(self._marked, self._prompt)
        except ChatRefused:
            return False
        self.marked = rendered, self._marked
        text, marks = self._without_marks(rendered)
        self.marks = marks if text == self.text else []
        return text == self.text

    def _alone(self, number: int) -> Sequence[int]:
        """Return the offsets at which a text can be marked if no other text is."""
        nothing: list[Sequence[int]] = [()] * len(self.leaves)
        leaf = self.leaves[number]
        for offsets in (_ends_of(leaf), _middle_of(leaf)) if self._is_marked(leaf) else ():
            if self._follow([*nothing[:number], offsets, *nothing[number + 1 :]]):
                return offsets
        return ()

    def _without_marks(self, rendered: str) -> tuple[str, list[Mark]]:
        """Return a rendering without its marks, and the marks."""
        pieces = re.split(f"{self._tag}([0-9]+)z", rendered)
        marks, at = [], 0
        for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
            at += len(piece)
            marks.append(Mark(*self._numbers[int(number)], at))
        return "".join(pieces[::2]), marks

    def tail(self, count: int, prompt: bool) -> tuple[Mark | None, str] | None:
        """Render the first messages alone; return the last mark and the text after it.

        Returns:
            None if the template rejects these messages; the mark is None if there is none.
        """
        try:
            text, marks = self._without_marks(self._render(self._marked[:count], prompt))
        except ChatRefused:
            return None
        return (marks[-1], text[marks[-1].at :]) if marks else (None, text)

    @cached_property
    def firsts(self) -> list[int]:
        """Return the index of each mark where it comes first: results may repeat the name of a tool."""
        seen: dict[tuple[int, int], int] = {}
        for index, mark in enumerate(self.marks):
            seen.setdefault(mark[:2], index)
        return list(seen.values())

    def owner(self, mark: Mark) -> int:
        """Return the number of the message that a mark is in."""
        return self.leaves[mark.leaf].message

    def content_end(self, mark: Mark) -> int:
        """Return where the text of a mark ends in the rendering."""
        rest = self.leaves[mark.leaf].text[mark.offset :].rstrip()
        return mark.at + (len(rest) if self.text.startswith(rest, mark.at) else 0)

    def left_out(self) -> list[Leaf]:
        """Return the texts that the rendering does not contain, or contains only in part.

        If the part of an assistant's content before `</think>` is left out, a thought is.
        """
        there = {(mark.leaf, mark.offset) for mark in self.marks}
        found = []
        for number, leaf in enumerate(self.leaves):
            if not (said := leaf.text.strip()):
                continue
            if places := self._places[number] if self.followed else ():
                whole = all((number, place) in there for place in places)
                end = next((mark.at for mark in self.marks if mark[:2] == (number, places[-1])), None)
                thought = "</think>" in said and self.messages[leaf.message]["role"] == "assistant"
                if thought and end is not None:
                    leaf = leaf._replace(kind="thought")
                    whole = whole or self.text[:end].endswith(said)  # taken apart and put together
            else:
                whole = said in self.text or json.dumps(said, ensure_ascii=False)[1:-1] in self.text
            found += [] if whole else [leaf]
        return found


def _unused(text: str, leaves: Sequence[Leaf]) -> str:
    """Return a word of letters that no text contains. Letters pass through escapes of JSON and HTML."""
    everything = "\n".join([text, *(leaf.text for leaf in leaves)])
    return next(tag for n in itertools.count(1) if (tag := f"q{'xz' * n}k") not in everything)


def _ends_of(leaf: Leaf) -> list[int]:
    """Return where a text begins and ends without whitespace, which templates trim."""
    end = len(leaf.text.rstrip())
    if leaf.kind in ("call", "argument"):
        return [end]
    start = len(leaf.text) - len(leaf.text.lstrip())
    return [start, end] if start < end else [end]


def _middle_of(leaf: Leaf) -> list[int]:
    """Return an offset in the middle of a word, where a mark changes neither start nor end of a text."""
    words = [word.span() for word in re.finditer(r"\w\w+", leaf.text)]
    if not words:
        return []
    start, end = max(words, key=lambda span: span[1] - span[0])
    return [(start + end) // 2]


def _with_marks(text: str, offsets: Sequence[int], marks: Sequence[str]) -> str:
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *offsets, len(text)])]
    return "".join(itertools.chain(*zip(pieces, [*marks, ""], strict=True)))


def _copied(value: Any) -> Any:
    """Return a copy of a JSON value in which no two places share an object."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _set(value: Any, path: Sequence[str | int], text: str) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = text
