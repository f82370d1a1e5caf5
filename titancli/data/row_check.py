"""Check rows of conversations for what makes a run learn something else than its user expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titancli.data.fitting import Conversation
from titancli.data.jsonl import BadRow
from titancli.errors import EnvironmentProblem

FIRST = 100
"""Rows that are checked at the start of a run."""
BAD, CUT = "bad", "cut"
"""Kinds of findings: rows that are skipped, and rows that are truncated."""


@dataclass
class Finding:
    """Something that rows have in common."""

    kind: str
    where: str
    """Location of the first row, as shown to users."""
    text: str
    """What is wrong with it, and what to do."""
    rows: int = 1
    """Number of rows."""


class RowCheck:
    """Collects findings on rows."""

    def __init__(self, tokenizer: Any, conversations: Callable[[Any], Iterable[Conversation]]) -> None:
        """Start without findings; `conversations` returns those of an example."""
        self._tokenizer, self._conversations = tokenizer, conversations
        self._found: dict[str, Finding] = {}
        ends = getattr(tokenizer, "turn_ends", None) or getattr(tokenizer, "special_tokens", {}).values()
        self._ends = {*ends, tokenizer.eos_id}
        self.rows = 0
        """Number of rows that were checked."""

    def bad(self, where: str, reason: BadRow) -> None:
        """Add a row that is skipped."""
        self.rows += 1
        self._add(BAD, where, str(reason))

    def row(self, where: str, example: Any, remarks: Mapping[str, str]) -> None:
        """Add a row, with the remarks that were made when it was encoded."""
        self.rows += 1
        found = dict(remarks)
        for conversation in self._conversations(example):
            for kind, text in self._of(conversation, cut=CUT in remarks):
                found.setdefault(kind, text)
        for kind, text in found.items():
            self._add(kind, where, text)

    def _of(self, conversation: Conversation, *, cut: bool) -> Iterable[tuple[str, str]]:
        tokenizer, tokens = self._tokenizer, conversation.tokens.tolist()
        if tokenizer.bos_id is not None and tokens[:2] == [tokenizer.bos_id] * 2:
            yield (
                "bos",
                "it begins with BOS twice: remove the token from its text, or from the chat template",
            )
        learned = [token for token, flag in zip(tokens, conversation.trained, strict=True) if flag]
        if not cut and not self._ends & set(learned):
            yield (
                "end",
                f"none of its targets ends a turn (the last is {tokenizer.decode(learned[-1:])!r}), so the "
                f"model does not learn to stop: use a chat template with an end marker that is a special "
                f"token of the tokenizer",
            )

    def _add(self, kind: str, where: str, text: str) -> None:
        if kind in self._found:
            self._found[kind].rows += 1
        else:
            self._found[kind] = Finding(kind, where, text)

    @property
    def findings(self) -> Sequence[Finding]:
        """Return the findings, those on most rows first."""
        return sorted(self._found.values(), key=lambda one: -one.rows)

    @property
    def faults(self) -> Sequence[Finding]:
        """Return the findings that a strict check refuses: all but truncated rows, which recipes ask for."""
        return [one for one in self.findings if one.kind != CUT]

    def lines(self, leave_out: str | None = None) -> list[str]:
        """Return each finding as a line, except of one kind."""
        return [
            f"{one.rows:,} of {self.rows:,} rows: {one.where}: {_words(one.kind)}{one.text}"
            for one in self.findings
            if one.kind != leave_out
        ]

    def refuse(self) -> None:
        """
        Raises:
            EnvironmentProblem: there is a finding that a strict run refuses at its start. Bad rows end such a
                run when it reads them.
        """
        if found := [one for one in self.faults if one.kind != BAD]:
            raise EnvironmentProblem(
                f"{found[0].where}: {found[0].text}",
                hint="correct the rows, or set dataset.strict = false to train on them",
            )


def _words(kind: str) -> str:
    return {BAD: "it is skipped: ", CUT: "it is truncated: "}.get(kind, "")
