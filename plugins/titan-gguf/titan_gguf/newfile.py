"""A file that is whole or absent: written under a hidden name, named when all of it is on the disk."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titancli.checkpoint.format.disk import need, refusal, sync_folder
from titancli.errors import EnvironmentProblem, UsageError


def refuse_file(out: Path) -> None:
    """Check that a file may be written.

    Raises:
        EnvironmentProblem: something is there already.
        UsageError: its name, which the file repeats as the model's, is not UTF-8.
    """
    try:
        out.name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{out.name!a} is not valid UTF-8", hint="give another name") from error
    if os.path.lexists(out):
        raise EnvironmentProblem(
            f"{out} exists; existing data is never overwritten", hint="give another name, or remove it"
        )


@contextmanager
def new_file(out: Path, needed: int, *, say: Callable[[str], None] = lambda line: None) -> Iterator[Path]:
    """Yield the path of an empty hidden file beside `out` that becomes `out` on success, and else is removed.

    A killed process leaves the hidden file, which the next one for the same `out` removes.

    Args:
        needed: bytes that will be written.
        say: called with one line for each leftover file that is removed.

    Raises:
        EnvironmentProblem: `out` exists, the disk has less than `needed` bytes free or refuses, or another
            process is writing `out`.
    """
    out = out.absolute()
    refuse_file(out)
    hidden = out.with_name(f".{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out, say)
        need(out.parent, needed)
        with open(hidden, "xb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield hidden
            with open(hidden, "rb+") as written:
                os.fsync(written.fileno())
            refuse_file(out)
            hidden.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        remedy = "free some space, or use another disk"
        raise refusal(error, out, needed, kept="No file was left behind.", remedy=remedy) from error
    finally:
        hidden.unlink(missing_ok=True)


def _sweep(out: Path, say: Callable[[str], None]) -> None:
    """Remove what killed processes left behind for `out`.

    Raises:
        EnvironmentProblem: another process is writing it now.
    """
    name = re.compile(re.escape(f".{out.name}.tmp-") + r"[0-9a-f]{8}\Z")
    for path in list(out.parent.iterdir()):
        if not name.match(path.name) or path.is_symlink() or not path.is_file():
            continue
        with open(path, "rb") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise EnvironmentProblem(
                    f"{out} is being written by another process, in {path.name}",
                    hint="wait for that process, or use another name",
                ) from error
            path.unlink(missing_ok=True)
            say(f"removed {path}, left by an interrupted conversion")
