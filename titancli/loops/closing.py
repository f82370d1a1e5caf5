"""Record what a run has left to do after its last step, so that a resume does it, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titancli.distributed.together import Ranks


class Closing:
    """What is left after the last step, the same on all ranks. Its methods are collective."""

    def __init__(
        self,
        known: dict[str, Any] | None,
        wanted: Callable[[int, list[str]], list[str]],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        """
        Args:
            known: `closing` of the attempt before, if it was to end at the step at which this one begins.
            wanted: returns on rank 0 all that a run does after a step; of the given list, the names of
                exports that an earlier attempt has chosen.
            record: writes `closing` to run.json, on rank 0.
        """
        self.known, self._wanted, self._record = known, wanted, record
        self._closing: dict[str, Any] | None = None

    @property
    def began(self) -> bool:
        """Return whether the last step is saved."""
        return self._closing is not None

    @property
    def left(self) -> list[str]:
        """Return what is left; empty before the last step."""
        return [] if self._closing is None else list(self._closing["left"])

    def begin(self, step: int, why: str, *, anew: bool) -> None:
        """Record all that is left once the last step is saved.

        Args:
            anew: whether steps were done; otherwise, what an earlier attempt has done is not left.

        Raises:
            EnvironmentProblem: run.json cannot be written.
        """
        known = None if anew else self.known

        def begin() -> dict[str, Any]:
            chosen = [] if known is None else [name for name in known["left"] if isinstance(name, str)]
            wanted = self._wanted(step, chosen)
            left = wanted if known is None else [name for name in wanted if name in chosen]
            closing = {"step": step, "why": why, "left": left}
            self._record(closing)
            return closing

        self._closing = Ranks().broadcast_call("recording what is left of the run", begin)

    def done(self, name: str) -> None:
        """Record that something is done.

        Raises:
            EnvironmentProblem: run.json cannot be written.
        """
        if self._closing is not None and name in self._closing["left"]:
            closing = {**self._closing, "left": [other for other in self.left if other != name]}
            Ranks().broadcast_call(f"recording that {name} is done", lambda: self._record(closing))
            self._closing = closing
