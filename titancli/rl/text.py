"""Streaming text of tokens: whole characters only, and no part of a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""Character that decoders produce for invalid or incomplete bytes."""
CONTEXT = 8
"""Number of prompt tokens that a decoder gets as context of a completion."""


class TextStream:
    """Converts tokens to whole characters as they arrive.

    The text of a token may depend on the one before it (a leading space is dropped at the beginning of a
    text) and on those after it (bytes of one character). So a short window of tokens is decoded with and
    without the newest, and the difference is the new text; it is held back while it ends within a character.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        """Begin after `prompt`, whose end is the context; `decode` is the tokenizer's."""
        self._decode = decode
        self._window, self._known = self._context(prompt)
        self._old = len(self._window)
        """Number of tokens in the window whose text, `_known`, has been returned."""

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """Return the last tokens of the prompt, as few as decode to whole characters, and their text."""
        window: list[int] = []
        text = ""
        for size in range(1, min(CONTEXT, len(prompt)) + 1):
            window = list(prompt[-size:])
            text = self._decode(window)
            if text and UNFINISHED not in text:
                break
        return (window, text) if UNFINISHED not in text else ([], "")

    def feed(self, token: int) -> str:
        """Return the text that can be shown after one more token; may be empty."""
        self._window.append(token)
        text = self._decode(self._window)
        if len(text) <= len(self._known) or text.endswith(UNFINISHED):
            return ""
        news = text[len(self._known) :]
        del self._window[: self._old]
        self._old = len(self._window)
        self._known = self._decode(self._window)
        return news

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text that `feed` and `flush` give for these tokens, at once."""
        return self._decode([*self._window, *tokens])[len(self._known) :]

    def flush(self) -> str:
        """Return the text held back, at the end: bytes that never became a character read as U+FFFD."""
        return self._decode(self._window)[len(self._known) :]


class StopText:
    """Cuts a stream of text at the first stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that can be shown after more text, and whether a stop text was found.

        The end of the text is held back as long as it may be the beginning of a stop text. Of several stop
        texts the one that is complete first counts, however the text is cut into pieces.
        """
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Return the text held back, at the end."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
