"""Divergences against plain torch in float64 and TRL's functions; sharded vocabularies against whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from titan_distil.divergence import Divergence

KINDS: dict[str, dict[str, Any]] = {
    "forward": dict(kind="forward_kl"),
    "reverse": dict(kind="reverse_kl"),
    "jsd": dict(kind="jsd", beta=0.3),
    "forward, warm": dict(kind="forward_kl", temperature=2.0),
    "reverse, warm": dict(kind="reverse_kl", temperature=1.7),
    "jsd, cold, mixed": dict(kind="jsd", beta=0.9, temperature=0.6, sft_weight=0.25),
    "forward, mixed": dict(kind="forward_kl", sft_weight=0.7),
}
ROWS, WORDS = 7, 24


def logits(spread: float = 2.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    student, teacher = spread * torch.randn(2, ROWS, WORDS, generator=generator, dtype=dtype)
    targets = torch.randint(0, WORDS, (ROWS,), generator=generator)
    targets[2] = -100
    return student.requires_grad_(), teacher, targets


def by_torch(student: Tensor, teacher: Tensor, targets: Tensor, kind: str, **fields: float) -> Tensor:
    """Return the loss of each row, computed from probabilities."""
    beta, temperature = fields.get("beta", 0.5), fields.get("temperature", 1.0)
    p, q = (student / temperature).softmax(-1), (teacher / temperature).softmax(-1)
    if kind == "forward_kl":
        divergence = (q * (q / p).log()).sum(-1)
    elif kind == "reverse_kl":
        divergence = (p * (p / q).log()).sum(-1)
    else:
        m = (1 - beta) * p + beta * q
        divergence = beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)
    plain = functional.cross_entropy(student, targets, ignore_index=-100, reduction="none")
    w = fields.get("sft_weight", 0.0)
    return (1 - w) * divergence + w * plain


@pytest.mark.parametrize("name", KINDS)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    student, teacher, targets = logits()
    expected = by_torch(student, teacher, targets, **KINDS[name])
    (gradient,) = torch.autograd.grad(expected.sum(), student)
    own = Divergence(**KINDS[name])
    found = own(student.detach(), teacher, targets)
    w = own.sft_weight
    torch.testing.assert_close(
        (1 - w) * found.divergence - w * found.log_probs, expected, rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(found.gradient, gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_values_and_gradients_are_those_of_trl(beta: float) -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    student, teacher, targets = logits()
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    found = Divergence(kind, beta=beta, temperature=1.5)(student.detach(), teacher, targets)
    there = targets >= 0
    assert found.gradient is not None
    expected = GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], labels=targets[None], beta=beta, temperature=1.5, reduction="sum"
    )
    (gradient,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(found.divergence[there].sum(), expected.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(found.gradient[there], gradient[there], rtol=0, atol=1e-9)
    # The function of its trainer, of hidden states; identities make them logits.
    plain = student.detach().clone().requires_grad_()
    each, _, count = _chunked_divergence_loss(
        plain[None],
        teacher[None],
        torch.eye(WORDS, dtype=torch.float64),
        torch.eye(WORDS, dtype=torch.float64),
        there[None].long(),
        beta,
        temperature=1.5,
    )
    (gradient,) = torch.autograd.grad(each * count, plain)
    assert each.item() * count.item() == pytest.approx(expected.item(), rel=1e-6)  # it is of fp32
    torch.testing.assert_close(found.gradient[there], gradient[there], rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_models_that_are_far_apart_and_half_precision_stay_finite(name: str) -> None:
    for dtype, spread in ((torch.float32, 200.0), (torch.bfloat16, 40.0)):
        student, teacher, targets = (x.detach() for x in logits(spread))
        found = Divergence(**KINDS[name])(student.to(dtype), teacher.to(dtype), targets)
        assert found.divergence.dtype == torch.float32
        assert all(torch.isfinite(x).all() for x in found if x is not None)
        assert (found.divergence > -1e-4).all()


def test_equal_models_diverge_nowhere_and_nothing_given_is_changed() -> None:
    student, teacher, targets = (x.detach() for x in logits())
    before = student.clone(), teacher.clone()
    for fields in KINDS.values():
        found = Divergence(**{**fields, "sft_weight": 0.0})(student, student.clone(), targets)
        assert found.divergence.abs().max() < 1e-14 and found.gradient.abs().max() < 1e-14
        assert Divergence(**fields)(student, teacher, targets, wants_gradient=False).gradient is None
    assert torch.equal(student, before[0]) and torch.equal(teacher, before[1])


@pytest.mark.parametrize("name", [name for name, fields in KINDS.items() if "temperature" not in fields])
@pytest.mark.parametrize("k", [1, 5, WORDS - 1])
def test_the_most_probable_tokens_and_all_others_as_one_are_those_of_torch(name: str, k: int) -> None:
    student, teacher, targets = logits()
    log_top, ids = teacher.log_softmax(-1).topk(k)
    p, q = student.softmax(-1), teacher.softmax(-1)
    cells = [torch.cat((x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)), 1) for x in (p, q)]
    fields = KINDS[name]
    w = fields.get("sft_weight", 0.0)
    merged = by_torch(cells[0].log(), cells[1].log(), targets.clamp(max=0), **{**fields, "sft_weight": 0.0})
    plain = functional.cross_entropy(student, targets, ignore_index=-100, reduction="none")
    expected = (1 - w) * merged + w * plain
    (gradient,) = torch.autograd.grad(expected.sum(), student)
    found = Divergence(**fields).of_top(student.detach(), log_top, ids, targets)
    torch.testing.assert_close(
        (1 - w) * found.divergence - w * found.log_probs, expected, rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(found.gradient, gradient, rtol=0, atol=1e-9)
    whole = Divergence(**fields)(student.detach(), teacher, targets).divergence
    assert (found.divergence <= whole + 1e-9).all()
    if k == WORDS - 1:
        torch.testing.assert_close(found.divergence, whole, rtol=1e-5, atol=1e-6)


def test_a_student_that_is_sure_of_the_most_probable_tokens_stays_finite() -> None:
    student, teacher, targets = (x.detach().float() for x in logits())
    log_top, ids = (300 * teacher).log_softmax(-1).topk(4)
    for fields in KINDS.values():
        loss = Divergence(**{**fields, "temperature": 1.0})
        found = loss.of_top(300 * student, log_top, ids, targets.long())
        assert all(torch.isfinite(x).all() for x in found if x is not None)
