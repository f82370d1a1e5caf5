"""The script `titan`, and `python -m titancli`. A Ctrl-C while it starts ends it without a word."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130
"""`EXIT_INTERRUPTED`, which is not imported yet."""


def main() -> int:
    """Run the command of this process and return its exit code."""
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not under nohup, for example
    if listens:
        # While modules are imported there is nothing to put in order, and no place for an exception.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
        sys.unraisablehook = _unraisable
    from titancli.cli import main as run

    try:
        if listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # one more, while the first is answered
        return INTERRUPTED


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Heed a Ctrl-C that comes in a callback, as that of a late import, where Python would print and pass it
    over."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.exit(main())
