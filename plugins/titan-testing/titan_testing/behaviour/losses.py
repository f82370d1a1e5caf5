"""Losses: sums that add up, independent rows, and metrics with valid names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from titan_testing.behaviour.engines import LENGTH, VOCABULARY, batch_of, engine_of
from titan_testing.behaviour.subject import Check, Example, Subject, first_difference
from titancli import IGNORE, Batch, LossResult
from titancli.engine import RESERVED, checked
from titancli.errors import TitanError

KNOWN = {
    "weights": ("BS", 0.1, 1.0),
    "advantages": ("BS", -1.0, 1.0),
    "old_logprobs": ("BS", -5.0, -3.5),
    "reference_logprobs": ("BS", -5.0, -3.5),
    "reference_row_logprobs": ("B", -60.0, -40.0),
}
"""Inputs that a loss may need in a batch: one number per row or token, with the range of values."""
TOLERANCE = 1e-5


def example(subject: Subject, rows: int = 4) -> Example:
    """Return the author's example, or random tokens with the inputs that the loss needs."""
    if subject.example is not None:
        return subject.example(rows)
    loss = subject.build()
    batch = dict(batch_of(rows=rows))
    generator = torch.Generator().manual_seed(1)
    needs = loss.needs
    shapes = dict(needs) if isinstance(needs, Mapping) else {}
    for name in sorted({*needs, "weights"} - batch.keys()):
        if name not in KNOWN and name not in shapes:
            raise TitanError(
                f"it needs {name!r} in its batches, which the kit does not know: declare "
                f'needs = {{{name!r}: "BS"}}, or "B", or pass '
                f'examples={{"{subject.label}": rows -> Example(batch, out=...)}}'
            )
        shape, low, high = KNOWN.get(name, (shapes.get(name), 0.1, 1.0))
        size = (rows, LENGTH) if shapes.get(name, shape) == "BS" else (rows,)
        batch[name] = low + (high - low) * torch.rand(size, generator=generator)
    out = torch.randn(rows, LENGTH, VOCABULARY, generator=generator)
    if loss.output == "logprobs":
        out = log_probs(out, batch["targets"])
    if loss.entropy:
        batch["entropy"] = torch.rand(rows, LENGTH, generator=generator)
    return Example(
        Batch(batch, unit=2 if subject.config.learns_from_pairs else 1),
        out=out,
    )


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log p(targets), [B, S]; 0 where there is no target."""
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets == IGNORE, 0.0, picked)


def called(loss: Any, out: Tensor, batch: Batch) -> tuple[LossResult, Tensor]:
    """Return the loss's result, and the gradient of its sum."""
    leaf = out.detach().clone().requires_grad_()
    result = checked(loss(leaf, batch), loss)
    (gradient,) = torch.autograd.grad(result.sum, leaf, allow_unused=True)
    return result, torch.zeros_like(leaf) if gradient is None else gradient


def _numbers(result: LossResult) -> dict[str, Tensor]:
    return {"sum": result.sum.detach(), "weight": result.weight, **result.metrics}


def backward(subject: Subject) -> Iterator[str]:
    """Check that the gradient and numbers are finite, and the same on a second call."""
    loss, given = subject.build(), example(subject)
    assert given.out is not None
    result, gradient = called(loss, given.out, given.batch)
    numbers = _numbers(result)
    if wrong := [name for name, value in numbers.items() if not torch.isfinite(value)]:
        yield f"{', '.join(wrong)} is not finite"
    if not gradient.isfinite().all():
        yield "the gradient is not finite"
    elif not gradient.any():
        yield "its sum does not depend on the output of the model: the gradient is zero everywhere"
    if result.weight <= 0:
        yield f"its weight is {float(result.weight)}, but everything is divided by it"
    if first_difference(numbers, _numbers(called(loss, given.out, given.batch)[0]), 0.0):
        yield "a second call with the same arguments returns different numbers"


def metrics(subject: Subject) -> Iterator[str]:
    """Check that metrics have valid names, the same for every batch."""
    loss, given = subject.build(), example(subject)
    assert given.out is not None
    names = list(loss(given.out, given.batch).metrics)
    for name in names:
        if name in RESERVED:
            yield f"it reports {name!r}, a name that the engine uses: choose another name"
        elif not re.fullmatch(r"[A-Za-z_][\w./-]*", name):
            yield f"it reports {name!r}: the name of a metric may contain letters, digits, _, ., / and -"
    pieces = given.batch.split(given.batch.unit)
    outs = given.out.split(given.batch.unit)
    for out, piece in zip(outs, pieces, strict=True):
        others = set(loss(out, piece).metrics)
        if others != set(names):
            yield (
                f"it reports {', '.join(sorted(others))} for some rows and {', '.join(sorted(names))} "
                f"for all of them: the names must be the same for all ranks and micro-batches"
            )
            return


def accumulation(subject: Subject) -> Iterator[str]:
    """Check that two micro-batches equal one batch: sums, weights and metrics add up, and gradients are
    the same."""
    loss, given = subject.build(), example(subject)
    assert given.out is not None
    half = given.batch.rows // 2
    result, gradient = called(loss, given.out, given.batch)
    parts = [
        called(loss, out, piece)
        for out, piece in zip(given.out.split(half), given.batch.split(half), strict=True)
    ]
    added = {
        name: sum((_numbers(part)[name] for part, _ in parts), torch.zeros(()))
        for name in _numbers(parts[0][0])
    }
    wanted = _numbers(result)
    if found := first_difference(wanted, added, TOLERANCE):
        yield (
            f"two micro-batches do not add up to one batch: {found}. A loss must return sums, with "
            f"their divisor as the weight; the engine divides once"
        )
    if found := first_difference(
        {"the gradient": gradient}, {"the gradient": torch.cat([g for _, g in parts])}, TOLERANCE
    ):
        yield f"two micro-batches do not give the gradients of one batch: {found}"


def nothing_left(subject: Subject) -> Iterator[str]:
    """Check that rows without a target count for nothing, as on a rank whose data have ended."""
    loss, given = subject.build(), example(subject)
    assert given.out is not None
    if "targets" not in given.batch:
        return
    targets = torch.full_like(given.batch["targets"], IGNORE)
    out = torch.zeros_like(given.out) if loss.output == "logprobs" else given.out
    result, gradient = called(loss, out, Batch({**given.batch, "targets": targets}, unit=given.batch.unit))
    if wrong := [name for name, value in _numbers(result).items() if value != 0]:
        yield f"for rows without a target, {', '.join(wrong)} is not 0"
    if not gradient.isfinite().all() or (loss.output == "model" and gradient.any()):
        yield "rows without a target have a gradient"


def chunks(subject: Subject) -> Iterator[str]:
    """Check that `token_weights`, with which the engine computes the gradient in chunks, reproduce the
    loss."""
    loss = subject.build()
    given = example(subject)
    assert given.out is not None
    weights = loss.token_weights(given.batch)
    if weights is None:
        return
    result, gradient = called(loss, given.out, given.batch)
    there = given.batch["targets"] != IGNORE
    wanted = torch.where(there, -weights.float(), 0.0)
    found = first_difference(
        {"the gradient": torch.where(there, gradient, 0.0), "the sum": result.sum.detach()},
        {"the gradient": wanted, "the sum": (wanted * given.out).sum()},
        TOLERANCE,
    )
    if found:
        yield (
            f"token_weights do not reproduce the loss: {found}. A loss that is not −Σ w·log p must not "
            f"have them"
        )


def on_an_engine(subject: Subject) -> Iterator[str]:
    """Check that gradients through a model's head are the same in micro-batches and in one piece."""
    if subject.example is not None:
        return
    from titan_testing.behaviour.engines import gradients

    batch = example(subject).batch
    batch = Batch({k: v for k, v in batch.items() if k != "entropy"}, unit=batch.unit)
    engine = engine_of(loss=subject.config)
    try:
        one, several = gradients(engine, batch), gradients(engine, *batch.split(batch.rows // 2))
    finally:
        engine.close()
    if found := first_difference(one, several, 1e-4):
        yield f"two micro-batches do not give a model the gradients of one batch: {found}"


CHECKS: dict[str, dict[str, Check]] = {
    "loss": {
        "backward": backward,
        "metrics": metrics,
        "accumulation": accumulation,
        "nothing left": nothing_left,
        "chunks": chunks,
        "engine": on_an_engine,
    }
}
