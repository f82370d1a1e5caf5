"""Activation offload: what blocks keep for backward waits in the host's memory.

A block's saved tensors are copied to pinned memory while the next block computes, and back while the block
after it goes backward, on streams of their own: the device holds those of two blocks. The host waits for
nothing; the device waits where copies take longer than a block. Whole storages are moved, bit for bit, so
that tensors which share memory do so afterwards. Source: vDNN (arXiv 1602.08124), by the hooks of
`torch.autograd.graph`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from titan_offload import ActivationOffload
from titancli.distributed.local import local
from titancli.engine import Engine

LEAST = 1 << 20
"""Bytes of the smallest storage that is worth a copy."""


class Offload:
    """A callback (`titancli.protocols.Callback`) that has only to be built."""

    def __init__(self, engine: Engine) -> None:
        keep_last = engine.mesh.degrees.pp == 1
        for part in engine.parts:
            offload_activations(part.layers, engine.device, keep_last=keep_last)

    def run_start(self, step: int) -> None:
        """Everything is in its place already."""


def build(config: ActivationOffload, *, engine: Engine, run: Any) -> Offload:
    return Offload(engine)


def offload_activations(layers: nn.ModuleDict, device: torch.device, *, keep_last: bool) -> None:
    """Have blocks offload what they keep; in place, around everything else that their forward does.

    Args:
        keep_last: whether the last block keeps its own, since its backward comes next.
    """
    way = _Way(device)
    for number, block in enumerate(layers.values()):
        stays = keep_last and number == len(layers) - 1
        block.forward = partial(way.forward, block, number == 0, stays, block.forward)


class _Way:
    """The way between device and host, with a stream for each direction; a CPU copies at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, streams = device, device.type == "cuda"
        self.down, self.up = (torch.cuda.Stream(device) if streams else None for _ in range(2))
        self._last: Callable[[], _Call | None] = lambda: None
        self._leaving: _Call | None = None

    def forward(
        self, block: nn.Module, first: bool, stays: bool, forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a block's forward, free what the block before it has kept, and begin to copy what this one
        has."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = _Call(self, None if first else self._last())
        with saved_tensors_hooks(call.pack, call.unpack):
            out = forward(*args, **kwargs)
        if self._leaving is not None:
            self._leaving.left()
        self._leaving = None if stays else call
        if not stays:
            inputs = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor) and not x.requires_grad]
            call.leave((*map(local, block.parameters()), *block.buffers(), *inputs))
        call.kept.clear()
        self._last = weakref.ref(call)
        return out

    def copies(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context of copies that begin after all that was called on the current stream."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        return torch.cuda.stream(stream)


class _Storage:
    """The memory of saved tensors, as bytes: on the device, on the host, or on both."""

    def __init__(self, whole: torch.UntypedStorage) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=whole.device)
        self.device: Tensor | None = empty.set_(whole, 0, (whole.nbytes(),), (1,))
        self.host: Tensor | None = None


class _Kept:
    """A saved tensor: itself, or where it lies in a storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Any = tensor
        self.storage: Any = None

    def move_with(self, storage: _Storage) -> None:
        x, self.tensor, self.storage = self.tensor, None, storage
        self.dtype, self.place = x.dtype, (x.storage_offset(), x.shape, x.stride())

    def get(self) -> Tensor:
        if self.storage is None:
            return self.tensor
        whole = self.storage.device.untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=whole.device).set_(whole, *self.place)


class _Call:
    """What one forward of a block has kept."""

    def __init__(self, way: _Way, before: _Call | None) -> None:
        self.way, self.before = way, before
        self.kept: list[_Kept] = []
        self.storages: list[_Storage] = []
        self.away = self.wanted = False
        self.copied: Any = None
        """Event after the latest copies."""

    def pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self.kept.append(kept)
        return kept

    def unpack(self, kept: _Kept) -> Tensor:
        if kept.storage is not None:
            self.load()
            if self.before is not None:
                self.before.load()
            if self.copied is not None:
                self.copied.wait()
        return kept.get()

    def leave(self, staying: Iterable[Tensor]) -> None:
        """Begin to copy to the host what was saved, except for the memory of `staying` tensors."""
        stay = {x.untyped_storage()._cdata for x in staying}
        moving: dict[int, _Storage] = {}
        for kept in self.kept:
            x = kept.tensor
            if type(x) is not Tensor or not x.is_floating_point():
                continue
            whole = x.untyped_storage()  # of a parameter that FSDP2 has freed, it is empty
            if whole._cdata not in stay and whole.nbytes() >= LEAST:
                kept.move_with(moving.setdefault(whole._cdata, _Storage(whole)))
        self.storages, down = list(moving.values()), self.way.down
        with self.way.copies(down):
            for one in self.storages:
                one.host = torch.empty(len(one.device), dtype=torch.uint8, pin_memory=down is not None)  # type: ignore[arg-type]
                one.host.copy_(one.device, non_blocking=True)  # type: ignore[arg-type]
            self.copied = down.record_event() if down is not None else None

    def left(self) -> None:
        """Free the device's memory when the copies are complete."""
        if self.wanted:
            return
        if self.copied is not None:
            self.copied.wait()
        for one in self.storages:
            one.device = None
        self.away = True

    def load(self) -> None:
        """Begin to copy everything back, once."""
        if self.wanted:
            return
        self.wanted, up = True, self.way.up
        if self.away:
            for one in self.storages:  # memory of the current stream, which uses it
                one.device = torch.empty(len(one.host), dtype=torch.uint8, device=self.way.device)  # type: ignore[arg-type]
            with self.way.copies(up):
                for one in self.storages:
                    one.device.copy_(one.host, non_blocking=True)  # type: ignore[union-attr, arg-type]
                self.copied = up.record_event() if up is not None else None
        for one in self.storages:
            one.host = None
        self.storages = []  # each is freed with the last tensor that lies in it
