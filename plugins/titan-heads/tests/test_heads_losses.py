"""The losses against NumPy, TRL's reward loss and transformers' losses, values and gradients in float64."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import heads_cases
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from titan_heads import Classification, Embedding, Reward
from titan_heads import losses as code
from titan_testing import Example, check_plugin
from titancli import IGNORE, Batch, TitanError
from titancli.registry.component import completed

DIM, LENGTH = 6, 7
LENGTHS = [5, 3, 1, 7, 4, 4, 2, 6]
"""Lengths of one document in each row; then a group without one, beside rubbish."""


def made(config: Any) -> Any:
    kind = {Reward: code.Reward, Classification: code.Classification, Embedding: code.Embedding}[type(config)]
    if kind is code.Embedding:
        return completed("loss", kind(config))
    loss = kind(config, model=SimpleNamespace(dim=DIM)).double()
    with torch.no_grad():
        loss.score.weight.copy_(torch.randn(loss.score.weight.shape, generator=torch.manual_seed(1)))
    return completed("loss", loss)


def example(name: str, rows: int) -> Example:
    batch = heads_cases.rows_of(name).split(rows)[0]
    hidden = torch.randn(*batch["tokens"].shape, 64, generator=torch.manual_seed(2))
    return Example(batch, out=hidden)


def test_the_plugin_is_sound() -> None:
    names = {"reward": "reward", "classification": "classes", "embedding": "embedding"}
    check_plugin(
        "titan-heads",
        configs={"loss/classification": {"classes": ["a", "b", "c"]}},
        examples={f"loss/{name}": partial(example, case) for name, case in names.items()},
        skip={"loss/embedding": ["accumulation"]},  # negatives are those of a micro-batch
    )


def marked(lengths: list[int]) -> Tensor:
    ends = torch.tensor(lengths)[:, None] - 1
    return torch.where(torch.arange(LENGTH) == ends, 5, IGNORE)


def problem(unit: int, lengths: list[int] = LENGTHS, **more: Tensor) -> tuple[Tensor, Batch]:
    """Hidden states in float64, and rows of which the last `unit` are padding."""
    targets = torch.cat([marked(lengths), torch.full((unit, LENGTH), IGNORE)])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*targets.shape, DIM, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, Batch({"targets": targets, **more}, unit=unit)


def lasts(hidden: Tensor) -> np.ndarray:
    return np.stack([hidden[row, n - 1].detach().numpy() for row, n in enumerate(LENGTHS)])


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("margins", [False, True])
def test_the_reward_loss_is_that_of_numpy_and_of_trl(center: float, margins: bool) -> None:
    margin = torch.arange(len(LENGTHS) + 2) / 4
    margin[-2:] = torch.nan
    hidden, batch = problem(2, **({"margin": margin} if margins else {}))
    loss = made(Reward(center=center))
    result = loss(hidden, batch)
    scores = (lasts(hidden) @ loss.score.weight.detach().numpy().T)[:, 0]
    chosen, rejected = scores[0::2], scores[1::2]
    beyond = margin[:-2:2].double().numpy() if margins else 0.0
    expected = softplus(-(chosen - rejected - beyond)) + center * (chosen + rejected) ** 2
    assert result.weight.item() == len(chosen)
    assert result.sum.item() == pytest.approx(expected.sum(), rel=1e-12)
    assert result.metrics["reward_accuracy"].item() == (chosen > rejected).sum()
    assert result.metrics["reward_margin"].item() == pytest.approx((chosen - rejected).sum())
    gradients = torch.autograd.grad(result.sum / result.weight, [hidden, loss.score.weight])

    theirs, again = by_trl(loss, hidden, margin[:-2:2].double() if margins else None, center)
    assert (result.sum / result.weight).item() == pytest.approx(theirs.item(), rel=1e-12)
    for own, other in zip(gradients, torch.autograd.grad(theirs, again), strict=True):
        assert (own - other).norm() <= 1e-12 * other.norm()


def by_trl(loss: Any, hidden: Tensor, margin: Tensor | None, center: float) -> tuple[Tensor, list[Tensor]]:
    """TRL's loss of the same pairs; its batches have the chosen answers first."""
    trainer = pytest.importorskip("trl").RewardTrainer
    order = [*range(0, len(LENGTHS), 2), *range(1, len(LENGTHS), 2)]
    at = torch.tensor(LENGTHS) - 1
    picked = hidden[torch.arange(len(LENGTHS)), at][order]
    model = SimpleNamespace(training=True)
    logits = functional.linear(picked, loss.score.weight)
    called = SimpleNamespace(
        model=model,
        args=SimpleNamespace(center_rewards_coefficient=center or None),
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, gather=lambda x: x),
        _metrics={"train": __import__("collections").defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )

    class Model:
        training = True

        def __call__(self, **inputs: Any) -> Any:
            return SimpleNamespace(logits=logits)

    inputs: dict[str, Any] = {"attention_mask": torch.ones(1)}
    if margin is not None:
        inputs["margin"] = margin
    return trainer.compute_loss(called, Model(), inputs), [hidden, loss.score.weight]


CLASSES = ["a", "b", "c"]


@pytest.mark.parametrize(
    "problem_type", ["single_label_classification", "multi_label_classification", "regression"]
)
def test_the_classification_loss_is_that_of_numpy_and_of_transformers(problem_type: Any) -> None:
    classes = [] if problem_type == "regression" else CLASSES
    loss = made(Classification(classes=classes, problem_type=problem_type))
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS) + 1, LENGTH)
    if problem_type == "single_label_classification":
        labels = torch.randint(0, 3, shape, generator=generator)
    elif problem_type == "regression":
        labels = torch.randn(shape, generator=generator, dtype=torch.float64)
    else:
        labels = torch.randint(0, 2, (*shape, 3), generator=generator).double()
    hidden, batch = problem(1, labels=labels.clone())
    batch["labels"][-1] = 77 if labels.dtype == torch.int64 else torch.nan  # no target is there
    loss.check_batch(batch)
    result = loss(hidden, batch)
    own = torch.stack([labels[row, n - 1] for row, n in enumerate(LENGTHS)])
    scores = lasts(hidden) @ loss.score.weight.detach().numpy().T
    if problem_type == "single_label_classification":
        each = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(own)), own.numpy()]
        assert result.metrics["accuracy"].item() == (scores.argmax(1) == own.numpy()).sum()
    elif problem_type == "regression":
        each = (scores[:, 0] - own.numpy()) ** 2
    else:
        each = (softplus(scores) - scores * own.numpy()).mean(1)
    assert result.weight.item() == len(LENGTHS)
    assert result.sum.item() == pytest.approx(each.sum(), rel=1e-12)
    gradients = torch.autograd.grad(result.sum / result.weight, [hidden, loss.score.weight])

    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    at = torch.tensor(LENGTHS) - 1
    logits = functional.linear(hidden[torch.arange(len(LENGTHS)), at], loss.score.weight)
    config = SimpleNamespace(num_labels=len(classes) or 1, problem_type=problem_type)
    theirs = ForSequenceClassificationLoss(own, logits, config)
    assert (result.sum / result.weight).item() == pytest.approx(theirs.item(), rel=1e-9)
    for mine, other in zip(gradients, torch.autograd.grad(theirs, [hidden, loss.score.weight]), strict=True):
        assert (mine - other).norm() <= 1e-9 * other.norm()


def test_several_documents_of_a_row_are_as_one_in_each() -> None:
    loss = made(Classification(classes=CLASSES))
    hidden, alone = problem(1, labels=torch.arange(9)[:, None].repeat(1, LENGTH) % 3)
    row = torch.full((1, 40), IGNORE)
    states, labels = torch.zeros(1, 40, DIM, dtype=torch.float64), torch.full((1, 40), -7)
    at = 0
    for number, length in enumerate(LENGTHS):
        states[0, at : at + length] = hidden[number, :length].detach()
        at += length
        row[0, at - 1], labels[0, at - 1] = 5, number % 3
    packed = Batch({"targets": row, "labels": labels})
    loss.check_batch(packed)
    one, other = loss(states, packed), loss(hidden, alone)
    assert one.weight == other.weight
    assert one.sum.item() == pytest.approx(other.sum.item(), rel=1e-14)


@pytest.mark.parametrize("pool", ["last", "mean"])
@pytest.mark.parametrize("unit", [2, 3])
def test_the_embedding_loss_is_that_of_numpy(unit: int, pool: Any) -> None:
    config = Embedding(pool=pool, temperature=0.2)
    lengths = LENGTHS[: 2 * unit]
    hidden, batch = problem(unit, lengths)
    result = made(config)(hidden, batch)

    def value(states: np.ndarray) -> float:
        vectors = [
            states[row, n - 1] if pool == "last" else states[row, :n].mean(0) for row, n in enumerate(lengths)
        ]
        unitary = np.stack([vector / np.linalg.norm(vector) for vector in vectors])
        keys = np.concatenate([unitary[number::unit] for number in range(1, unit)])
        similar = unitary[0::unit] @ keys.T / 0.2
        return float((np.log(np.exp(similar).sum(1)) - similar[np.arange(2), np.arange(2)]).sum())

    assert result.weight.item() == 2
    assert result.sum.item() == pytest.approx(value(hidden.detach().numpy()), rel=1e-12)
    (gradient,) = torch.autograd.grad(result.sum, hidden)
    assert gradient.isfinite().all() and not gradient[len(lengths) :].any()
    direction = np.random.default_rng(0).standard_normal(hidden.shape)
    at, h = hidden.detach().numpy(), 3e-4
    one, two = (value(at + n * h * direction) - value(at - n * h * direction) for n in (1, 2))
    slope = float((gradient.numpy() * direction).sum())
    assert slope == pytest.approx((8 * one - two) / (12 * h), rel=1e-9)


def test_rows_without_a_document_are_no_loss_and_have_no_gradient() -> None:
    for config, unit in (
        (Reward(center=0.1), 2),
        (Classification(classes=CLASSES), 1),
        (Embedding(), 2),
        (Embedding(pool="mean"), 3),
    ):
        hidden, batch = problem(unit, [])
        if unit == 1:
            batch = Batch({**batch, "labels": torch.zeros(1, LENGTH, dtype=torch.int64)})
        result = made(config)(hidden, batch)
        assert result.weight == 0 and result.sum == 0
        (gradient,) = torch.autograd.grad(result.sum, hidden)
        assert gradient.isfinite().all() and not gradient.any()


def test_what_does_not_fit_is_refused_by_name() -> None:
    _, odd = problem(1)
    with pytest.raises(TitanError, match="the loss reward needs pairs of rows, but got 9"):
        made(Reward()).check_batch(odd)
    _, pairs = problem(2, margin=torch.zeros(10, 7))
    with pytest.raises(TitanError, match=r"the batch's margin is \[10, 7\], not \[10\]"):
        made(Reward()).check_batch(pairs)
    loss = made(Classification(classes=CLASSES))
    with pytest.raises(TitanError, match=r"takes labels \[9, 7\], which are missing"):
        loss.check_batch(odd)
    _, wrong = problem(1, labels=torch.full((9, LENGTH), 3))
    with pytest.raises(TitanError, match="row 0, token 4: the label is 3, but there are 3 classes"):
        loss.check_batch(wrong)
    with pytest.raises(TitanError, match="but the batch has units of 1"):
        made(Embedding()).check_batch(odd)
