"""Try what strangers wrote in a process of its own before this one uses it, once for each content.

Libraries trust what they read: a few hundred bytes can abort the process, or take all its memory or minutes.
What was tried is remembered in titan's cache by content and by the library's version. Torch-free.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from titancli.data import trial_child
from titancli.errors import EnvironmentProblem
from titancli.files import read_bytes
from titancli.fingerprint import cache_folder, lock_if_possible

logger = logging.getLogger(__name__)

_GOOD: set[Path] = set()
"""Marks of what this process has found to be good, if the cache cannot be written."""
ALONE = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
"""Environment of a trial: the stacks of a thread for each core could take all of its memory."""
PORTION = 256
"""Number for which it is worth to start another process."""


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


def harms_of(kind: str, library: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Return what harms the process that uses it, and how.

    Only what is not remembered is tried. Of all processes that ask, one tries while the others wait.

    Args:
        kind: a function of `trial_child`.
        library: the package that is used.
        digests: of what is tried, by path, or by the text itself for templates.
    """
    if not digests:
        return {}
    if (suffix := _version(library)) is None:  # who uses it says what to install
        return {}
    folder = cache_folder() / "tried" / kind
    marks = {one: folder / f"{digest}-{suffix}" for one, digest in digests.items()}
    if all(map(_known, marks.values())):
        return {}
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_if_possible(stack.enter_context(open(folder / "lock", "a")))
        except OSError as error:
            logger.warning("%s cannot be written (%s): each process tries anew what it reads", folder, error)
        left = [one for one, mark in marks.items() if not _known(mark)]
        count = min(len(os.sched_getaffinity(0)), -(-len(left) // PORTION))
        portions = [{one: marks[one] for one in left[number::count]} for number in range(count)]
        with ThreadPoolExecutor(max(count, 1)) as pool:
            found = pool.map(partial(_tried, kind, library), portions)
        return {one: reason for harms in found for one, reason in harms.items()}


@cache
def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _known(mark: Path) -> bool:
    return mark in _GOOD or os.path.isfile(mark)  # which is no error in a folder that may not be entered


def _tried(kind: str, library: str, marks: Mapping[str, Path]) -> dict[str, str]:
    """Try all in a process, and in another one after each that harms; remember the good ones."""
    left = list(marks)
    harms: dict[str, str] = {}
    while left:
        done = run_child(kind, left)
        survived = len(done.stdout)
        for one in left[:survived]:
            _GOOD.add(marks[one])
            with suppress(OSError):
                marks[one].touch()
        left = left[survived:]
        harmed = left if done.returncode == 1 else left[:1]  # 1: the library cannot be imported
        harms |= dict.fromkeys(harmed, reason(kind, library, done))
        left = left[len(harmed) :]
    return harms


def run_child(kind: str, given: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a function of `trial_child` in a process of its own, with plain JSON on stdin."""
    command = [sys.executable, "-P", trial_child.__file__, kind]
    env = {**os.environ, **ALONE}
    return subprocess.run(command, input=json.dumps(given).encode(), capture_output=True, env=env)


def reason(kind: str, library: str, done: subprocess.CompletedProcess[bytes]) -> str:
    """Return why a trial failed."""
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode == trial_child.PANIC:
        return f"the library {library} panics: {_line(said)}"
    if done.returncode == trial_child.MEMORY:
        return "it takes all memory"
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {trial_child.SECONDS[kind]} CPU-seconds"
    if done.returncode < 0:
        return f"it ends the process ({signal.Signals(-done.returncode).name}): {_line(said)}"
    return _line((said.splitlines() or ["it ends the process"])[-1])


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
