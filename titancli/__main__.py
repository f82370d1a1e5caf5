"""The script `titan`, and `python -m titancli`. Ctrl-C during start-up exits silently."""

import _signal  # `signal` imports enum first, while a Ctrl-C would print a traceback
import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""`EXIT_INTERRUPTED`, which is not imported yet."""


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


def _heed(number: int, frame: "FrameType | None") -> None:
    """Raise KeyboardInterrupt, except into an import: C++ code that is being loaded would abort the process,
    and half-loaded modules would fail later. During an import end the process; if it holds a run folder,
    which must be put in order, send the signal again after the import."""
    global _comes_again
    if not _imports(frame):
        raise KeyboardInterrupt
    if "TITAN_ATTEMPT" not in os.environ:
        os._exit(INTERRUPTED)
    if not _comes_again:
        _comes_again = True
        _thread.start_new_thread(_again, ())


def _imports(frame: "FrameType | None") -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


_comes_again = False


def _again() -> None:
    global _comes_again
    time.sleep(0.05)
    _comes_again = False
    os.kill(os.getpid(), _signal.SIGINT)


_listens = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler  # not under nohup, for example
if _listens:
    # While modules are imported there is nothing to put in order, and no place for an exception.
    _signal.signal(_signal.SIGINT, _leave)


def main() -> int:
    """Run the command of this process and return its exit code."""
    if _listens:
        _signal.signal(_signal.SIGINT, _leave)
        sys.unraisablehook = _unraisable
    from titancli.cli import main as run

    try:
        if _listens:
            _signal.signal(_signal.SIGINT, _heed)
        return run()
    except KeyboardInterrupt:  # one more, while the first is answered
        return INTERRUPTED
    finally:
        if _signal.getsignal(_signal.SIGINT) is _heed:
            _signal.signal(_signal.SIGINT, _leave)  # the interpreter ends


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Heed a Ctrl-C that comes in a callback, as that of a late import, where Python would print and pass it
    over."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.exit(main())
