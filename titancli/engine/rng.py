"""Random numbers that follow from the seed alone, whatever the layout."""

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
    """Derive a 63-bit seed from anything that prints."""
    return xxhash.xxh64_intdigest("\0".join(map(str, parts)).encode()) >> 1


def generator_for(seed: int, device: torch.device) -> Callable[[str], torch.Generator]:
    """Return a function that gives a generator for each parameter name."""
    return lambda name: torch.Generator(device).manual_seed(derive(seed, name))


class Stream:
    """Random numbers that follow from a seed, in the place of the process's own while something computes.

    It is Python's, NumPy's and torch's generators, the device's too, and it goes on where it was left: calls
    that make up one step draw as one would. No state of it needs to be saved.
    """

    def __init__(self, device: torch.device, *parts: object) -> None:
        """`parts` are what `derive` makes the seed of."""
        value = derive(*parts)
        self._device = None if device.type == "cpu" else device
        self._state = _State(
            random.Random(value).getstate(),
            np.random.RandomState(value % 2**32).get_state(),
            torch.Generator().manual_seed(value).get_state(),
            None if self._device is None else torch.Generator(self._device).manual_seed(value).get_state(),
        )

    def copy(self) -> Stream:
        """Return one that draws the same from now on."""
        return copy(self)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from this; afterwards, and where something raises, the process's generators are as before."""
        own = _State.now(self._device)
        self._state.take_effect(self._device)
        try:
            yield
        finally:
            self._state = _State.now(self._device)
            own.take_effect(self._device)


class _State(NamedTuple):
    """Of every generator that a step may draw from."""

    python: Any
    numpy: Any
    cpu: Tensor
    device: Tensor | None

    @classmethod
    def now(cls, device: torch.device | None) -> _State:
        # The state of a GPU's generator is on the host: nothing waits for the device.
        on_device = None if device is None else torch.get_device_module(device).get_rng_state(device)
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device)

    def take_effect(self, device: torch.device | None) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)
