"""Try files in a process of their own before this one reads them, once for each content.

Libraries trust what they read: a file of a few hundred bytes can abort the process, or take all its memory or
minutes. What was tried is remembered in titan's cache by content and by the library's version. Torch-free.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import xxhash

from titancli.data import trial_child
from titancli.errors import EnvironmentProblem
from titancli.files import read_bytes
from titancli.fingerprint import cache_folder, lock_if_possible

logger = logging.getLogger(__name__)

PORTION = 256
"""Files for which it is worth to start a process."""


def try_tokenizer(path: Path) -> str:
    """Return the digest of a tokenizer.json that does not harm the process that loads it.

    Raises:
        EnvironmentProblem: it cannot be read, or the trial died, ran out of its limits, or panicked.
    """
    try:
        digest = xxhash.xxh3_128_hexdigest(read_bytes(path))
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror or error}") from error
    for reason in harms_of("tokenizer", "tokenizers", {str(path.absolute()): digest}).values():
        raise EnvironmentProblem(
            f"{path} cannot be used as a tokenizer: {reason}",
            hint="download it again, or save it again with save_pretrained of transformers",
        )
    return digest


def harms_of(kind: str, library: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return the files that harm the process that reads them, and how.

    Only files that are not remembered are tried. Of all processes that ask for some, one tries them while the
    others wait.

    Args:
        kind: a function of `trial_child`.
        library: the package that reads the files.
        files: digests of what is tried, by path.
    """
    folder, suffix = cache_folder() / "tried" / kind, version(library)
    marks = {path: folder / f"{digest}-{suffix}" for path, digest in files.items()}
    if all(mark.is_file() for mark in marks.values()):
        return {}
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_if_possible(stack.enter_context(open(folder / "lock", "a")))
        except OSError as error:
            logger.warning("%s cannot be written (%s): files are tried at each start", folder, error)
        left = {path: mark for path, mark in marks.items() if not mark.is_file()}
        count = min(len(os.sched_getaffinity(0)), -(-len(left) // PORTION))
        portions = [dict(list(left.items())[number::count]) for number in range(count)]
        with ThreadPoolExecutor(max(count, 1)) as pool:
            found = pool.map(partial(_tried, kind, library), portions)
        return {path: reason for harms in found for path, reason in harms.items()}


def _tried(kind: str, library: str, marks: Mapping[str, Path]) -> dict[str, str]:
    """Try files in a process, and in another one after each that harms; remember the good ones."""
    left, harms = list(marks), {}
    while left:
        done = subprocess.run(
            [sys.executable, "-P", trial_child.__file__, kind],
            input=b"\0".join(map(os.fsencode, left)),
            capture_output=True,
        )
        survived = len(done.stdout)
        with suppress(OSError):
            for path in left[:survived]:
                marks[path].touch()
        if survived < len(left):
            harms[left[survived]] = _reason(library, done)
        left = left[survived + 1 :]
    return harms


def _reason(library: str, done: subprocess.CompletedProcess[bytes]) -> str:
    """Return why a trial failed."""
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode == trial_child.PANIC:
        return f"the library {library} panics: {_line(said)}"
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {trial_child.SECONDS} CPU-seconds"
    if done.returncode < 0:
        return f"it ends the process ({signal.Signals(-done.returncode).name}): {_line(said)}"
    return _line((said.splitlines() or ["it ends the process"])[-1])


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
