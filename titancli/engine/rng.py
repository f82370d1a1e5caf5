"""Random numbers that depend only on the seed, whatever the layout."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor


def derive(*parts: object) -> int:
    """Derive a 63-bit seed from printable values."""
    return xxhash.xxh64_intdigest("\0".join(map(str, parts)).encode()) >> 1


def generator_for(seed: int, device: torch.device) -> Callable[[str], torch.Generator]:
    """Return a function that gives a generator for each parameter name."""
    return lambda name: torch.Generator(device).manual_seed(derive(seed, name))


class Stream:
    """Random numbers that depend only on a seed and replace the process's own during a computation.

    The stream covers the generators of Python, NumPy, torch and the device, and continues between calls: the
    calls of a step draw the same numbers as a single call would. Its state need not be saved.
    """

    def __init__(self, device: torch.device, *parts: object) -> None:
        """Seed the stream with `derive(*parts)`."""
        self._seed = derive(*parts)
        self._device = None if device.type == "cpu" else device
        self._state: _State | None = None
        """The state after the last use; None before the first."""

    def copy(self) -> Stream:
        """Return a stream that draws the same numbers from now on."""
        return copy(self)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from this stream in the block, and restore the process's generators after it."""
        own = _State.now(self._device)
        if self._state is None:
            _seed_all(self._seed, self._device)
        else:
            self._state.take_effect(self._device)
        try:
            yield
        finally:
            self._state = _State.now(self._device)
            own.take_effect(self._device)


@contextmanager
def rewound(device: torch.device) -> Iterator[None]:
    """Draw in the block what will be drawn once more after it."""
    on_device = None if device.type == "cpu" else device
    state = _State.now(on_device)
    try:
        yield
    finally:
        state.take_effect(on_device)


def _seed_all(seed: int, device: torch.device | None) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device is not None:
        state = torch.Generator(device).manual_seed(seed).get_state()
        torch.get_device_module(device).set_rng_state(state, device)


class _State(NamedTuple):
    """The states of every generator that a step may draw from."""

    python: Any
    numpy: Any
    cpu: Tensor
    device: Tensor | None

    @classmethod
    def now(cls, device: torch.device | None) -> _State:
        # The state of a GPU's generator is on the host: reading it does not wait for the device.
        on_device = None if device is None else torch.get_device_module(device).get_rng_state(device)
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device)

    def take_effect(self, device: torch.device | None) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)
