"""What an engine says once something has raised where nothing can be put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titancli.errors import TitanError

MendedBy = Literal["load", "weights", "nothing"]
"""What makes an engine usable again: a `load` of everything that it has; new weights alone, from
`load_weights` or a `load` without the optimizer's state; or only a new engine."""

_SEVERITY: tuple[MendedBy, ...] = ("weights", "load", "nothing")

_HINTS: dict[MendedBy, str] = {
    "load": "load a checkpoint into it (engine.load), or build a new engine",
    "weights": "load whole weights into it (engine.load or engine.load_weights), or build a new engine",
    "nothing": "build a new engine, and load its last checkpoint",
}


@dataclass(frozen=True)
class Unusable:
    """Why an engine's numbers cannot be trusted."""

    why: str
    """Goes on from "the engine is unusable: "."""
    mended_by: MendedBy = "load"

    def error(self, verb: str) -> TitanError:
        """What a verb raises that is called all the same."""
        return TitanError(f"{verb}: the engine is unusable: {self.why}", hint=_HINTS[self.mended_by])

    def mended_by_this(self, what: MendedBy | None) -> bool:
        """Whether a verb that does `what` makes the engine usable."""
        return what is not None and self.mended_by != "nothing" and not self.worse_than(what)

    def worse_than(self, other: MendedBy) -> bool:
        return _SEVERITY.index(self.mended_by) > _SEVERITY.index(other)
