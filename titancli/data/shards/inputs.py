"""Several sources of documents in sequence, as they are tokenized to shards, and the progress through
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from titancli.data.source import Piece, Source


class Input(NamedTuple):
    """A source, and the progress that a mark in it stands for."""

    label: str
    source: Source
    weight: float
    """Its share of the work."""
    progress: Callable[[dict[str, Any]], float]

    @property
    def skipped(self) -> int:
        return getattr(self.source, "skipped", 0)


def pieces(inputs: Sequence[Input], at: dict[str, Any] | None) -> Iterator[tuple[Piece, dict[str, Any]]]:
    """Yield every piece of all inputs with its mark, from a mark on."""
    first, mark = (at["source"], at["mark"]) if at else (0, None)
    for number in range(first, len(inputs)):
        for piece in inputs[number].source.read(0, mark):
            yield piece, {"source": number, "mark": piece.mark}
        mark = None


def share(inputs: Sequence[Input], at: dict[str, Any]) -> float:
    """Return the approximate fraction of the work before a mark, from 0 to 1."""
    total = sum(one.weight for one in inputs) or 1.0
    before = sum(one.weight for one in inputs[: at["source"]])
    here = inputs[at["source"]]
    return (before + here.weight * min(1.0, here.progress(at["mark"]))) / total
