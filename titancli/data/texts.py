"""Texts that are trained on without a chat template: rows of `text`, and answers to a prompt of base models.

Special tokens that are written in such a text (`<|im_start|>`, in rows that were rendered with a chat
template) can be read as the tokens. In documents of a corpus (`titancli.data.text`) they are always
characters.
"""

from __future__ import annotations

from typing import Any, Literal

from titancli.data.jsonl import BadRow
from titancli.data.prompt import begun
from titancli.data.remarks import remark
from titancli.errors import RecipeError

Markers = Literal["auto", "read", "turns", "plain"]


class Texts:
    """Encodes texts and masks what is trained on."""

    def __init__(self, tokenizer: Any, markers: Markers = "auto") -> None:
        """Check that the tokenizer can do what is asked.

        Args:
            markers: see `titancli.data.Chat`.

        Raises:
            RecipeError: the tokenizer reads no special tokens, or cannot find turns in a text.
        """
        self._tokenizer, self._markers = tokenizer, markers
        needs = {"read": "encode_special", "turns": "text_with_mask"}.get(markers)
        if needs and getattr(tokenizer, needs, None) is None:
            raise RecipeError(
                f'dataset.markers = "{markers}": the tokenizer {type(tokenizer).__name__} has no {needs}',
                hint="use the tokenizer hf, or remove dataset.markers",
            )
        self._special: dict[str, int] = dict(getattr(tokenizer, "special_tokens", {}))
        self._special_ids = frozenset(self._special.values())

    def __call__(self, text: str, prompt: str = "") -> tuple[list[int], list[bool]]:
        """Return the ids of a prompt and the text after it, and which of them are trained on.

        BOS comes first if the tokenizer begins texts with it, and the end marker last, as in TRL; neither is
        added to a text that has it. The prompt is no target: the text begins at the first token that differs
        from those of the prompt alone.

        Raises:
            BadRow: with `markers = "turns"`, the text has no turn of the assistant.
        """
        if self._markers == "turns" and not prompt:
            ids, mask = self._tokenizer.text_with_mask(text)
            if not any(mask):
                raise BadRow('its text has no turn of the assistant (dataset.markers = "turns")')
            return ids, mask
        read = self._reads(prompt + text)
        whole = begun(self._tokenizer, self._ids(prompt + text, read))
        if not (read and whole and (whole[-1] in self._special_ids or self._ends(prompt + text))):
            whole.append(self._tokenizer.eos_id)
        begin = 0
        if prompt:
            alone = begun(self._tokenizer, self._ids(prompt, read))
            pairs = zip(alone, whole, strict=False)
            begin = next((i for i, (one, other) in enumerate(pairs) if one != other), len(alone))
        return whole, [place >= begin for place in range(len(whole))]

    def _reads(self, text: str) -> bool:
        """Return whether the special tokens written in a text are read as the tokens."""
        if self._markers == "plain":
            return False
        if self._markers == "read":
            return True
        there = [token for token in self._special if token in text]
        token = min(there, key=text.index, default=None)
        if token is not None:
            remark(
                "markers",
                f"its text has {token!r}, which is encoded as the special token of that name; if it was "
                f'rendered with a chat template, set dataset.markers = "read" (or "turns", to train on the '
                f'assistant only), otherwise dataset.markers = "plain"',
            )
        return token is not None

    def _ids(self, text: str, read: bool) -> list[int]:
        encode = self._tokenizer.encode_special if read else self._tokenizer.encode
        return list(encode(text))

    def _ends(self, text: str) -> bool:
        """Return whether a text ends with a special token, apart from whitespace."""
        return text.rstrip().endswith(tuple(self._special))
