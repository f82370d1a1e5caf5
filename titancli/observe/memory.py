"""Memory use of a rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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


def live_bytes(
    parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer | None, device: torch.device
) -> dict[str, int]:
    """Return the bytes on this rank by what they are for: `parameters`, `optimizer` (its state) and, on a
    GPU, the most that its allocator has had `allocated` and `reserved` since the last entry of metrics."""
    import torch

    def size(values: Iterable[Any]) -> int:
        tensors = [getattr(value, "_local_tensor", value) for value in values]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    states = [] if optimizer is None else optimizer.state.values()
    found = {"parameters": size(parameters), "optimizer": sum(size(state.values()) for state in states)}
    if device.type == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated(device)
        found["reserved"] = torch.cuda.max_memory_reserved(device)
    return found
