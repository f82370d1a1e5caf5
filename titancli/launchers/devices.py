"""Counting GPUs without importing torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

NVIDIA = Path("/proc/driver/nvidia/gpus")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Under which torch finds its settings."""


def visible_gpus() -> int:
    """GPUs that a process started now would see."""
    return len(visible_gpu_names())


def visible_gpu_names() -> list[str]:
    """Return the same as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(_installed())]
    names = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or name == "-1" or name in names:  # CUDA sees none from the first bad name on
            break
        names.append(name)
    # A machine without GPUs stays one, whatever the variable says; MIG names are no index.
    installed = _installed()
    return [n for n in names if not n.isdecimal() or int(n) < installed] if installed else []


def visible_gpu_models() -> list[str]:
    """Return the makers' names of the same GPUs; empty if the driver does not say them."""
    models = [one.partition(": ")[2].partition(" (UUID")[0] for one in _listed()]
    numbers = [int(name) for name in visible_gpu_names() if name.isdecimal()]
    return [models[number] for number in numbers if number < len(models)]


def allocator_settings() -> dict[str, str]:
    """Return the environment variables with which torch's allocator leaves least to fragments: its segments
    grow into each other's space. None where there is no GPU, or the user has set others. They take effect in
    a process that has not used a GPU yet."""
    if any(name in os.environ for name in ALLOCATOR) or not visible_gpus():
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def _installed() -> int:
    with contextlib.suppress(OSError):  # no NVIDIA driver, or a container that hides /proc/driver
        return sum(1 for _ in NVIDIA.iterdir())
    return len(_listed())


def _listed() -> list[str]:
    """Return the lines of `nvidia-smi -L`, such as `GPU 0: NVIDIA H200 (UUID: GPU-…)`."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
