from __future__ import annotations

import pytest
import torch

from titancli.errors import TitanError
from titancli.rl.packing import Sample, pack, rows_of

SAMPLES = [
    Sample([1, 2], [3, 4, 5], [-0.1, -0.2, -0.3], 1.5),
    Sample([6], [7], [-0.4], -2.0),
    Sample([8, 9, 10], [11, 12], [-0.5, -0.6], 0.5),
]


def test_samples_share_rows_and_none_is_cut() -> None:
    rows = rows_of(SAMPLES, 6)
    assert [[s.length for s in row] for row in rows] == [[4, 1], [4]]
    assert rows_of([], 6) == []


def test_a_batch_holds_every_sample_as_it_is() -> None:
    batch = pack([[SAMPLES[0], SAMPLES[1]], [SAMPLES[2]]], 6, 3)
    assert batch["tokens"].tolist()[:2] == [[1, 2, 3, 4, 6, 0], [8, 9, 10, 11, 0, 0]]
    assert batch["targets"].tolist() == [
        [-100, 3, 4, 5, 7, -100],
        [-100, -100, 11, 12, -100, -100],
        [-100] * 6,
    ]
    assert batch["positions"].tolist()[0] == [0, 1, 2, 3, 0, 0]
    assert batch["document_ids"].tolist()[:2] == [[0, 0, 0, 0, 1, 2], [0, 0, 0, 0, 1, 1]]
    torch.testing.assert_close(batch["advantages"][0], torch.tensor([0, 1.5, 1.5, 1.5, -2.0, 0]))
    torch.testing.assert_close(batch["old_logprobs"][1], torch.tensor([0, 0, -0.5, -0.6, 0, 0]))


def test_a_completion_without_tokens_takes_no_place() -> None:
    nothing = Sample([1, 2], [], [], 1.0)
    assert rows_of([nothing, *SAMPLES, nothing], 6) == rows_of(SAMPLES, 6)
    assert rows_of([nothing], 6) == []


def test_log_probabilities_keep_their_bits_whatever_the_scripts_default_dtype() -> None:
    expected = pack([SAMPLES], 12, 1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = pack([SAMPLES], 12, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_no_sample_is_told() -> None:
    with pytest.raises(TitanError, match="an empty prompt"):
        Sample([], [1], [0.0], 1.0)
    with pytest.raises(TitanError, match="2 tokens and 1 log-prob"):
        Sample([1], [1, 2], [0.0], 1.0)
    for value in (float("nan"), float("-inf")):
        with pytest.raises(TitanError, match=f"a log-probability of {value}"):
            Sample([1], [2, 3], [-1.0, value], 1.0)
    with pytest.raises(TitanError, match="needs 5 tokens of a row, but rows have 4"):
        rows_of([Sample([1, 2], [3, 4, 5, 6], [0.0] * 4, 1.0)], 4)
