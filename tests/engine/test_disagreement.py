"""Ranks that do not do the same: each gets one error that says how they differ, and nobody waits for ever."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine import cases
from tests.engine.cases import Layout, small
from tests.ranks import GROUP_SECONDS
from titancli import Batch, Engine, LossResult, TitanError
from titancli.distributed import process_group
from titancli.engine.ranks import rank_group
from titancli.errors import RankFailure

pytestmark = pytest.mark.ranks

LIMIT = 2
TWO = small({"dp_shard": 2})


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except TitanError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def a_step(engine: Engine, step: int = 0) -> dict[str, torch.Tensor]:
    engine.forward_backward(cases.my_batches(engine, step))
    engine.optim_step()
    return cases.wholes(engine.named_parameters())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def negative(out: torch.Tensor, batch: Batch) -> LossResult:
    return LossResult(-out.sum(), (batch["targets"] >= 0).sum())


# -------------------------------------------------------------------------------------- called differently


def differ() -> tuple[list[str], bool]:
    me = dist.get_rank()
    plain, engine, other = (Engine.build(cases.recipe(TWO)) for _ in range(3))
    batch = cases.my_batches(engine)[0]
    empty = Batch({name: tensor[:0] for name, tensor in batch.items()})
    more = Batch({**batch, "advantages": torch.ones(batch.rows)})
    floats = Batch({**batch, "tokens": batch["tokens"].float()})

    def mine(*calls: Callable[[], Any]) -> Callable[[], Any]:
        return calls[me]

    messages = [
        raised(call)
        for call in (
            lambda: engine.forward_backward([batch] * (2 - me)),
            lambda: engine.evaluate([batch] * (1 + me)),
            lambda: engine.forward_backward([more, batch][me]),
            lambda: engine.forward_backward(batch, [negative, None][me]),
            lambda: engine.forward(batch, return_logits=me == 1),
            mine(lambda: engine.forward(batch), lambda: engine.evaluate(batch)),
            mine(lambda: engine.forward(batch), lambda: other.forward(batch)),
            lambda: engine.forward_backward([batch, floats][me]),
            lambda: engine.forward_backward([batch, empty][me]),
            lambda: engine.evaluate([[batch], []][me]),
            mine(lambda: engine.forward_backward(batch), engine.optim_step),
            lambda: Engine.build(cases.recipe(TWO, seed=me)),
            lambda: engine.save(f"/nowhere/step-{me}"),
        )
    ]
    engine.forward_backward(cases.my_batches(engine))
    messages.append(raised(lambda: engine.optim_step(lr=0.1 * me)))
    engine.clear_gradients()
    return messages, same(a_step(engine), a_step(plain))


def test_ranks_that_call_differently_are_named_and_the_engine_goes_on(ranks) -> None:
    (first, usable), (second, usable_too) = ranks(2, differ)
    expected = [
        "the ranks call forward_backward differently: rank 0 with 2 batches, rank 1 with 1 batch\n"
        "a rank without rows must pass a batch whose targets are all -100",
        "the ranks call evaluate differently: rank 0 with 1 batch, rank 1 with 2 batches\n"
        "a rank without rows must pass a batch whose targets are all -100",
        "rank 0 with advantages, targets, tokens, rank 1 with targets, tokens",
        "rank 0 with the loss negative, rank 1 with the loss CrossEntropy",
        "rank 0 with return_logits=False and temperature=1.0, rank 1 with return_logits=True",
        "the ranks call different verbs: rank 0 forward, rank 1 evaluate",
        "the ranks call forward differently: rank 0 on engine 2, rank 1 on engine 3",
        "the batch's tokens are torch.float32",
        "the batch's tokens are [0, 16]: the tensor is empty",
        "no batch",
        "optim_step without gradients",
        "the ranks call Engine.build differently: rank 0 with training.seed = 0, rank 1 with training.seed",
        "the ranks call save differently: rank 0 as step-0, rank 1 as step-1",
        "rank 0 with lr=0.0, rank 1 with lr=0.1",
    ]
    for own, others, words in zip(second, first, expected, strict=True):
        assert words in own
        assert words in others
    for number, verb in {
        7: "forward_backward",
        8: "forward_backward",
        9: "evaluate",
        10: "optim_step",
    }.items():
        assert first[number].startswith(f"rank 1 failed in {verb}: TitanError: ")
    assert usable and usable_too


def rows_of_tensor_ranks() -> tuple[list[str], Any]:
    """Messages for other shapes, other tokens and other targets; and what then works."""
    engine = Engine.build(cases.recipe(small({"tp": 2})))
    batch = cases.my_batches(engine)[0]
    mine = Batch({name: tensor[: 4 * (1 + dist.get_rank())] for name, tensor in batch.items()})
    others = Batch({**batch, "tokens": (batch["tokens"] + dist.get_rank()) % cases.VOCABULARY})
    aims = Batch({**batch, "targets": (batch["targets"] + dist.get_rank()) % cases.VOCABULARY})
    messages = [
        raised(lambda: engine.forward(mine)),
        raised(lambda: engine.forward_backward(others)),
        raised(lambda: engine.evaluate(aims)),
    ]
    return messages, engine.forward(batch).shape


def test_ranks_that_must_give_the_same_rows_and_do_not_are_named(ranks) -> None:
    for (shapes, values, aims), shape in ranks(2, rows_of_tensor_ranks):
        assert "rank 0 with targets [4, 16], tokens [4, 16], rank 1 with targets [8, 16]" in shapes
        assert "the ranks of mesh.tp, cp and pp must pass the same rows" in shapes
        assert "rank 0 with tokens of checksum" in values
        assert "rank 0 with targets of checksum" in aims
        assert shape == (cases.ROWS, cases.LENGTH)


# ------------------------------------------------------------------------------------------------- metrics


def reporting(reported: dict[str, float]) -> Callable[..., LossResult]:
    def loss(out: torch.Tensor, batch: Batch) -> LossResult:
        count = (batch["targets"] >= 0).sum()
        return LossResult(-out.sum(), count, {name: value * count for name, value in reported.items()})

    return loss


def metrics_by_name(layout: Layout) -> tuple[dict[str, Any], dict[str, Any], list[str], bool]:
    plain, engine = (Engine.build(cases.recipe(layout)) for _ in range(2))
    me, batches = engine.mesh.dp_rank, cases.my_batches(engine)
    loss = reporting([{"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}][me])
    trained, evaluated = engine.forward_backward(batches, loss), engine.evaluate(batches, loss)
    engine.clear_gradients()
    odd = reporting([{"a": 1.0}, {"a": 1.0, "extra": 3.0}][me])
    messages = [raised(partial(verb, batches, odd)) for verb in (engine.forward_backward, engine.evaluate)]
    assert engine.status["accumulated"] == 0
    return trained, evaluated, messages, same(a_step(engine), a_step(plain))


@pytest.mark.parametrize(
    ("world", "mesh", "there"),
    [
        (2, {"dp_shard": 2}, "rank 1, but not on rank 0"),
        (4, {"pp": 2, "dp_shard": 2}, "ranks 1, 3, but not on"),
    ],
)
def test_metrics_are_reduced_by_name(ranks, world: int, mesh: dict[str, int], there: str) -> None:
    for trained, evaluated, messages, usable in ranks(world, metrics_by_name, small(mesh)):
        for metrics in (trained, evaluated):
            assert (round(float(metrics["a"]), 5), round(float(metrics["b"]), 5)) == (1.0, 2.0)
        for message in messages:
            assert f"the loss reports 'extra' on {there}" in message
        assert usable


def metrics_with_nan() -> dict[str, float]:
    engine = Engine.build(cases.recipe(TWO))
    me, batches = engine.mesh.dp_rank, cases.my_batches(engine)
    found = engine.forward_backward(batches, reporting({"a": 1.0, "broken": math.nan if me else 1.0}))
    engine.clear_gradients()

    def nowhere(out: torch.Tensor, batch: Batch) -> LossResult:
        return LossResult(out.sum() * (math.nan if me else 1.0), torch.tensor(1.0))

    found["loss_max of nan"] = engine.forward_backward(batches, nowhere)["loss_max"]

    def weighs_nothing_known(out: torch.Tensor, batch: Batch) -> LossResult:
        return LossResult(out.sum(), torch.tensor(math.nan))

    found["loss by nan"] = engine.evaluate(batches, weighs_nothing_known)["loss"]
    return {name: float(value) for name, value in found.items()}


def test_a_nan_of_one_rank_is_seen_and_hides_nothing_else(ranks) -> None:
    for found in ranks(2, metrics_with_nan):
        assert {name for name, value in found.items() if math.isnan(value)} == {
            "broken",
            "loss_max of nan",
            "loss by nan",
        }
        assert round(found["a"], 5) == 1.0


def unequal_rows(mesh: dict[str, int]) -> tuple[list[int], dict[str, Any]]:
    engine = Engine.build(cases.recipe(small(mesh)))
    rows = 1 + engine.mesh.dp_rank
    batch = cases.whole_batch().split(rows)[0]
    counted = [engine.forward_backward(batch)["tokens"], engine.forward_backward([batch, batch])["tokens"]]
    engine.optim_step()
    return counted, dict(engine.status)


@pytest.mark.parametrize(("world", "mesh"), [(2, {"dp_replicate": 2}), (4, {"tp": 2, "dp_shard": 2})])
def test_tokens_are_those_that_the_ranks_had(ranks, world: int, mesh: dict[str, int]) -> None:
    for counted, status in ranks(world, unequal_rows, mesh):
        assert counted == [3 * cases.LENGTH, 6 * cases.LENGTH]
        assert status["tokens_seen"] == 9 * cases.LENGTH and type(status["tokens_seen"]) is int


# -------------------------------------------------------------------------------------- raising in the middle


def bad_loss(where: Callable[[int], bool]) -> Callable[..., LossResult]:
    def loss(out: torch.Tensor, batch: Batch) -> LossResult:
        if where(dist.get_rank()):
            raise ValueError("a row of 13 tokens")
        return LossResult(-out.sum(), (batch["targets"] >= 0).sum())

    return loss


def one_fails(layout: Layout, verb: str) -> tuple[str, str, float, list[str]]:
    process_group.set_timeouts(LIMIT)
    engine, other = Engine.build(cases.recipe(layout)), Engine.frozen(cases.recipe(layout))
    batches, last = cases.my_batches(engine), dist.get_world_size() - 1
    began = time.monotonic()
    try:
        getattr(engine, verb)(batches, bad_loss(lambda rank: rank == last))
    except Exception as error:
        kind, words = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    later = [
        raised(lambda: engine.forward(batches[0])),
        raised(lambda: other.forward(batches[0])),
        raised(lambda: Engine.build(cases.recipe(layout))),
    ]
    dist.distributed_c10d._get_default_store().set(
        f"out-{dist.get_rank()}", ""
    )  # or its end would end others
    dist.distributed_c10d._get_default_store().wait([f"out-{rank}" for rank in range(last + 1)])
    return kind, words, seconds, later


@pytest.mark.parametrize(
    ("world", "mesh", "verb"),
    [
        (2, {"dp_shard": 2}, "forward_backward"),
        (2, {"dp_replicate": 2}, "evaluate"),
        (2, {"tp": 2}, "forward_backward"),
        (2, {"pp": 2}, "forward_backward"),
        (4, {"pp": 2, "dp_shard": 2}, "evaluate"),
    ],
)
def test_a_loss_that_raises_on_one_rank_is_an_error_on_all_within_the_limit(
    ranks, world: int, mesh: dict[str, int], verb: str
) -> None:
    *others, failed = ranks(world, one_fails, small(mesh), verb)
    assert failed[:2] == ("ValueError", "a row of 13 tokens")
    for kind, words, *_ in others:
        assert kind == RankFailure.__name__
        assert f"rank {world - 1} failed in {verb}: ValueError: a row of 13 tokens" in words
    for *_, seconds, later in (*others, failed):
        assert seconds < GROUP_SECONDS
        for verb_later, message in zip(("forward", "forward", "Engine.build"), later, strict=True):
            assert message.startswith(f"{verb_later}: the engine is unusable, like every other engine")
            assert f"rank {world - 1} failed in {verb}: ValueError" in message


def all_fail() -> tuple[list[str], bool]:
    plain, engine = (Engine.build(cases.recipe(TWO)) for _ in range(2))
    batches = cases.my_batches(engine)
    messages = [
        raised(partial(verb, batches, bad_loss(lambda rank: True)))
        for verb in (engine.forward_backward, engine.evaluate, engine.forward_backward)
    ]
    return messages, same(a_step(engine), a_step(plain))


def test_a_loss_that_raises_alike_on_all_ranks_costs_no_engine(ranks) -> None:
    for messages, usable in ranks(2, all_fail):
        assert messages == ["ValueError: a row of 13 tokens"] * 3
        assert usable


def one_stays_away() -> str:
    process_group.set_timeouts(1)
    engine = Engine.build(cases.recipe(TWO))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["the other has its error"], timedelta(seconds=60))
        return ""
    message = raised(lambda: engine.forward(cases.my_batches(engine)[0]))
    store.set("the other has its error", b"")
    return message


def test_a_rank_that_does_not_come_is_named(ranks) -> None:
    message, _ = ranks(2, one_stays_away)
    assert message.startswith("rank 1 did not call forward within 1 s")


def without_the_cpu(store: str) -> tuple[list[list[int]], float]:
    """In a group as `init_process_group("nccl")` makes it, which takes no tensors on the CPU."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    place: Any = dict(store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=7))
    dist.init_process_group("cuda:gloo", **place)
    limit = process_group.present_timeout()
    assert limit is not None
    return rank_group().on_the_cpu.numbers([rank, 5]), limit.total_seconds()


def test_ranks_agree_in_a_group_that_takes_no_tensors_on_the_cpu(ranks, tmp_path) -> None:
    assert ranks(2, without_the_cpu, str(tmp_path / "store")) == [([[0, 5], [1, 5]], 7.0)] * 2
