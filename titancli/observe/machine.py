"""The properties of a machine that change the last bits of a result."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return the CPU's model, the instructions that torch's CPU kernels use, the threads of this process, and
    the versions of CUDA and cuDNN (None without a GPU): plain JSON."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "cpu": cpu_model(),
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": (torch.version.cuda or torch.version.hip) if gpu else None,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
    }


def cpu_model() -> str:
    """Return the CPU's name, as its maker has it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
