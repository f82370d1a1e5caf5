"""Padding: where it is, what is refused, and what does not count it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.cases import LENGTH, ROWS, Layout, recipe, whole_batch
from tests.ranks import Ranks
from tests.ranks.padding import BOTH
from titancli import Batch, Engine, TitanError
from titancli.distributed.together import Disagreement
from titancli.models import Llama3
from titancli.models.blocks.moe import moe_layers
from titancli.observe.metrics import collector
from titancli.protocols.batch import IGNORE, Counts, padding_of

TAIL = LENGTH // 2


def position_by_position(targets: Tensor, document_ids: Tensor | None) -> Tensor:
    """Whether no later target of the document is there, by a plain loop."""
    ids = torch.zeros_like(targets) if document_ids is None else document_ids
    found = torch.ones_like(targets, dtype=torch.bool)
    for row in range(len(targets)):
        for place in range(targets.shape[1]):
            for later in range(place, targets.shape[1]):
                if targets[row, later] != IGNORE and ids[row, later] == ids[row, place]:
                    found[row, place] = False
    return found


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_padding_of_rows(documents: bool, share: float) -> None:
    drawn = torch.Generator().manual_seed(int(10 * share))
    for size in (1, 2, 13):
        there = torch.rand(6, size, generator=drawn) < share
        targets = torch.where(there, 5, IGNORE)
        begins = torch.rand(6, size, generator=drawn) < 0.3
        ids = begins.cumsum(1).int() * 7 - 3 if documents else None
        expected = position_by_position(targets, ids)
        assert torch.equal(padding_of(targets, ids), expected)
        given = {"tokens": targets.clamp(min=0), "targets": targets}
        counts = Batch(given if ids is None else {**given, "document_ids": ids}).counts()
        assert counts == Counts(int((~expected).sum()), int(there.sum()), int(expected.sum()))


def test_counts_where_rows_go_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made before, and found there without reading it."""
    batch = Batch(padded())
    expected = batch.counts()
    assert expected is not None and expected.padding >= ROWS * (LENGTH - TAIL)

    class There(Tensor):
        is_cuda = True  # type: ignore[assignment]

    there = torch.zeros(0).as_subclass(There)
    assert not hasattr(batch.to("cpu")["targets"], "counts")
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **kwargs: there)
    moved = batch.to("cuda")
    assert moved.counts() == expected
    assert Batch({**moved, "more": there}).counts() == expected


def padded() -> dict[str, Tensor]:
    """Rows whose second half has no targets."""
    batch = dict(whole_batch())
    batch["targets"] = torch.where(torch.arange(LENGTH) < TAIL, batch["targets"], IGNORE)
    return batch


WRONG = {
    "an integer": (torch.zeros(ROWS, LENGTH, dtype=torch.int64), "padding is torch.int64, but must be"),
    "another shape": (torch.zeros(ROWS, LENGTH - 1, dtype=torch.bool), "padding are"),
    "targets": (torch.ones(ROWS, LENGTH, dtype=torch.bool), "padding with a target, at [0, 0]"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", WRONG)
def test_wrong_padding_is_named(name: str) -> None:
    padding, words = WRONG[name]
    with Engine.build(recipe(Layout(config=BOTH))) as engine:
        with pytest.raises(TitanError) as caught:
            engine.forward_backward({**whole_batch(), "padding": padding})
        assert words in caught.value.message and caught.value.hint
        assert engine.status["accumulated"] == 0


@pytest.mark.ranks
def test_given_padding_is_kept() -> None:
    """Of a loss that reads positions without targets."""
    nothing = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    for config in (BOTH, Llama3(dim=32, n_layers=1, n_heads=2, hidden_dim=16, vocab_size=64)):
        with Engine.build(recipe(Layout(config=config))) as engine:
            metrics = engine.forward_backward({**padded(), "padding": nothing})
            assert (metrics["tokens"], metrics["padding"]) == (ROWS * LENGTH, 0)
            for layer in moe_layers(engine.model).values():
                assert int(layer.token_counts().sum()) == ROWS * LENGTH * BOTH.moe.top_k


@pytest.mark.ranks
def test_tokens_without_padding() -> None:
    batch = padded()
    expected = int((~position_by_position(batch["targets"], None)).sum())
    with Engine.build(recipe(Layout(config=BOTH))) as engine:
        metrics = engine.forward_backward(batch)
        assert metrics["tokens"] == expected < ROWS * LENGTH
        assert metrics["tokens"] + metrics["padding"] == ROWS * LENGTH
        assert metrics["targets"] == int((batch["targets"] != IGNORE).sum())
        for layer in moe_layers(engine.model).values():
            assert int(layer.token_counts().sum()) == expected * BOTH.moe.top_k
        engine.optim_step()
        assert engine.status["tokens_seen"] == expected


@pytest.mark.ranks
def test_nothing_but_padding() -> None:
    """No bias moves, and no number is divided by zero."""
    batch = {**whole_batch(), "targets": torch.full((ROWS, LENGTH), IGNORE)}
    collector.drain()
    with Engine.build(recipe(Layout(config=BOTH))) as engine:
        metrics = engine.forward_backward(batch)
        assert (metrics["tokens"], metrics["targets"], metrics["padding"]) == (0, 0, ROWS * LENGTH)
        for name, parameter in engine.named_parameters():
            assert parameter.grad is None or not parameter.grad.any(), name
        engine.optim_step()
        assert not any(layer.expert_bias.any() for layer in moe_layers(engine.model).values())
        assert engine.status["tokens_seen"] == 0
    assert float(collector.drain()["expert_load"].value) == 0.0


@pytest.mark.ranks
def test_replayed_routes_of_padding() -> None:
    """They are visited, and not counted."""
    batch = padded()
    real = ~position_by_position(batch["targets"], None)
    config = replace(BOTH, moe=replace(BOTH.moe, load_balance_coeff=1.0))
    with Engine.build(recipe(Layout(config=config))) as engine:
        routing = engine.model.routing
        drawn = torch.rand(ROWS, LENGTH, routing.layers, routing.num_experts).argsort(-1)
        routes = drawn[..., : routing.top_k]
        engine.forward_backward({**batch, "routes": routes})
        for column, layer in enumerate(moe_layers(engine.model).values()):
            visits = routes[:, :, column][real].flatten().bincount(minlength=routing.num_experts)
            assert torch.equal(layer.token_counts(), visits)


def on_one_rank_only(mesh: dict[str, int]) -> list[Any]:
    """Steps in which one rank alone has padding, or says so in another way."""
    found: list[Any] = []
    with Engine.build(recipe(Layout(mesh, config=BOTH))) as engine:
        rank = torch.distributed.get_rank()
        batch = dict(whole_batch())
        batch["targets"] = batch["tokens"].clone()  # every position is a target
        if rank == 1:
            batch["targets"][:, TAIL:] = IGNORE
        for given in (batch, {**batch, "padding": padding_of(batch["targets"])} if rank else batch):
            try:
                found.append(engine.forward_backward(given)["padding"])
            except Disagreement as error:
                found.append(error.message)
            engine.clear_gradients()
    return found


@pytest.mark.ranks
def test_padding_on_one_rank_only(ranks: Ranks) -> None:
    """Data-parallel ranks have their own; those of tp the same rows."""
    assert ranks(2, on_one_rank_only, {"dp_shard": 2}) == [[ROWS * TAIL] * 2] * 2
    for found in ranks(2, on_one_rank_only, {"tp": 2}):
        assert all("the ranks call forward_backward differently" in one for one in found)


def in_some_micro_batches() -> list[float]:
    """The loss and the padding of a step whose rows have padding in the second half of them alone."""
    layout = Layout({"pp": 2}, config=BOTH, pipeline={"microbatch_size": 2})
    with Engine.build(recipe(layout)) as engine:
        batch = whole_batch()
        targets = batch["tokens"].clone()
        targets[ROWS // 2 :, TAIL:] = IGNORE
        halves = Batch({**batch, "targets": targets}).split(ROWS // 2)
        found = []
        for given in ([Batch({**batch, "targets": targets})], halves):
            metrics = engine.forward_backward(given)
            found += [float(metrics["loss"]), metrics["padding"]]
            engine.clear_gradients()
        return found


@pytest.mark.ranks
def test_padding_in_some_micro_batches(ranks: Ranks) -> None:
    """A pipeline joins them."""
    for loss, padding, again, same in ranks(2, in_some_micro_batches):
        assert padding == same == ROWS // 2 * TAIL
        assert again == pytest.approx(loss, rel=1e-6)
