"""Peak bf16 throughput of devices, for model FLOPs utilisation: dense, as their makers say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TFLOPS: tuple[tuple[str, float], ...] = (
    # The first pattern found in the device's name counts, so the narrower stand first.
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.0),
    (r"\bG?H200\b", 989.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100\b", 989.0),
    (r"\bH20\b", 148.0),
    (r"\bA100\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bMI300X\b", 1307.0),
    (r"\bMI325X\b", 1307.0),
)


def peak_flops(name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by its name; None for a device that is not known.

    An unknown device has no utilisation: one measured against another device's peak is worth nothing.
    """
    for pattern, tflops in TFLOPS:
        if re.search(pattern, name, re.IGNORECASE):
            return tflops * 1e12
    return None


def device_peak(device: torch.device) -> float | None:
    """`peak_flops` of a device of this process; None for a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return peak_flops(torch.cuda.get_device_name(device))
