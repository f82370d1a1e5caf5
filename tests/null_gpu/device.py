"""What was asked of the null device (`device/counts.c`), in this process."""

from __future__ import annotations

import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_TORCH = find_spec("torch")
LIBRARY = Path(str(_TORCH.origin if _TORCH else "/")).parent / "lib" / "libnull_gpu.so"
KINDS = ("launches", "nodes", "waits", "copies", "fills", "collectives", "allocations")
"""In the order of `enum Count`."""
_EACH = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_long)
_ON_WAIT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_ON_READ = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


@cache
def _library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(LIBRARY))
    found.null_gpu_total.restype = found.null_gpu_contexts.restype = ctypes.c_long
    return found


def total(kind: str) -> int:
    """Return how often something was asked for since the process began."""
    return int(_library().null_gpu_total(KINDS.index(kind)))


def names(kind: str) -> Counter[str]:
    """Return what was asked for, by name: a kernel's, a kind of copy, a call that waits."""
    found: Counter[str] = Counter()
    wanted = KINDS.index(kind)

    def each(number: int, name: bytes, times: int) -> None:
        if number == wanted:
            found[name.decode()] += times

    _library().null_gpu_each(_EACH(each))
    return found


def contexts() -> set[int]:
    """Return the devices on which this process has a context."""
    bits = int(_library().null_gpu_contexts())
    return {device for device in range(bits.bit_length()) if bits >> device & 1}


def numbers(kind: str) -> None:
    """Say what the host reads of the device: what was copied there (`kept`), `zeros`, or `true`: zeros, and 1
    for a single byte or int, as `tensor.all()` and the vote of torch's pipeline stages are read. Kept numbers
    are those of whatever lay in a block before."""
    _library().null_gpu_numbers(("kept", "zeros", "true").index(kind))


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield a list that grows at each wait of the host for a device: the call, and who in titan asked."""
    found: list[str] = []

    def waited(name: bytes) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/titan" in frame.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "a thread of torch"
        found.append(f"{name.decode()} in {place}")

    hook = _ON_WAIT(waited)
    _library().null_gpu_on_wait(hook)
    try:
        yield found
    finally:
        _library().null_gpu_on_wait(_ON_WAIT())


@contextmanager
def reads(answer: Callable[[int], bytes | None]) -> Iterator[None]:
    """Inside the block the host reads what `answer` returns for a copy of so many bytes from the device, and
    for None what it would read otherwise."""

    def read(to: int, size: int) -> int:
        given = answer(size)
        if given is not None:
            ctypes.memmove(to, given, size)
        return given is not None

    hook = _ON_READ(read)
    _library().null_gpu_on_read(hook)
    try:
        yield
    finally:
        _library().null_gpu_on_read(_ON_READ())
