"""Peak rates of devices according to their makers: bf16 throughput (dense) for model FLOPs utilisation, and
for plans memory and links as well."""

from __future__ import annotations

import re
from dataclasses import dataclass
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
    (r"\bA10\b", 125.0),
    (r"\bRTX ?4090\b", 165.2),
    (r"\bMI300X\b", 1307.0),
    (r"\bMI325X\b", 1307.0),
)


def peak_flops(name: str) -> float | None:
    """Return the peak bf16 FLOP/s of a device by its name; None for an unknown device.

    An unknown device has no utilisation: one measured against another device's peak is worth nothing.
    """
    for pattern, tflops in TFLOPS:
        if re.search(pattern, name, re.IGNORECASE):
            return tflops * 1e12
    return None


def device_name(device: torch.device) -> str:
    """Return the name of a device of this process, as its maker has it."""
    if device.type != "cuda":
        return "CPU"
    import torch

    return torch.cuda.get_device_name(device)


def device_peak(device: torch.device) -> float | None:
    """Return the `peak_flops` of a device of this process; None for a CPU."""
    return peak_flops(device_name(device)) if device.type == "cuda" else None


# ------------------------------------------------------------------------------- what a plan is made for


@dataclass(frozen=True)
class Device:
    """One device and its links, in bytes and seconds. None: not published, and not guessed."""

    name: str
    flops: float | None = None
    """Peak bf16 operations a second, dense."""
    memory: float | None = None
    """Bytes of memory, as the driver reports them."""
    memory_rate: float | None = None
    """Bytes a second between it and the memory."""
    link_rate: float | None = None
    """Bytes a second to the other devices of the node, each way."""
    network_rate: float | None = None
    """Bytes a second to other nodes, each way, for each device."""
    node: int = 8
    """Devices of one node."""
    host_rate: float | None = None
    """Bytes a second to the host's memory, each way."""
    float8: float | None = None
    """Peak operations a second of float8 products, dense; None: it has none, or they are not published."""
    float4: float | None = None
    """The same of products of 4-bit numbers."""

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    def peak(self, bits: int) -> float | None:
        """Return the peak operations a second of products of numbers of so many bits; of wider ones, or
        without kernels for them, of bf16's."""
        return {4: self.float4, 8: self.float8}.get(bits) or self.flops

    def known_as(self, name: str) -> bool:
        """Return whether this is the device that its maker calls by this name, such as `NVIDIA H200`."""
        return re.search(rf"\b{self.name}\b", name.replace("RTX ", "RTX")) is not None


def _sxm(
    name: str, gib: float, memory: float, link: float, network: float, host: float, *narrow: float
) -> Device:
    """Memory in GiB, rates in GB a second; float8 and 4-bit products in TFLOPS."""
    rates = (gib * 2**30, memory * 1e9, link * 1e9, network * 1e9)
    return Device(name, peak_flops(name), *rates, 8, host * 1e9, *(one * 1e12 for one in narrow))


def _card(name: str, gib: float, memory: float, *narrow: float) -> Device:
    rates = (gib * 2**30, memory * 1e9, 32e9, None)
    return Device(name, peak_flops(name), *rates, 8, 32e9, *(one * 1e12 for one in narrow))


DEVICES = {
    device.name: device
    for device in (
        # NVIDIA's data sheets of the SXM parts and of the DGX systems: memory, NVLink (half of the sum of
        # both ways), the one ConnectX of 200 or 400 Gb/s that each GPU has, and PCIe 4.0 or 5.0.
        _sxm("A100", 79.2, 2039, 300, 25, 32),
        _sxm("H100", 79.2, 3350, 450, 50, 64, 1979),
        _sxm("H200", 139.8, 4800, 450, 50, 64, 1979),
        _sxm("B200", 178.4, 8000, 900, 50, 64, 4500, 9000),
        # Cards without NVLink: sixteen lanes of PCIe 4.0, and no network of their own.
        _card("A10", 22.5, 600),
        _card("L4", 22.5, 300, 242),
        _card("L40S", 45.0, 864, 733),
        _card("RTX4090", 24.0, 1008, 330.3),
        Device("cpu"),
    )
}
