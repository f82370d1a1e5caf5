"""A folder that is whole or absent: written under a hidden name, renamed when all of it is on the disk.

For exported and converted weights, which no run looks after. Torch-free.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titancli.checkpoint.format.disk import need, refusal, sync_folder
from titancli.errors import EnvironmentProblem


@contextmanager
def new_folder(out: Path, needed: int, *, say: Callable[[str], None] = lambda line: None) -> Iterator[Path]:
    """Yield a hidden folder beside `out` that becomes `out` on success and is removed otherwise.

    A killed process leaves the hidden folder, which the next one for the same `out` removes.

    Args:
        out: a folder that does not exist or is empty.
        needed: bytes that will be written.
        say: called with one line for each leftover folder that is removed.

    Raises:
        EnvironmentProblem: `out` is not empty, the disk has less than `needed` bytes free or refuses, or
            another process is writing `out`.
    """
    out = out.absolute()
    refuse_used(out)
    hidden = out.with_name(f".{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out, say)
        need(out.parent, needed)
        hidden.mkdir()
        with _claimed(hidden):
            yield hidden
            sync_folder(hidden)
            hidden.rename(out)
            sync_folder(out.parent)
    except OSError as error:
        remedy = "free some space, or use another disk"
        raise refusal(error, out, needed, kept="No files were left behind.", remedy=remedy) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def refuse_used(out: Path) -> None:
    """Check that a folder may be written.

    Raises:
        EnvironmentProblem: it is a file, or is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise EnvironmentProblem(
            f"{out} {what}; existing data is never overwritten", hint="give a folder that does not exist"
        )


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which the system releases when this process ends for any reason.

    Raises:
        BlockingIOError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _sweep(out: Path, say: Callable[[str], None]) -> None:
    """Remove what killed processes left behind for `out`.

    Raises:
        EnvironmentProblem: another process is writing it now.
    """
    name = re.compile(re.escape(f".{out.name}.tmp-") + r"[0-9a-f]{8}\Z")
    for path in list(out.parent.iterdir()):
        if not name.match(path.name) or path.is_symlink() or not path.is_dir():
            continue
        try:
            with _claimed(path):
                shutil.rmtree(path)
        except BlockingIOError as error:
            raise EnvironmentProblem(
                f"{out} is being written by another process, in {path.name}",
                hint="wait for that process, or use another folder",
            ) from error
        except OSError as error:
            say(f"{path}, left by an interrupted conversion, cannot be removed: {error.strerror}")
        else:
            say(f"removed {path}, left by an interrupted conversion")
