"""What the ranks of test_neftune.py run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine import cases
from titancli import Engine, LossResult, Sample


class Part(NamedTuple):
    """What a rank has of the rows that leave the embedding, and where it is."""

    rows: Tensor
    noise: Tensor
    dp_rank: int
    cp_rank: int
    tp_rank: int


def embedded(layout: cases.Layout) -> Part | None:
    """Return the embeddings of a step; None on a pipeline's stage without them."""
    with Engine.build(cases.recipe(layout)) as engine:
        words: list[Any] = [m for part in engine.parts for m in part.modules() if isinstance(m, nn.Embedding)]
        noisy, quiet = list[Tensor](), list[Tensor]()
        for one in words:
            keep = lambda m, _, out: (noisy if m.training else quiet).append(out.detach().clone())  # noqa: E731
            one.register_forward_hook(keep)
        engine.forward_backward(cases.my_batches(engine))
        for batch in cases.my_batches(engine):
            engine.evaluate(batch)
        if not words:
            return None
        rows, mesh = torch.cat(noisy), engine.mesh
        cp, tp = (0 if g is None else dist.get_rank(g) for g in (mesh.cp_group, _group_of(mesh.tp)))
        return Part(rows, rows - torch.cat(quiet), mesh.dp_rank, cp, tp)


def _group_of(mesh: Any) -> Any:
    return None if mesh is None else mesh.get_group()


def cut(whole: Tensor, part: Part, layout: cases.Layout) -> Tensor:
    """Return a rank's part of whole rows [B, S, D]."""
    cp, tp = layout.mesh.get("cp", 1), layout.mesh.get("tp", 1)
    if cp > 1 and layout.context_parallel == "ulysses":
        whole = whole.chunk(cp, 1)[part.cp_rank]
    elif cp > 1:
        pieces = whole.chunk(2 * cp, 1)
        whole = torch.cat((pieces[part.cp_rank], pieces[2 * cp - 1 - part.cp_rank]), 1)
    return whole.chunk(tp, 1)[part.tp_rank]


def losses(layout: cases.Layout, first: int, last: int) -> list[float]:
    """Return the losses of steps `first` to `last`, without training."""
    with Engine.build(cases.recipe(layout)) as engine:
        found = []
        for step in range(first, last):
            engine.step = step
            found.append(float(engine.forward_backward(cases.my_batches(engine, 0))["loss"]))
            engine.clear_gradients()
        return found


def evaluated(layout: cases.Layout) -> float:
    """Return the loss of an evaluation."""
    with Engine.build(cases.recipe(layout)) as engine:
        return float(engine.evaluate(cases.my_batches(engine, 0))["loss"])


def samples() -> list[Sample]:
    tokens = cases.whole_batch(0)["tokens"].tolist()
    return [Sample(row[: 16 - number], [1.0] * (16 - number)) for number, row in enumerate(tokens)]


def squares(logprobs: list[Tensor], given: list[Sample]) -> LossResult:
    """Return a loss that is not a sum over tokens."""
    total = torch.stack([one.sum().square() for one in logprobs]).sum()
    return LossResult(total, torch.tensor(float(len(given))))


def seen_and_given(layout: cases.Layout) -> tuple[list[Tensor], list[Tensor]]:
    """Return the log-probabilities that a function of samples sees, and those of the pass after it."""
    seen: list[Tensor] = []

    def loss(logprobs: list[Tensor], given: list[Sample]) -> LossResult:
        seen[:] = [one.detach().clone() for one in logprobs]
        return squares(logprobs, given)

    with Engine.build(cases.recipe(layout)) as engine:
        return seen, engine.forward_backward(samples(), loss).logprobs
