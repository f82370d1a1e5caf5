"""Numbers gone wrong: such steps are not applied, on no rank, and are counted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.engine.cases import my_batches, recipe, small
from tests.engine.wrong import Wrong
from titancli.engine import Engine
from titancli.engine.dry_run import local
from titancli.engine.skip_step import Guard, step_with
from titancli.errors import TitanError
from titancli.losses import CrossEntropy
from titancli.optimizers import AdamW
from titancli.protocols.result import LossResult
from titancli.recipe.schema import Stability

FAULTS = ["nan loss", "inf gradient", "spike"]
CPU = torch.device("cpu")


def engine_of(
    mesh: dict[str, int], loss: Any, optimizer: str = "adamw", stability: Stability | None = None
) -> Engine:
    made = recipe(small(mesh, loss=loss, pipeline={"microbatch_size": 4}))
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
    mine = {name: local(t) for name, t in tensors.items()}
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in mine.items()}


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
        pytest.param(2, {"dp_replicate": 2}, "sgd", marks=pytest.mark.slow),
        pytest.param(2, {"tp": 2}, "adamw", marks=pytest.mark.slow),
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


def _applied_when_nobody_asks(loss: Wrong) -> tuple[float, bool]:
    engine = engine_of({}, loss, stability=Stability(skip_nonfinite=False, sigma=0.0))
    metrics = step(engine, 0)
    weights = torch.cat([local(p.detach()).reshape(-1) for _, p in engine.named_parameters()])
    return metrics["skipped_steps"], bool(weights.isnan().any())


@pytest.mark.ranks
def test_with_all_checks_off_wrong_numbers_are_applied(ranks: Any) -> None:
    assert ranks(1, _applied_when_nobody_asks, Wrong(calls=[1])) == [(0, True)]


def _a_script_that_only_skips(mesh: dict[str, int]) -> list[Any]:
    loss = Wrong(rank=1 if mesh else 0, calls=[3, 4, 5, 7])
    engine = engine_of(mesh, loss, stability=Stability(max_skips=2))
    found: list[Any] = []
    for number in range(7):
        try:
            found.append(step(engine, number)["skipped_steps"])
        except TitanError as error:
            found.append(error.message)
    return [*found, engine.status["step"], engine.status["accumulated"]]


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}])
def test_a_script_is_told_by_an_error_on_every_rank_and_can_go_on(ranks: Any, mesh: dict[str, int]) -> None:
    told = "2 steps in a row were skipped, up to step 4: the loss and the gradient norm are not finite"
    for found in ranks(len(mesh) + 1, _a_script_that_only_skips, mesh):
        assert found == [0, 0, 1, told, 3, 3, 4, 7, 0]


def _of_another_scale(steady: bool) -> list[bool]:
    """A script's own loss, which is a hundred times greater from the ninth step on."""
    engine = engine_of({}, CrossEntropy())
    found = []
    for number in range(18):
        scale = 100.0 if number >= 8 else 1.0

        def loss(log_probs: torch.Tensor, batch: Any, scale: float = scale) -> LossResult:
            return LossResult(-scale * log_probs.sum(), (batch["targets"] >= 0).sum())

        loss.steady = steady  # type: ignore[attr-defined]
        before = bits(engine)
        engine.forward_backward(my_batches(engine, number), loss)
        engine.optim_step()
        found.append(bits(engine) == before)
    return found


@pytest.mark.ranks
def test_a_loss_of_another_scale_is_a_new_level_and_no_spike_where_there_is_none(ranks: Any) -> None:
    assert ranks(1, _of_another_scale, True) == [[False] * 8 + [True] * 4 + [False] * 6]
    assert ranks(1, _of_another_scale, False) == [[False] * 18]


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
    assert engine.guard is not None
    engine.guard.too_many()  # as a run does, which reads what the device is done with
    engine.guard._reads = False  # as on a GPU
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
    if request.node.get_closest_marker("ranks") is None:
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


def test_a_guard_on_a_cpu_holds_the_same_bits_as_one_that_reads_nothing() -> None:
    """Spikes, numbers that are not finite, a new level, and steps whose loss keeps to none."""
    section = Stability(window=6, sigma=3.0)
    guards = [Guard(section, CPU), Guard(section, CPU)]
    guards[1]._reads = False
    norms = np.random.default_rng(2).lognormal(0.0, 0.3, 60)
    norms[30:] *= 20
    norms[[9, 20]], norms[[3, 25, 44]] = 9.0, np.nan
    verdicts = []
    for number, norm in enumerate(norms):
        weight = torch.tensor(0.0 if number in (12, 33) else 1.0)
        given = (number, torch.tensor(norm).float(), torch.tensor(1.0), weight)
        first, second = (guard.judge(*given, steady=number % 7 != 0) for guard in guards)
        verdicts.append(bool(first))
        assert (first.dtype, first.shape, bool(first)) == (second.dtype, second.shape, bool(second))
        for name in ("_values", "_applied", "_above", "_above_count", "_record"):
            one, other = (getattr(guard, name) for guard in guards)
            assert one.dtype == other.dtype and torch.equal(one, other), (number, name)
        assert guards[0].skipped == guards[1].skipped
    assert 6 < sum(verdicts) < 20 and guards[0].too_many() == guards[1].too_many()
    assert guards[0]._record[9] == 1


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
        "step 3 was skipped: the gradient norm is 9, but the previous steps suggest less than 1.6",
        "step 4 was skipped: the loss is not finite",
    ]
    judge(guard, 5, float("inf"))
    assert guard.too_many()
    error = guard.verdict("checkpoints/step-5")
    assert isinstance(error, TitanError)
    assert error.message == "3 steps in a row were skipped, up to step 5: the gradient norm is not finite"
    assert "checkpoints/step-5 holds the weights of step 2" in str(error.hint)
    judge(guard, 6, 1.0)
    assert not guard.too_many()


@pytest.mark.parametrize("section", [Stability(), Stability(skip_nonfinite=False, sigma=0.0)])
@pytest.mark.parametrize("weight", [0.0, -2.0])
def test_a_step_that_nothing_can_be_divided_by_is_always_skipped(
    section: Stability, weight: float, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard(dataclasses.replace(section, max_skips=2), CPU)
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    with caplog.at_level(logging.WARNING):
        assert not guard.judge(1, one, one, one) and not guard.too_many()
        assert guard.judge(2, zero, zero, torch.tensor(weight)) and not guard.too_many()
    why = "the weight of its loss is not above 0, as where no token is a target"
    assert caplog.messages == [f"step 2 was skipped: {why}"]
    assert guard.state()["norms"] == [1.0]
    assert guard.judge(3, zero, zero, torch.tensor(weight)) and guard.too_many()
    assert guard.verdict(None).message == f"2 steps in a row were skipped, up to step 3: {why}"
    judge(guard, 4, float("nan"))
    assert "not finite" in guard.verdict(None).message or not section.skip_nonfinite


def noisy(level: float, count: int, seed: int = 0) -> list[float]:
    return list(level * np.random.default_rng(seed).lognormal(0.0, 0.3, count))


@pytest.mark.parametrize("which", ["loss", "norm", "both"])
def test_a_new_level_is_recognised_and_reported_once(which: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loss, its gradient's norm or both are ten times greater from step 141 on."""
    guard = Guard(Stability(), CPU)
    usual, risen = noisy(2.0, 140), noisy(20.0, 200, seed=1)
    values = {"usual": usual + noisy(2.0, 200, seed=2), "risen": usual + risen}
    losses = values["risen" if which != "norm" else "usual"]
    norms = values["risen" if which != "loss" else "usual"]
    with caplog.at_level(logging.WARNING):
        skipped = []
        for number, (norm, loss) in enumerate(zip(norms, losses, strict=True), start=1):
            skipped.append(judge(guard, number, norm, loss))
            assert not guard.too_many()
    assert sum(skipped) == sum(skipped[140:144]) == 4
    told = [message for message in caplog.messages if "new level" in message]
    assert len(told) == 1 and "step 145 was applied: the " in told[0] and "in 5 steps in a row" in told[0]
    assert judge(guard, 400, 500.0, 500.0), "a spike at the new level is one"


def test_spikes_that_do_not_agree_are_no_level() -> None:
    guard = Guard(Stability(window=8, max_skips=100), CPU)
    assert not any(judge(guard, number, 1.0) for number in range(8))
    assert all(judge(guard, number, 3.0 ** (number % 7 + 1)) for number in range(8, 40))
    assert not judge(guard, 40, 1.0)


def test_what_lies_between_makes_no_level_of_single_spikes() -> None:
    guard = Guard(Stability(window=8), CPU)
    assert not any(judge(guard, number, 1.0) for number in range(8))
    for number in range(8, 80):
        good, broken = number % 4 == 0, number % 7 == 0
        assert judge(guard, number, float("nan") if broken else 1.0 if good else 9.0) != (good and not broken)


@pytest.mark.parametrize("shorter", [1, 2, 4])
def test_more_skips_than_allowed_end_a_script_before_there_is_a_level(shorter: int) -> None:
    guard = Guard(Stability(window=8, max_skips=shorter), CPU)
    for number in range(8):
        judge(guard, number, 1.0)
        guard.check()
    for number in range(8, 8 + shorter):
        assert judge(guard, number, 9.0)
        if number < 7 + shorter:
            guard.check()
    with pytest.raises(TitanError, match=f"{shorter} steps in a row were skipped, up to step {7 + shorter}"):
        guard.check()
    judge(guard, 20, 1.0)
    guard.check()


def test_where_numbers_arrive_late_a_script_hears_of_them_at_the_same_step_on_every_rank() -> None:
    guard = Guard(Stability(max_skips=2), CPU)
    guard._lag = 2  # as on a GPU
    for number in (1, 2, 3):
        judge(guard, number, float("nan"))
        guard.check()
    judge(guard, 4, 1.0)
    with pytest.raises(TitanError, match="2 steps in a row were skipped, up to step 2"):
        guard.check()
    for number in (5, 6, 7, 8):
        judge(guard, number, 1.0)
        guard.check()


def test_a_guard_that_was_loaded_judges_as_the_one_that_was_saved() -> None:
    section = Stability(window=8, sigma=2.0)
    norms = np.random.default_rng(1).lognormal(0.0, 0.5, 60)
    norms[27:] *= 10
    whole, first = Guard(section, CPU), Guard(section, CPU)
    verdicts = [judge(whole, number, float(norm)) for number, norm in enumerate(norms)]
    for cut in (3, 8, 29, 30, 40):
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


def test_an_optimizer_that_only_skips_gets_divided_gradients() -> None:
    """One of a plugin that heeds `found_inf` and knows of no `grad_scale`."""

    class Skipping(torch.optim.SGD):
        _step_supports_amp_scaling = True
        found_inf = None

        def step(self, closure: Any = None) -> Any:
            assert not hasattr(self, "grad_scale")
            wrong, self.found_inf = float(self.found_inf), None
            return None if wrong else super().step()

    def stepped(made: Any, wrong: float) -> float:
        weight = torch.nn.Parameter(torch.ones(()))
        weight.grad = torch.tensor(6.0)
        step_with(made([weight], lr=0.5), torch.tensor(3.0), torch.tensor(wrong))
        return float(weight)

    assert [stepped(Skipping, wrong) for wrong in (0.0, 1.0)] == [0.0, 1.0]
    assert [stepped(torch.optim.SGD, wrong) for wrong in (0.0, 1.0)] == [0.0, 1.0]
    fused = functools.partial(torch.optim.SGD, fused=True)
    assert [stepped(fused, wrong) for wrong in (0.0, 1.0)] == [0.0, 1.0]


def test_a_hook_of_a_script_changes_no_bit() -> None:
    """Gradients are then divided in a pass of their own."""

    def stepped(hook: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(1000))
        weight.grad = torch.linspace(-1, 1, 1000)
        optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
        if hook:
            optimizer.register_step_pre_hook(lambda *given: None)
        step_with(optimizer, torch.tensor(1237.0), torch.tensor(0.0))
        return weight.detach()

    assert torch.equal(stepped(hook=True), stepped(hook=False))


def test_offloaded_parameters_have_the_numbers_of_a_step_beside_them() -> None:
    """torch's fused steps would copy them to the CPU without waiting, and read what is not there yet."""
    seen = []

    class Recording(torch.optim.SGD):
        _step_supports_amp_scaling = True
        grad_scale: Any = None
        found_inf: Any = None

        def step(self, closure: Any = None) -> Any:
            seen.append((self.grad_scale.device.type, self.found_inf.device.type))

    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        on_gpu = torch.ones((), device="cuda")
        step_with(Recording([weight], lr=0.1), on_gpu, on_gpu)
    assert seen == [("cpu", "cpu")]
