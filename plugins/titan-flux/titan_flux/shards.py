"""Encoded samples in safetensors shards, read one at a time; and random ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_flux import RandomLatents
from titancli import TitanError
from titancli.data.files import corpus_identity, files_of
from titancli.errors import EnvironmentProblem

NAMES = ("latents", "text", "pooled")
RANKS = (4, 3, 2)
"""Number of dimensions of each tensor, samples first."""
DTYPES = ("F32", "BF16", "F16")
OPEN_FILES = 64
SAMPLE = 1 << 26
"""Most numbers in a sample: one of 1024 x 1024 pixels with 512 tokens has about 2.4 million."""


class Encoded(NamedTuple):
    """One sample, or its shapes; all fp32."""

    latents: Any
    """[C, H, W]"""
    text: Any
    """[T, context_dim]"""
    pooled: Any
    """[pooled_dim]"""


class Samples(Protocol):
    """Encoded samples by index."""

    label: str
    """Name in error messages."""
    count: int
    shape: Encoded
    """Shapes of every sample."""
    identity: dict[str, Any]
    """Small plain JSON; equal only if the samples and their order are equal."""

    def read(self, number: int) -> Encoded: ...

    def empty(self) -> tuple[Tensor, Tensor]:
        """Return the empty text: `text` and `pooled`."""
        ...


def write_shard(path: str | Path, samples: Sequence[Mapping[str, Tensor]]) -> None:
    """Write a shard for the dataset `latents`.

    Args:
        samples: each with `latents` [C, H, W], as encoded and scaled by the autoencoder; `text` [T,
            context_dim]; and `pooled` [pooled_dim]. All of the same shapes.
    """
    save_file({name: torch.stack([s[name] for s in samples]).contiguous() for name in NAMES}, path)


class Shards:
    """Safetensors shards on disk. Their headers are read at once, and must all have the same shapes.

    Raises:
        EnvironmentProblem: a file is not a shard, is damaged, or differs from the others; names it.
    """

    label = "dataset latents"

    def __init__(self, paths: Sequence[Path], empty: Path | None, *, shuffle: bool, seed: int) -> None:
        files = files_of(paths)
        shapes = [_shape_of(file.path) for file in files]
        self._paths = [file.path for file in files]
        self._ends = np.cumsum([rows for rows, _ in shapes])
        self.count = int(self._ends[-1])
        self.shape = shapes[0][1]
        for path, (_, shape) in zip(self._paths[1:], shapes[1:], strict=True):
            if shape != self.shape:
                raise EnvironmentProblem(
                    f"{path} has samples of {_text(shape)}, but {self._paths[0]} of {_text(self.shape)}",
                    hint="all samples of a dataset must have the same shape: sort images by size",
                )
        self.identity = corpus_identity(self.label, files, shuffle=shuffle, seed=seed, text=False)
        self._empty = None if empty is None else self._read_empty(empty)

    def read(self, number: int) -> Encoded:
        """Return a sample, fp32.

        Raises:
            EnvironmentProblem: its shard can no longer be read, or has values that are not finite.
        """
        shard = int(np.searchsorted(self._ends, number, side="right"))
        row = number - (int(self._ends[shard - 1]) if shard else 0)
        return _read(self._paths[shard], row)

    def empty(self) -> tuple[Tensor, Tensor]:
        if self._empty is None:
            raise TitanError(f"{self.label} has no empty text", hint='set empty = "empty.safetensors"')
        return self._empty

    def _read_empty(self, path: Path) -> tuple[Tensor, Tensor]:
        _, shape = _shape_of(str(path))
        if shape[1:] != self.shape[1:]:
            raise EnvironmentProblem(
                f"the empty text of {path} has the shapes {_text(shape)}, and the shards' texts "
                f"{_text(self.shape)}",
                hint="encode it like the others",
            )
        return _read(str(path), 0)[1:]


class Random:
    """Random samples, each determined by the seed and its index."""

    label = "dataset random_latents"

    def __init__(self, config: RandomLatents, *, seed: int) -> None:
        self.count = config.count
        self.shape = Encoded(
            (config.channels, config.height, config.width),
            (config.text_length, config.context_dim),
            (config.pooled_dim,),
        )
        self.identity = {"count": self.count, "shape": [list(part) for part in self.shape], "seed": seed}
        self.identity["shuffle"] = config.shuffle
        self._seed = seed

    def read(self, number: int) -> Encoded:
        draw = random_state(self._seed, number).standard_normal
        return Encoded(*(torch.from_numpy(draw(shape).astype(np.float32)) for shape in self.shape))

    def empty(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.shape.text), torch.zeros(self.shape.pooled)


def random_state(seed: int, *numbers: int) -> np.random.RandomState:
    """Return a generator seeded by these numbers, whose streams NumPy guarantees never to change."""
    words = [part & 0xFFFFFFFF for number in (seed, *numbers) for part in (number, number >> 32)]
    return np.random.RandomState(words)


# ------------------------------------------------------------------------------------------- one file


@lru_cache(OPEN_FILES)
def _open(path: str) -> Any:
    return safe_open(path, framework="pt")


def _shape_of(path: str) -> tuple[int, Encoded]:
    """Return the number of samples in a shard, and their shapes."""
    try:
        file = safe_open(path, framework="pt")
        there = set(file.keys())
        slices = {name: file.get_slice(name) for name in NAMES if name in there}
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        dtypes = {name: part.get_dtype() for name, part in slices.items()}
    except (SafetensorError, OSError, RuntimeError) as error:  # the last: it cannot be mapped
        _damaged(path, str(error), error)
    if missing := [name for name in NAMES if name not in there]:
        _damaged(path, f"it has no tensor {' and no '.join(missing)}")
    for name, rank in zip(NAMES, RANKS, strict=True):
        if len(shapes[name]) != rank or 0 in shapes[name]:
            wanted = {"latents": "[N, C, H, W]", "text": "[N, T, context_dim]", "pooled": "[N, pooled_dim]"}
            _damaged(path, f"{name} is {list(shapes[name])}, not {wanted[name]}")
        if dtypes[name] not in DTYPES:
            _damaged(path, f"{name} is {dtypes[name]}, not one of {', '.join(DTYPES)}")
    if (numbers := sum(math.prod(shape[1:]) for shape in shapes.values())) > SAMPLE:
        _damaged(path, f"a sample has {numbers:,} numbers, more than {SAMPLE:,}")
    rows = {shape[0] for shape in shapes.values()}
    if len(rows) > 1:
        counts = ", ".join(f"{name} {shape[0]}" for name, shape in shapes.items())
        _damaged(path, f"its tensors have different numbers of samples: {counts}")
    if any(size % 2 for size in shapes["latents"][2:]):
        _damaged(path, f"latents of {list(shapes['latents'][2:])} cannot be split into patches of 2 x 2")
    return rows.pop(), Encoded(*(shapes[name][1:] for name in NAMES))


def _read(path: str, row: int) -> Encoded:
    try:
        file = _open(path)
        found = Encoded(*(file.get_slice(name)[row].float() for name in NAMES))
    except (SafetensorError, OSError, IndexError) as error:
        _damaged(path, str(error), error)
    for name, tensor in zip(NAMES, found, strict=True):
        if not torch.isfinite(tensor).all():
            _damaged(path, f"{name} of sample {row} (from 0) has values that are not finite")
    return found


def _damaged(path: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise EnvironmentProblem(
        f"{path} is not a valid shard of latents: {reason}", hint="encode it again, or remove it from paths"
    ) from cause


def _text(shape: Encoded) -> str:
    return ", ".join(f"{name} {list(part)}" for name, part in zip(NAMES, shape, strict=True))
