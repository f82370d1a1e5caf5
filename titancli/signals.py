"""Signals that stop a run, heard at any time and heeded after a step; terminals that go
away; and the end of a process. Torch-free."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from titancli.errors import EXIT_INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""SIGHUP comes when the terminal of a run goes away, for one with a lost SSH session."""
ASKED_TO_STOP = "TITAN_ASKED_TO_STOP"
"""The environment variable that names a signal to ranks that were started after it had come."""
NODES_JOIN = signal.SIGUSR2
"""Signal of torchrun's agent to the ranks when more nodes join a run: save, and be restarted."""
EXIT_NODES_JOIN = 76
"""The exit code of a rank that has done so."""
STOPPING = ContextVar("STOPPING", default="stopping after this step and saving a checkpoint")
"""The effect of a signal, as announced to the user."""


class Stop:
    """Turns signals into a request that the session checks after each step."""

    def __init__(self, requested: str | None = None) -> None:
        self.requested = requested
        """The name of the first signal that came, e.g. `"SIGTERM"`."""
        self._interrupted = False

    @contextmanager
    def listening(
        self, *, leave: Callable[[], None] | None = None, also: Sequence[signal.Signals] = ()
    ) -> Iterator[Stop]:
        """Handle the signals. With `leave` this is the only rank: the effect is announced, and a second
        SIGINT calls `leave` and ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may set handlers
            return

        def handle(number: int, frame: Any) -> None:
            name = signal.Signals(number).name
            if leave and name == "SIGINT" and self._interrupted:
                _print("interrupted again: exiting now")
                leave()
                os._exit(EXIT_INTERRUPTED)
            self._interrupted = self._interrupted or name == "SIGINT"
            if leave and (self.requested is None or name == "SIGINT"):
                again = "; press Ctrl-C again to exit now" if name == "SIGINT" else ""
                _print(f"{name}: {STOPPING.get()}{again}")
            self.requested = self.requested or name

        before = {number: signal.signal(number, handle) for number in (*heeded(), *also)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def heeded() -> list[signal.Signals]:
    """Return the signals that stop a run: without SIGHUP under `nohup`, which has it ignored."""
    return [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def _print(words: str) -> None:
    """Write to stderr without Python's streams: the signal may have come in the middle of a write."""
    # Below the cursor of a terminal is the live panel, which will be drawn again.
    before = b"\r\x1b[J" if os.isatty(2) else b"\n"
    with suppress(OSError):  # without a reader (`2>&1 | head`) the run still stops in good order
        os.write(2, before + words.encode() + b"\n")


# ------------------------------------------------------------------------------- a terminal that goes away


def say(line: str) -> None:
    """Print a line to stderr. A terminal that has gone away, or a reader that has, ends nothing."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: it was closed
        drop(sys.stderr)


def drop(stream: Any) -> None:
    """Send what a stream still holds, and all that is written to it, nowhere: nobody reads it any more."""
    with suppress(OSError, ValueError, AttributeError):  # a stream that is no file needs no care
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_left_behind = False


def leave_threads_behind() -> None:
    """Have `leave` end the process without waiting for its threads: one of them may hang for ever."""
    global _left_behind
    _left_behind = True


def leave(code: int) -> int:
    """Return the exit code, or end the process with it at once: the interpreter would wait at its end for
    threads of others (those of asyncio's executor), daemons or not."""
    if _left_behind:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)
    return code
