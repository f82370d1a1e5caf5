"""Which integers a batch may hold: read on the CPU, marked where reading would wait for a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from titancli.data.values import Limits, fault, zero_invalid
from titancli.errors import TitanError
from titancli.protocols.batch import Batch, MissingTensor

LIMITS = Limits(vocab_size=9, row_length=4, positions=8)
GOOD = {
    "tokens": [[0, 8, 3, 1], [2, 2, 2, 2]],
    "targets": [[8, 3, -100, 0], [-100, -100, -100, -100]],
    "positions": [[0, 1, 2, 7], [0, 1, 0, 1]],
    "document_ids": [[5, 5, -7, 2**31 - 1], [3, 1, 1, 2]],
}


def batch(**other: Any) -> Batch:
    return Batch({name: torch.tensor(value) for name, value in {**GOOD, **other}.items()})


def test_what_the_model_has_is_left_as_it_is() -> None:
    assert fault(batch(), LIMITS) is None
    kept, wrong = zero_invalid(batch(), LIMITS)
    assert not wrong and all(torch.equal(kept[name], value) for name, value in batch().items())


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("tokens", [0, 9, 0, 0], r"the token id 9 in 'tokens', but the model's vocab_size is 9 .* \[1, 1\]"),
        ("tokens", [0, 0, 0, -100], "the token id -100 in 'tokens'"),
        ("targets", [-1, 0, 0, 0], "the token id -1 in 'targets'"),
        ("targets", [0, -7, 0, 0], "the token id -7"),
        ("targets", [0, 0, 99, 0], "the token id 99"),
        ("positions", [0, 1, 2, 8], r"the position 8 at \[1, 3\], but the model supports 0 to 7"),
        ("positions", [-1, 0, 1, 2], "the position -1"),
        ("document_ids", [4, 5, 5, 4], "a repeated document id: in row 1"),
    ],
)
def test_what_may_not_be_there_is_named_or_marked(name: str, row: list[int], words: str) -> None:
    wrong = batch(**{name: [GOOD[name][0], row]})
    found = fault(wrong, LIMITS)
    assert found is not None and found.hint
    with pytest.raises(TitanError, match=words):
        raise TitanError(found.message)
    made, mark = zero_invalid(wrong, LIMITS)
    assert mark and fault(Batch({k: v for k, v in made.items() if k != "document_ids"}), LIMITS) is None


def test_a_batch_is_of_rows_and_says_what_it_has_not() -> None:
    with pytest.raises(KeyError, match="no 'weights'; it has tokens, targets") as caught:
        batch()["weights"]
    assert isinstance(caught.value, MissingTensor) and batch().get("weights") is None
    assert caught.value.hint is None
    with pytest.raises(MissingTensor) as caught:
        batch()["tragets"]
    assert caught.value.hint == "did you mean 'targets'?"
    with pytest.raises(MissingTensor):
        batch()[0]  # type: ignore[index]
    for tensors, words in (
        ({}, "must have tensors"),
        ({"tokens": torch.tensor(3)}, "not a scalar tensor"),
        ({"tokens": [[1, 2]]}, "not a list"),
    ):
        with pytest.raises(TitanError, match=words):
            Batch(tensors)  # type: ignore[arg-type]
    with pytest.raises(TitanError, match="cannot be divided into units of 0"):
        Batch({"tokens": torch.zeros(1, 1)}, unit=0)
