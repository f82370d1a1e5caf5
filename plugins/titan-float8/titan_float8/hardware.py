"""Which products the current GPU multiplies itself, and which are emulated."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch

from titan_float8.selection import logger
from titancli.errors import EnvironmentProblem

if TYPE_CHECKING:
    from titancli.observe.peaks import Device

Kernel = Literal["emulated", "hopper", "torchao", "planned"]
Formats = Literal["float8", "float8 groups", "MXFP8", "NVFP4"]
NEEDED: dict[str, str] = {
    "float8": "a GPU of compute capability 8.9 or later",
    "float8 groups": "a GPU of compute capability 9.0 (H100, H200)",
    "MXFP8": "a GPU of compute capability 10.0 (B200)",
    "NVFP4": "a GPU of compute capability 10.0 (B200)",
}
"""What multiplies each format, in words."""


def has(what: Formats) -> bool:
    """Return whether the current GPU multiplies matrices of this format."""
    if not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability()
    if torch.version.hip:  # gfx942, gfx950 and gfx12 support float8; gfx90a and gfx11 do not
        return what == "float8" and ((9, 4) <= capability < (10, 0) or capability >= (12, 0))
    if what == "float8":
        return capability >= (8, 9)
    return capability[0] == (9 if what == "float8 groups" else 10)


def planned_on(device: Device, what: Formats) -> bool:
    """Return whether a device that a plan is made for multiplies matrices of this format."""
    if what == "float8":
        return device.float8 is not None
    if what == "float8 groups":
        return device.name in ("H100", "H200")
    return device.float4 is not None


def kernel_for(
    converter: str, what: Formats, emulate: bool | None, own: Kernel, planned: Device | None
) -> Kernel:
    """Return who multiplies.

    Args:
        emulate: the converter's field; None: where the hardware cannot.
        own: who multiplies on the hardware.
        planned: the device that a plan is made for; None: for the device of this process.

    Raises:
        EnvironmentProblem: `emulate = false` without the hardware.
    """
    if planned is not None:
        return (
            "planned" if emulate is False or (emulate is None and planned_on(planned, what)) else "emulated"
        )
    if emulate or (emulate is None and not has(what)):
        if emulate is None and torch.cuda.is_available():
            logger.warning(
                "%s emulates %s, slower than bf16: its products need %s", converter, what, NEEDED[what]
            )
        return "emulated"
    if not has(what):
        raise EnvironmentProblem(
            f"{converter}: emulate = false, but {what} needs {NEEDED[what]}",
            hint="remove emulate, or run on such a GPU",
        )
    if own == "torchao" and find_spec("triton") is None:
        raise EnvironmentProblem(f"{converter}: torchao's kernels need the package triton")
    return own
