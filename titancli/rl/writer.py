"""The output of one decoded row: its tokens, its text, and why it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from titancli.protocols.samples import Finish
from titancli.rl.text import StopText, TextStream

OnText = Callable[[str], None]


class Writer:
    """Receives tokens one by one.

    They are decoded immediately if a reader follows them or a stop text may end them, otherwise at the end.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        eos_ids: Set[int],
        stop: Sequence[str] = (),
        *,
        on_text: OnText | None = None,
    ) -> None:
        """
        Args:
            decode: the tokenizer's.
            eos_ids: end markers, which have no text.
            stop: stop texts, which are not part of the row's text.
            on_text: called with each piece of text.
        """
        self.tokens: list[int] = []
        """All tokens, including the end marker and those cut off by a stop text."""
        self.finish: Finish | None = None
        """Why the row ended; None if it reached its limit or still runs."""
        self._eos_ids = eos_ids
        self._stream, self._stops = TextStream(decode, prompt), StopText(stop)
        self._at_once = bool(stop) or on_text is not None
        self._on_text = on_text
        self._pieces: list[str] = []
        self._closed = False

    def token(self, token: int) -> bool:
        """Take one more token; return whether the row continues."""
        self.tokens.append(token)
        if token in self._eos_ids:
            self.finish = "eos"
        elif self._at_once:
            self._write(self._stream.feed(token))
        return self.finish is None

    def text(self) -> str:
        """Return the whole text after the last token; held-back text is included, unless it contains a stop
        text."""
        if not self._closed:
            self._closed = True
            if self._at_once:
                self._write(self._stream.flush())
            else:
                ends = len(self.tokens) - (self.finish == "eos")
                self._show(self._stream.whole(self.tokens[:ends]))
            if self.finish != "stop":
                self._show(self._stops.flush())
        return "".join(self._pieces)

    def _write(self, text: str) -> None:
        if self.finish == "stop":
            return
        shown, found = self._stops.feed(text)
        self._show(shown)
        if found:
            self.finish = "stop"

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            if self._on_text is not None:
                self._on_text(text)
