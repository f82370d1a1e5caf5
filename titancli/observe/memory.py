"""How much memory a rank uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30


def memory_gib(device: torch.device) -> float:
    """Return the peak memory since the last call, in GiB: reserved by CUDA, else the resident set."""
    if device.type == "cuda":
        import torch

        peak = torch.cuda.max_memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return peak_resident_bytes() / GIB


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process since the last call; where the kernel cannot begin
    anew, since it was started."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    except (OSError, IndexError):  # not Linux, or a kernel without it
        return peak
    return peak
