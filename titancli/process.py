"""What a process is told before and around a run: its noise, its settings, its logs, its parent's death.

Nothing at the top imports torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titancli.runs import timestamp


@dataclass(frozen=True)
class Place:
    """Which rank this is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    restart: int = 0
    """How often the launcher has started the ranks anew."""

    @classmethod
    def from_environment(cls) -> Place:
        """What torchrun set."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
        return cls(*(int(os.environ.get(name, default)) for name, default in zip(names, "0100", strict=True)))


def quiet() -> None:
    """Keep the noise of libraries out of the way of what a run has to say; set before they are imported."""
    for name, value in {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(torch|transformers|datasets)\b")


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Have torch compute the same each time, if that is wanted; all is put back at the end."""
    if wanted:
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if wanted:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark


def log_into(path: Path, who: str) -> None:
    """Send stdout and stderr of this process, and of the libraries in it, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()  # where a crash in native code came from
    print(f"--- {timestamp()} {who} on {socket.gethostname()}", flush=True)


def tell_where_stopped() -> None:
    """Print the stacks of all threads when SIGTERM comes, even in the middle of a collective that hangs.

    Whoever handles the signal already does so afterwards.
    """
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)


def die_with_parent() -> None:
    """Get SIGTERM when the parent process dies, so that nothing is orphaned; Linux only."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def leave_process_group(error_type: Any, error: Any, trace: Any) -> None:
    """Other ranks may be stuck in a collective after an error, and destroying would wait for them."""
    import torch.distributed as dist

    if dist.is_initialized() and (error is None or dist.get_world_size() == 1):
        dist.destroy_process_group()
