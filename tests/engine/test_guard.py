"""Numbers gone wrong: such steps are not applied, on no rank, and are counted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.engine.cases import Layout, my_batches, recipe
from tests.engine.wrong import Wrong
from titancli.engine import Engine
from titancli.engine.guard import Guard
from titancli.errors import TitanError
from titancli.optimizers import AdamW
from titancli.recipe.schema import Stability

FAULTS = ["nan loss", "inf gradient", "spike"]
CPU = torch.device("cpu")


def engine_of(
    mesh: dict[str, int], loss: Any, optimizer: str = "adamw", stability: Stability | None = None
) -> Engine:
    made = recipe(Layout(mesh=mesh, loss=loss, pipeline={"microbatch_size": 4}))
    stability = stability or Stability(window=4)
    if optimizer == "mixed":
        changed = AdamW(lr=1e-2, eps=1e-4, state_dtype="bfloat16")
        made = dataclasses.replace(made, optimizer=changed)
    engine = Engine.build(dataclasses.replace(made, stability=stability))
    if optimizer == "sgd":
        engine.optimizer = torch.optim.SGD([p for _, p in engine.named_parameters()], lr=0.1, momentum=0.9)
        for group in engine.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return engine


def bits(engine: Engine) -> dict[str, bytes]:
    """Every weight and all of the optimizer's state, this rank's part."""
    tensors, _ = engine.save_state()
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in local.items()}


def step(engine: Engine, number: int) -> dict[str, float]:
    metrics = engine.forward_backward(my_batches(engine, number)) | engine.optim_step()
    return {name: float(value) for name, value in metrics.items()}


def _one_wrong_step(mesh: dict[str, int], loss: Wrong, optimizer: str) -> list[Any]:
    engine = engine_of(mesh, loss, optimizer)
    states, skipped = [bits(engine)], []
    for number in range(8):
        metrics = step(engine, number)
        states.append(bits(engine))
        skipped.append(metrics["skipped_steps"])
    unchanged = [before == after for before, after in itertools.pairwise(states)]
    return [unchanged, skipped, engine.step, engine.tokens_seen]


@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("ranks_", "mesh", "optimizer"),
    [
        (1, {}, "adamw"),
        (1, {}, "sgd"),
        (1, {}, "mixed"),
        (2, {"dp_shard": 2}, "adamw"),
        (2, {"dp_replicate": 2}, "sgd"),
        (2, {"tp": 2}, "adamw"),
        (2, {"pp": 2}, "adamw"),
    ],
)
def test_a_wrong_step_on_one_rank_is_skipped_on_all_and_counted(
    ranks: Any, ranks_: int, mesh: dict[str, int], optimizer: str, fault: Any
) -> None:
    calls = [11] if "pp" in mesh else [6]  # there a step is two micro-batches
    loss = Wrong(fault=fault, rank=ranks_ - 1, calls=calls)
    for unchanged, skipped, steps, tokens in ranks(ranks_, _one_wrong_step, mesh, loss, optimizer):
        assert unchanged == [False] * 5 + [True] + [False] * 2
        assert skipped == [0] * 5 + [1] * 3
        assert (steps, tokens) == (8, 8 * 8 * 16)


def _as_if_it_had_not_been(loss: Wrong) -> bool:
    """After a skipped step the run is where one is that never saw its data, but for the step's number."""
    wrong, other = engine_of({}, loss), engine_of({}, Wrong(fault="none", calls=[]))
    for number in range(4):
        step(wrong, number)
        if number == 2:
            other.step += 1
        else:
            step(other, number)
    return bits(wrong) == bits(other)


@pytest.mark.ranks
def test_a_skipped_step_leaves_no_trace(ranks: Any) -> None:
    assert ranks(1, _as_if_it_had_not_been, Wrong(calls=[3])) == [True]


def _applied_when_nobody_asks(loss: Wrong) -> tuple[bool, bool]:
    engine = engine_of({}, loss, stability=Stability(skip_nonfinite=False, sigma=0.0))
    metrics = step(engine, 0)
    weights = torch.cat([p.detach().to_local().reshape(-1) for _, p in engine.named_parameters()])
    return "skipped_steps" in metrics, bool(weights.isnan().any())


@pytest.mark.ranks
def test_without_a_guard_wrong_numbers_are_applied(ranks: Any) -> None:
    assert ranks(1, _applied_when_nobody_asks, Wrong(calls=[1])) == [(False, True)]


@contextmanager
def no_reading() -> Iterator[None]:
    """Every way in which Python reads a tensor's numbers fails."""

    def refuse(self: torch.Tensor, *given: Any) -> Any:
        raise AssertionError("a number was read to the host")

    names = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(torch.Tensor, name, refuse)
        yield


def _steps_unread(optimizer: str) -> list[float]:
    engine = engine_of({}, Wrong(calls=[3]), optimizer)
    for number in range(4):
        engine.forward_backward(my_batches(engine, number))
        with no_reading():
            metrics = engine.optim_step()
    return [float(metrics["skipped_steps"])]


@pytest.mark.ranks
def test_fused_adamw_reads_nothing_to_the_host(ranks: Any) -> None:
    assert ranks(1, _steps_unread, "adamw") == [[1.0]]
    with pytest.raises(AssertionError, match="a number was read to the host"):
        ranks(1, _steps_unread, "sgd")


# --------------------------------------------------------------------------------------- the rule itself


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "ranks" not in request.keywords:
        monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 1)


def judge(guard: Guard, number: int, norm: float, loss: float = 1.0) -> bool:
    return bool(guard.judge(number, torch.tensor(norm), torch.tensor(loss)))


def test_a_spike_is_what_numpy_says_it_is() -> None:
    window, sigma = 16, 3.0
    random = np.random.default_rng(0)
    norms = random.lognormal(0.0, 0.4, 400)
    norms[::37] *= 3
    guard, applied, expected, found = Guard(Stability(window=window, sigma=sigma), CPU), [], [], []
    for number, norm in enumerate(norms, start=1):
        last = np.array(applied[-window:])
        limit = last.mean() + sigma * max(last.std(), 0.1 * last.mean()) if len(last) == window else np.inf
        expected.append(bool(norm > limit))
        if not expected[-1]:
            applied.append(norm)
        found.append(judge(guard, number, float(norm)))
    assert found == expected
    assert 5 < sum(found) < 40
    assert guard.skipped == sum(found)


def test_numbers_that_hardly_vary_do_not_make_a_spike_of_anything() -> None:
    guard = Guard(Stability(window=8), CPU)
    assert not any(judge(guard, number, 1.0) for number in range(1, 20))
    assert not judge(guard, 20, 1.59)
    assert judge(guard, 21, 2.3)
    assert judge(guard, 22, 1.0, loss=2.0)


def test_a_loss_below_zero_may_rise_a_little() -> None:
    guard = Guard(Stability(window=8), CPU)
    assert not any(judge(guard, number, 1.0, loss=-1.0) for number in range(1, 20))
    assert not judge(guard, 20, 1.0, loss=-0.5)
    assert judge(guard, 21, 1.0, loss=0.5)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_skipped_at_once_and_never_remembered(number: float) -> None:
    guard = Guard(Stability(window=2), CPU)
    assert judge(guard, 1, number)
    assert judge(guard, 2, 1.0, loss=number)
    only_spikes = Guard(Stability(window=2, skip_nonfinite=False), CPU)
    assert not judge(only_spikes, 1, number)
    assert guard.state()["norms"] == only_spikes.state()["norms"] == []


def test_each_skipped_step_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(Stability(window=2, max_skips=3), CPU)
    with caplog.at_level(logging.WARNING):
        assert not guard.too_many()
        for number, (norm, loss) in enumerate([(1.0, 1.0), (1.0, 1.0), (9.0, 1.0)], start=1):
            judge(guard, number, norm, loss)
            assert not guard.too_many()
        judge(guard, 4, 1.0, float("nan"))
        assert not guard.too_many()
        assert not guard.too_many()
    assert caplog.messages == [
        "step 3 is skipped: the gradient norm is 9, and the last steps' lead to expect less than 1.6",
        "step 4 is skipped: the loss is not finite",
    ]
    judge(guard, 5, float("inf"))
    assert guard.too_many()
    error = guard.verdict("checkpoints/step-5")
    assert isinstance(error, TitanError)
    assert error.message == "3 steps in a row were skipped, up to step 5: the gradient norm is not finite"
    assert "checkpoints/step-5 holds the weights of step 2" in str(error.hint)
    judge(guard, 6, 1.0)
    assert not guard.too_many()


def test_a_guard_that_was_loaded_judges_as_the_one_that_was_saved() -> None:
    section = Stability(window=8, sigma=2.0)
    norms = np.random.default_rng(1).lognormal(0.0, 0.5, 60)
    whole, first = Guard(section, CPU), Guard(section, CPU)
    verdicts = [judge(whole, number, float(norm)) for number, norm in enumerate(norms)]
    for cut in (3, 8, 30):
        first = Guard(section, CPU)
        halves = [judge(first, number, float(norm)) for number, norm in enumerate(norms[:cut])]
        second = Guard(section, CPU)
        second.load_state(json.loads(json.dumps(first.state())))
        halves += [judge(second, number, float(norm)) for number, norm in enumerate(norms[cut:], start=cut)]
        assert halves == verdicts
        assert second.state() == whole.state()
    assert any(verdicts)


def test_a_window_of_another_size_takes_what_there_is() -> None:
    guard = Guard(Stability(window=4), CPU)
    for number in range(6):
        judge(guard, number, 1.0 + 0.1 * number)
    for window in (2, 9):
        other = Guard(Stability(window=window), CPU)
        other.load_state(guard.state())
        assert other.state()["norms"] == guard.state()["norms"][-window:]


def test_a_run_that_ended_for_its_skipped_steps_may_skip_as_many_again() -> None:
    guard = Guard(Stability(max_skips=2), CPU)
    for number in (1, 2):
        judge(guard, number, float("nan"))
    again = Guard(Stability(max_skips=2), CPU)
    again.load_state(guard.state())
    judge(again, 3, float("nan"))
    assert not again.too_many()
    judge(again, 4, float("nan"))
    assert again.too_many()
    assert again.skipped == 4
