"""Bytes that are taken and given back in a known order, and the most that there were at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Event = tuple[str, float] | tuple[str, str] | str
"""`("name", bytes)` takes memory, `"name"` gives it back, `("new", "old")` renames. Names that begin with
`dw:` are gradients of weights."""

CLASSES = ("parameters", "gradients", "optimizer", "activations", "loss", "communication")
"""What memory is taken for."""
PREFIXES = {"dw": "gradients", "loss": "loss"}


def class_of(name: str) -> str:
    return PREFIXES.get(name.partition(":")[0], "activations")


@dataclass
class Ledger:
    """What is taken at the moment, and the peak so far with what it was taken for."""

    live: dict[str, float] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    """Names that are not given back: autograd holds them."""
    total: float = 0.0
    peak: float = 0.0
    classes: dict[str, float] = field(default_factory=dict)
    at_peak: dict[str, float] = field(default_factory=dict)
    """The peak by class."""

    def __post_init__(self) -> None:
        given, self.live = self.live, {}
        for name, size in given.items():
            self._take(name, size)

    def run(self, events: Iterable[Event]) -> None:
        """Taking what is there already changes nothing, and neither does giving back what is not."""
        for event in events:
            if isinstance(event, str):
                self.free(event)
            elif isinstance(event[1], str):
                self.live[event[0]] = self.live.pop(event[1])
            elif event[0] not in self.live:
                self._take(event[0], event[1])

    def free(self, name: str) -> None:
        if name in self.live and name not in self.held:
            self._change(name, -self.live.pop(name))

    def _take(self, name: str, size: float) -> None:
        self.live[name] = size
        self._change(name, size)
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.classes)

    def _change(self, name: str, size: float) -> None:
        self.total += size
        kind = class_of(name)
        self.classes[kind] = self.classes.get(kind, 0.0) + size
