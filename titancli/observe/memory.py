"""How much memory a rank uses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30


def memory_gib(device: torch.device) -> float:
    """Memory in GiB: on CUDA the peak that the allocator reserved since the last call, else the process's
    resident set."""
    if device.type == "cuda":
        import torch

        peak = torch.cuda.max_memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resident_bytes() / GIB


def resident_bytes() -> int:
    """The resident set of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: the peak is what can be asked for everywhere
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
