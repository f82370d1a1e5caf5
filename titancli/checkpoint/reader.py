"""A checkpoint's tensors, whole and one at a time, without torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from titancli.checkpoint.exclude import NOTHING, Exclusion
from titancli.checkpoint.format.layout import Chunk
from titancli.checkpoint.format.manifest import DamagedCheckpoint, Verify
from titancli.checkpoint.format.metadata import Described
from titancli.checkpoint.format.reader import Part, Reader
from titancli.checkpoint.format.tensorfile import Entry, read_header
from titancli.checkpoint.format.tensors import TORCH_DTYPE, read_tensor
from titancli.checkpoint.load import open_checkpoint
from titancli.errors import EnvironmentProblem, TitanError


class CheckpointReader:
    """A checkpoint's tensors, whole and one at a time, in one process without torch.distributed.

    Raises:
        EnvironmentProblem: the folder is not a checkpoint, or is damaged; names the file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        verify: Verify = "full",
        prefix: str = "",
        reuse: bool = False,
        exclude: Exclusion = NOTHING,
    ) -> None:
        """Open the checkpoint.

        Args:
            prefix: read only tensors whose name begins with this, and drop it from the names (`"model."`).
            reuse: assemble a tensor of several pieces in the memory of the previous one: fresh memory
                costs more than the copy.
        """
        self.folder = folder
        self._room: Tensor | None = torch.empty(0, dtype=torch.uint8) if reuse else None
        self.manifest, self._metadata = open_checkpoint(folder, verify=verify)
        self._tensors = {
            n.removeprefix(prefix): (n, tensor)
            for n, tensor in self._metadata.tensors.items()
            if n.startswith(prefix) and not exclude.has(n)
        }
        self._header = cache(lambda file: read_header(folder / file))

    def leave_out(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Forget the tensors with these names, and return the names."""
        found = [name for name in self._tensors if unwanted(name)]
        for name in found:
            del self._tensors[name]
        return found

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._described(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPE[self._described(name)[1].dtype]

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, on the CPU; if it is stored in one piece, it is mapped, not yet read."""
        stored, _ = self._described(name)
        try:
            layout = self._metadata.layouts({stored: None})[stored]
        except EnvironmentProblem as error:
            raise DamagedCheckpoint(self.folder, error.message) from error
        # The pieces are looked up before the whole is allocated, so that a false shape costs nothing.
        filled = [chunk for chunk in layout.chunks if math.prod(chunk.shape)]
        entries = [self._entry(chunk, layout.dtype) for chunk in filled]
        if len(filled) == 1:
            return read_tensor(self.folder / filled[0].file, entries[0])
        whole = self._empty(layout.shape, TORCH_DTYPE[layout.dtype])
        box = (0,) * len(layout.shape), layout.shape
        Reader(self.folder, {stored: layout}, None).fill([Part(stored, box, whole)])
        return whole

    def _entry(self, chunk: Chunk, dtype: str) -> Entry:
        """Return a chunk's entry in its file, whose header must agree with the metadata."""
        entry = Entry(chunk.key, dtype, chunk.shape, chunk.start)
        if self._header(chunk.file).get(chunk.key) != entry:
            raise EnvironmentProblem(
                f"{self.folder / chunk.file} is damaged: it does not hold {chunk.key!r} as {dtype} "
                f"{list(chunk.shape)} at byte {chunk.start}"
            )
        return entry

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._room is None:
            return torch.empty(shape, dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        if self._room.numel() < size:
            self._room = torch.empty(0, dtype=torch.uint8)  # never both
            self._room = torch.empty(size, dtype=torch.uint8)
        return self._room[:size].view(dtype).view(shape)

    def _described(self, name: str) -> tuple[str, Described]:
        if name not in self._tensors:
            raise TitanError(f"checkpoint {self.folder} has no tensor {name!r}")
        return self._tensors[name]
