"""The gated delta rule in chunks, against the recurrence itself in NumPy, and against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from titan_qwen3_next import delta_rule
from titan_qwen3_next.delta import short_convolution
from titan_qwen3_next.delta_rule import gated_delta_rule

HEADS, SHARED, K, V = 2, 3, 5, 4


def inputs(
    length: int, rows: int = 2, dtype: torch.dtype = torch.float64, decay: float = 1.0
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(length)
    shapes = [(HEADS, K), (HEADS, K), (HEADS, SHARED, V), (HEADS, SHARED), (HEADS, SHARED)]
    q, k, v, rate, beta = (torch.randn(rows, length, *s, generator=draw, dtype=torch.float64) for s in shapes)
    found = [q, k, v, -decay * rate.abs(), beta.sigmoid()]
    return [x.to(dtype).requires_grad_() for x in found]


def some_begins(length: int, rows: int = 2) -> Tensor:
    begins = torch.rand(rows, length, generator=torch.Generator().manual_seed(0)) < 0.3
    begins[0, length // 2 : length // 2 + 2] = True  # a document of one token
    return begins


def step_by_step(
    q: Any, k: Any, v: Any, log_decay: Any, beta: Any, begins: Any = None, state: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, head by head, in float64."""
    q, k, v, log_decay, beta = (x.detach().double().numpy() for x in (q, k, v, log_decay, beta))
    rows, length = v.shape[:2]
    out = np.zeros(v.shape)
    last = np.zeros((rows, HEADS, SHARED, K, V)) if state is None else state.detach().double().numpy().copy()
    for row, at, head, share in np.ndindex(rows, length, HEADS, SHARED):
        s = last[row, head, share]
        if begins is not None and begins[row, at]:
            s[:] = 0
        query, key = (x[row, at, head] / np.sqrt((x[row, at, head] ** 2).sum() + 1e-6) for x in (q, k))
        s *= np.exp(log_decay[row, at, head, share])
        s += np.outer(key, beta[row, at, head, share] * (v[row, at, head, share] - key @ s))
        out[row, at, head, share] = query @ s / np.sqrt(K)
    return out, last


@pytest.mark.parametrize(
    ("length", "chunk"),
    [(13, 4), (16, 4), (1, 64), (7, 64), (9, 1), (130, 64)],
    ids=["a short last chunk", "whole chunks", "one token", "less than one", "chunks of one", "of three"],
)
@pytest.mark.parametrize("more", ["", "documents", "state", "documents, state"])
def test_chunks_give_what_the_recurrence_gives(length: int, chunk: int, more: str) -> None:
    given = inputs(length)
    begins = some_begins(length) if "documents" in more else None
    state = torch.randn(2, HEADS, SHARED, K, V, dtype=torch.float64) if "state" in more else None
    out, last = gated_delta_rule(*given, begins, state, chunk)
    expected, expected_last = step_by_step(*given, begins, state)
    np.testing.assert_allclose(out.detach().numpy(), expected, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(last.detach().numpy(), expected_last, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("documents", [False, True])
def test_gradients_are_those_of_finite_differences(documents: bool) -> None:
    given = inputs(7, rows=1)
    begins = some_begins(7, rows=1) if documents else None
    state = torch.randn(1, HEADS, SHARED, K, V, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: gated_delta_rule(*x[:5], begins, x[5], 3), (*given, state), fast_mode=True
    )


def test_outputs_and_gradients_equal_transformers() -> None:
    given = inputs(150, dtype=torch.float32, decay=0.1)
    q, k, v, log_decay, beta = given
    ours, _ = gated_delta_rule(*given, None, None)
    heads = [x.flatten(2, 3) for x in (v, log_decay, beta)]
    theirs, _ = torch_chunk_gated_delta_rule(q, k, *heads, use_qk_l2norm_in_kernel=True)
    theirs = theirs.view_as(ours)
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    found, expected = (
        torch.autograd.grad(x.square().sum(), given, retain_graph=True) for x in (ours, theirs)
    )
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 5e-6 * other.norm()


def test_fast_decay_keeps_its_digits() -> None:
    """Sums from a chunk's beginning reach thousands, of which the differences would have few digits left."""
    given = inputs(128, dtype=torch.float32, decay=40.0)
    with torch.no_grad():
        given[3][:, 1::2] *= 1e-3
    out, _ = gated_delta_rule(*given, None, None)
    expected, _ = step_by_step(*given)
    np.testing.assert_allclose(out.detach().numpy(), expected, atol=2e-6 * np.abs(expected).max())


def test_heads_that_are_computed_one_after_the_other_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given, begins = inputs(33), some_begins(33)
    wanted = gated_delta_rule(*given, begins, None, 8)
    gradients = torch.autograd.grad(wanted[0].square().sum() + wanted[1].sum(), given)
    monkeypatch.setattr(delta_rule, "WORKING", 1)
    found = gated_delta_rule(*given, begins, None, 8)
    again = torch.autograd.grad(found[0].square().sum() + found[1].sum(), given)
    for one, other in zip((*wanted, *gradients), (*found, *again), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_bf16_is_rounded_once() -> None:
    given = inputs(70, dtype=torch.bfloat16)
    out, last = gated_delta_rule(*given, None, None)
    expected, _ = step_by_step(*given)
    assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    np.testing.assert_allclose(out.detach().float().numpy(), expected, rtol=2**-8, atol=1e-5)


def test_compiled_it_is_one_operator() -> None:
    given = inputs(6, dtype=torch.float32)
    torch.library.opcheck(
        gated_delta_rule,
        (*(x.detach().requires_grad_() for x in given), some_begins(6), None, 4),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize(
    "begins", [None, torch.tensor([[False, False, True, False, False, True, True, False]])]
)
def test_the_convolution_sees_its_own_document(begins: Tensor | None) -> None:
    x, weight = torch.randn(1, 8, 3, 2, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    found = short_convolution(x, weight, begins, None)
    starts = [0] if begins is None else sorted({0, *begins[0].nonzero()[:, 0].tolist()})
    for start, end in zip(starts, [*starts[1:], 8], strict=True):
        part = x[:, start:end].flatten(2).mT
        expected = torch.nn.functional.conv1d(part, weight.view(6, 1, 4), padding=3, groups=6)[
            ..., : end - start
        ]
        torch.testing.assert_close(found[:, start:end].flatten(2).mT, expected)
