"""Random numbers that follow from the seed alone, whatever the layout."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
import xxhash


def derive(*parts: object) -> int:
    """A 63-bit seed from anything that prints."""
    return xxhash.xxh64_intdigest("\0".join(map(str, parts)).encode()) >> 1


def generator_for(seed: int, device: torch.device) -> Callable[[str], torch.Generator]:
    """A generator for each parameter name."""
    return lambda name: torch.Generator(device).manual_seed(derive(seed, name))


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Seed Python, NumPy and torch for one step, so that there is no random state to save.

    Nothing is lost on another layout either.
    """
    value = derive(seed, step, dp_rank)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
