"""Losses over a vocabulary that is cut over ranks, against the whole one in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.rows import rows
from titancli.distributed.collectives import Group
from titancli.losses import chunked
from titancli.losses.chunked import linear_log_probs, linear_token_loss

pytestmark = pytest.mark.ranks

ROWS, WIDTH, WORDS = 13, 8, 20
FAR = 60.0  # logits this large overflow an exponential in bf16 and in fp32 alike, if no maximum is taken off


def problem(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(ROWS, WIDTH, generator=generator)).to(dtype)
    weight = torch.randn(WORDS, WIDTH, generator=generator).to(dtype)
    targets = torch.randint(0, WORDS, (ROWS,), generator=generator)
    targets[:3], targets[-1] = torch.tensor([0, WORDS - 1, -100]), -100
    weights = torch.rand(ROWS, generator=generator).masked_fill(targets < 0, 0.0)
    return hidden, weight, targets, weights


def whole(which: str, dtype: torch.dtype, scale: float) -> dict[str, Tensor]:
    """The same from full fp32 logits."""
    hidden, weight, targets, weights = problem(dtype, scale)
    hidden, weight = (x.float().requires_grad_() for x in (hidden, weight))
    log_probs = -cross_entropy(hidden @ weight.t(), targets, ignore_index=-100, reduction="none")
    (-(log_probs * weights).sum() if which == "token" else (log_probs.square() * weights).sum()).backward()
    return {"log_probs": log_probs.detach(), "hidden": hidden.grad, "weight": weight.grad}  # type: ignore[dict-item]


def cut(which: str, dtype: torch.dtype, scale: float, chunk: int, backend: str | None) -> dict[str, Tensor]:
    """Each rank has some rows of the weight, and a part of the sum that is the gradient of hidden states."""
    group = Group.of(dist.group.WORLD)  # type: ignore[arg-type]
    hidden, weight, targets, weights = problem(dtype, scale)
    weight = weight.chunk(group.size)[group.rank].clone().requires_grad_()
    hidden.requires_grad_()
    kept = chunked.CHUNK_BYTES["cpu"]
    chunked.CHUNK_BYTES["cpu"] = chunk * 4 * len(weight)
    try:
        if which == "token":
            total, log_probs = linear_token_loss(hidden, weight, targets, weights, group, backend)
        else:
            log_probs = linear_log_probs(hidden, weight, targets, group, backend)
            total = (log_probs.square() * weights).sum()
        total.backward()
    finally:
        chunked.CHUNK_BYTES["cpu"] = kept
    assert hidden.grad is not None
    parts = [torch.empty_like(weight) for _ in range(group.size)]
    dist.all_gather(parts, weight.grad)
    gradient = hidden.grad.float()
    dist.all_reduce(gradient)
    return {"log_probs": log_probs.detach(), "hidden": gradient, "weight": torch.cat(parts).float()}


CASES: list[tuple[Any, ...]] = [
    (2, torch.float32, 1.0, 1000, None),
    (4, torch.float32, 1.0, 4, None),
    (2, torch.float32, FAR, 5, None),
    (2, torch.bfloat16, 1.0, 4, None),
    (2, torch.float32, 1.0, 5, "aot_eager"),
]


@pytest.mark.parametrize(
    ("which", "world", "dtype", "scale", "chunk", "backend"),
    rows(
        [(which, *case) for which in ("token", "log_probs") for case in CASES],
        slow=[("log_probs", *CASES[-1])],
    ),
)
def test_a_cut_vocabulary_gives_the_answer_of_the_whole_one(
    ranks, which, world, dtype, scale, chunk, backend
):
    expected = whole(which, dtype, scale)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for found in ranks(world, cut, which, dtype, scale, chunk, backend):
        for name, value in expected.items():
            assert (found[name] - value).norm() <= tolerance * value.norm(), name
        assert not found["log_probs"][[2, -1]].any()
        assert not found["hidden"][[2, -1]].any()
