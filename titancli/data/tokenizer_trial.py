"""Try a tokenizer.json in a process of its own before this one loads it, once for each content.

The library `tokenizers` trusts the file: one of a few hundred bytes can abort the process, or take all its
memory or minutes. Torch-free.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import xxhash

from titancli.data import tokenizer_child
from titancli.errors import EnvironmentProblem
from titancli.files import read_bytes
from titancli.fingerprint import cache_folder

logger = logging.getLogger(__name__)


def try_first(path: Path) -> str:
    """Return the digest of a tokenizer.json that does not harm the process that loads it.

    What was tried is remembered in titan's cache by content and by the library's version.

    Raises:
        EnvironmentProblem: it cannot be read, or the trial died, ran out of its limits, or panicked.
    """
    try:
        digest = xxhash.xxh3_128_hexdigest(read_bytes(path))
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror or error}") from error
    good = cache_folder() / "tokenizers" / f"{digest}-{version('tokenizers')}"
    if good.is_file():
        return digest
    done = subprocess.run(
        [sys.executable, "-I", tokenizer_child.__file__, str(path.absolute())],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise EnvironmentProblem(
            f"{path} cannot be used as a tokenizer: {_reason(done)}",
            hint="download it again, or save it again with save_pretrained of transformers",
        )
    try:
        good.parent.mkdir(parents=True, exist_ok=True)
        good.touch()
    except OSError as error:
        logger.warning("%s cannot be kept (%s): the tokenizer is tried at each start", good, error)
    return digest


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return why a trial failed."""
    if done.returncode == tokenizer_child.PANIC:
        return "the library tokenizers panics: " + " ".join(done.stdout.split())[:200]
    if done.returncode == -signal.SIGXCPU or done.returncode == -signal.SIGKILL:
        return f"it takes more than {tokenizer_child.SECONDS} CPU-seconds"
    if done.returncode < 0:
        said = " ".join(done.stderr.split())[:200]
        return f"it ends the process ({signal.Signals(-done.returncode).name}): {said}"
    return (done.stderr.strip().splitlines() or ["it ends the process"])[-1][:200]
