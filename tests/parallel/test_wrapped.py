"""Titan's wrappers of methods are told from those of others."""

from __future__ import annotations

import pytest
from torch import Tensor, nn, ones

from titancli.parallel.wrapped import as_written, is_wrapped, wrap


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def around(block: Block, factor: float, *, titans: bool = True) -> None:
    run = block.forward

    def forward(x: Tensor) -> Tensor:
        return run(x) * factor

    if titans:
        wrap(block, "forward", forward)
    else:
        block.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("order", "left"),
    [
        ("", 1),
        ("t", 1),
        ("tt", 1),
        ("o", 2),
        ("ot", 2),
        ("ott", 2),
        ("to", 2 * 3),  # what is around titan's own has that in it
        ("tot", 2 * 3),
        ("oto", 2 * 2 * 3),
    ],
)
def test_titans_own_are_taken_off_and_put_back(order: str, left: float) -> None:
    """By who wraps the block: t titan (times 3), o another (times 2)."""
    block = Block()
    for who in order:
        around(block, 3 if who == "t" else 2, titans=who == "t")
    whole, before = float(block(ones(1))), vars(block).get("forward")
    for _ in range(2):  # one after the other, and one within the other
        with as_written(block), as_written(block):
            assert float(block(ones(1))) == left and not is_wrapped(block)
        with pytest.raises(ZeroDivisionError), as_written(block):
            _ = 1 / 0
        assert float(block(ones(1))) == whole and vars(block).get("forward") is before
        assert is_wrapped(block) == order.endswith("t")
