"""`padding = "none"`: the conversations of a batch in one row, whose loss is that of a row for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.helpers import make
from titancli.data import ByteTokenizer, Chat
from titancli.data.rows import joined
from titancli.engine import Engine
from titancli.errors import RecipeError
from titancli.protocols.batch import IGNORE, Batch
from titancli.recipe import load_recipe
from titancli.registry.component import build
from titancli.worker.data import open_dataset

ANSWERS = [3, 50, 2, 60, 1]


@pytest.fixture
def talks(tmp_path: Path) -> dict[str, Any]:
    rows = [
        {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * n}]}
        for n in ANSWERS
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"path": str(path), "repeat": False, "shuffle": False, "pack": False}


@pytest.mark.parametrize("indexed", [False, True])
def test_a_batch_is_one_row_of_whole_conversations(talks: dict[str, Any], indexed: bool) -> None:
    shape = {"seq_len": 150, "rows": 3}
    padded = list(make(Chat(**talks, length_index=indexed), **shape))
    made = list(make(Chat(**talks, length_index=indexed, padding="none"), **shape))
    assert len(made) == len(padded) == 2
    for batch, apart in zip(made, padded, strict=True):
        assert batch.rows == 1 and batch["tokens"].shape[1] % 64 == 0
        at = number = 0
        for tokens, targets in zip(apart["tokens"], apart["targets"], strict=True):
            if not (there := (targets != IGNORE).nonzero()).numel():
                continue  # fills up the last batch
            width = int(there[-1]) + 1
            here = slice(at, at + width)
            assert torch.equal(batch["tokens"][0, here], tokens[:width])
            assert torch.equal(batch["targets"][0, here], targets[:width])
            assert torch.equal(batch["positions"][0, here], torch.arange(width))
            assert (batch["document_ids"][0, here] == number).all()
            at, number = at + width, number + 1
        assert (batch["targets"][0, at:] == IGNORE).all() and batch["tokens"].shape[1] - at < 64
        assert (batch["document_ids"][0, at:] == number).all()


def test_a_rank_with_nothing_left_has_a_short_row_of_nothing(talks: dict[str, Any]) -> None:
    [batch] = make(Chat(**talks, padding="none"), seq_len=150, rows=5, dp_rank=1, dp_size=2)
    assert batch["tokens"].shape == (1, 64) and (batch["targets"] == IGNORE).all()
    [batch] = make(Chat(**talks, padding="none"), seq_len=48, rows=5)
    assert batch["tokens"].shape[1] % 48 == 0


def test_a_joined_row_is_no_longer_than_the_rows_that_it_is_of() -> None:
    row = {name: np.ones(100, np.int64) for name in ("tokens", "targets", "positions")}
    filler = {**row, "targets": np.full(100, IGNORE)}
    whole = joined([row, row], filler)
    assert {name: one.size for name, one in whole.items()} == dict.fromkeys((*row, "document_ids"), 200)
    assert joined([row, filler], filler)["targets"].size == 128
    settings = ["dataset.pack=false", "dataset.padding=none", "training.seq_len=100"]
    with Engine.build("sft_debug", [*settings, "training.local_batch_size=2"], device="cpu") as engine:
        batch = Batch({name: torch.from_numpy(one[None]) for name, one in whole.items()})
        assert engine.forward_backward(batch)["loss"] > 0


def learned(settings: list[str], batch: Batch) -> tuple[float, list[torch.Tensor]]:
    """The loss of a batch, and the gradients of all parameters."""
    with Engine.build("sft_debug", settings, device="cpu") as engine:
        loss = engine.forward_backward(batch)["loss"]
        return float(loss), [p.grad.double() for _, p in engine.named_parameters()]


def test_loss_and_gradients_are_those_of_padded_rows(talks: dict[str, Any]) -> None:
    runtime: dict[str, Any] = {"tokenizer": build(ByteTokenizer()), "seq_len": 160, "rows": 5, "dp_rank": 0}
    apart, made = (
        next(iter(build(Chat(**talks, padding=padding), **runtime, dp_size=1, seed=0)))
        for padding in ("seq_len", "none")
    )
    assert made["tokens"].numel() < apart["tokens"].numel() / 2
    settings = ["dataset.pack=false", "dataset.padding=none", "training.seq_len=160"]
    settings += ["training.local_batch_size=5"]
    found, expected = learned(settings, made), learned(settings, apart)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for mine, reference in zip(found[1], expected[1], strict=True):
        assert (mine - reference).norm() <= 2e-6 * reference.norm()


def test_a_recipe_trains_on_joined_rows() -> None:
    recipe = load_recipe("sft_debug", ["dataset.pack=false", "dataset.padding=none"]).recipe
    with Engine.build(recipe, device="cpu") as engine:
        dataset = open_dataset(recipe, build(recipe.tokenizer), engine, recipe.dataset)
        batches = iter(dataset)
        for _ in range(2):
            engine.forward_backward(next(batches))
            assert engine.optim_step()["grad_norm"] > 0
        assert dataset.state_dict()["rows"] == 8


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "packed": ("sft_debug", ["dataset.padding=none"], "packed rows are filled up"),
    "pairs": ("dpo_debug", ["dataset.padding=none"], "needs these rows one by one"),
    "stages": (
        "sft_debug",
        ["dataset.pack=false", "dataset.padding=none", "mesh.pp=2"],
        "need rows of one length",
    ),
    "ring": (
        "sft_debug",
        [
            *("dataset.pack=false", "dataset.padding=none", "mesh.cp=2"),
            'parallelize.context_parallel="ring"',
        ],
        'conversations of a row: use "longest"',
    ),
}


@pytest.mark.parametrize(("name", "settings", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_joined_is_refused(name: str, settings: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        load_recipe(name, settings)


def test_a_mix_has_rows_of_one_length(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    shipped = Path(__file__).parents[2] / "recipes" / "sft_debug.toml"
    recipe.write_text(
        f'recipe = 1\nextends = "{shipped}"\n[dataset]\ntype = "mix"\nweights = {{ sums = 1.0 }}\n'
        '[dataset.datasets.sums]\ntype = "chat"\npath = "titan:sums"\npack = false\npadding = "none"\n'
    )
    with pytest.raises(RecipeError, match="rows of several datasets have one length"):
        load_recipe(str(recipe))
