"""One verb of an engine at a time, whichever thread calls it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from titancli.errors import TitanError


class OneAtATime(Protocol):
    """What has verbs."""

    turn: Lock
    """Held by the verb that is running."""
    running: str
    """The verb that held it last."""


P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=OneAtATime)


def alone(verb: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Have a verb refused while another one runs: two threads that both have just asked whether one does
    would otherwise step through the same shards.

    Raises:
        TitanError: another verb that is `alone` is running, in this thread or another.
    """

    @wraps(verb)
    def claimed(engine: E, *args: P.args, **kwargs: P.kwargs) -> R:
        if not engine.turn.acquire(blocking=False):
            raise TitanError(
                f"{verb.__name__}: the engine is in the middle of {engine.running}",
                hint="call it before: what a loss needs travels with the batch",
            )
        try:
            engine.running = verb.__name__
            return verb(engine, *args, **kwargs)
        finally:
            engine.turn.release()

    return claimed
