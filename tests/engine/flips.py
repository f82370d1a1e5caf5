"""A sampler whose routers do not choose as the trainer's do: what rounding does to large ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from titancli.models.blocks.router import Router


@contextmanager
def flipped(share: float, flips: list[int]) -> Iterator[None]:
    """Let routers send that share of all tokens to another expert than their last choice; counts them."""
    choose = Router._choose
    drawn = torch.Generator().manual_seed(dist.get_rank())

    def other(router: Router, scores: Tensor, bias: Tensor | None) -> Tensor:
        experts = choose(router, scores, bias).clone()
        free = torch.rand(scores.shape, generator=drawn).scatter(1, experts, -1.0).argmax(-1)
        hit = torch.rand(len(scores), generator=drawn) < share
        experts[hit, -1] = free[hit]
        flips.extend((int(hit.sum()), len(hit)))
        return experts

    try:
        Router._choose = other  # type: ignore[method-assign]
        yield
    finally:
        Router._choose = choose  # type: ignore[method-assign]
