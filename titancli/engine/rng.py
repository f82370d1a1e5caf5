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
        self._seed = derive(*parts)
        self._device = None if device.type == "cpu" else device
        self._state: _State | None = None
        """Where it was left; None: nothing was drawn yet."""

    def copy(self) -> Stream:
        """Return one that draws the same from now on."""
        return copy(self)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from this; afterwards, and where something raises, the process's generators are as before."""
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


def _seed_all(seed: int, device: torch.device | None) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device is not None:
        state = torch.Generator(device).manual_seed(seed).get_state()
        torch.get_device_module(device).set_rng_state(state, device)


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
