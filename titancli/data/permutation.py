"""Random orders of any length that are never held in memory: each position is computed by itself.

A Feistel network permutes all numbers of a given bit width; results outside the range go through it again
(cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It is pure integer
arithmetic, so the order is the same on every machine and with every version of NumPy.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permuted(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Return which of `count` items are at some positions of an epoch's order, int64 of the same shape.

    Args:
        places: int64, from 0 to `count - 1`.
    """
    bits = max(2, (count - 1).bit_length())
    left, right = bits // 2, bits - bits // 2
    keys = _keys(seed, epoch)
    found = _network(places.astype(np.uint64), left, right, keys)
    while len(outside := np.flatnonzero(found >= count)):
        found[outside] = _network(found[outside], left, right, keys)
    return found.astype(np.int64)


def drawn(numbers: np.ndarray, seed: int, epoch: int, which: int) -> np.ndarray:
    """Return a random number from 0 to 1 for each item in an epoch, float64 of the same shape.

    Args:
        numbers: indices of the items, int64.
        which: 0 to ROUNDS - 1; selects one of several independent draws.
    """
    key = _keys(seed ^ _GOLDEN, epoch)[which]  # independent of the keys of the order
    return (_hash(numbers.astype(np.uint64), key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _keys(seed: int, epoch: int) -> list[int]:
    state = ((seed & _MASK) ^ _mixed(epoch + 1)) & _MASK
    return [_mixed(state + (number + 1) * _GOLDEN) for number in range(ROUNDS)]


def _mixed(value: int) -> int:
    """Apply the finalizer of SplitMix64."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _network(values: np.ndarray, left: int, right: int, keys: list[int]) -> np.ndarray:
    high, low = values >> np.uint64(right), values & np.uint64((1 << right) - 1)
    for number, key in enumerate(keys):
        if number % 2:
            low ^= _hash(high, key) & np.uint64((1 << right) - 1)
        else:
            high ^= _hash(low, key) & np.uint64((1 << left) - 1)
    return (high << np.uint64(right)) | low


def _hash(values: np.ndarray, key: int) -> np.ndarray:
    mixed = values + np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
