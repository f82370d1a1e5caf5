"""Hooks of steps: what they see and when, what their vetoes and errors do, on one rank and on two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_library import TINY, batch
from tests.ranks import Ranks
from titancli import Engine, TitanError
from titancli.engine.dry_run import local
from titancli.engine.step import Backward, Step
from titancli.errors import RankFailure
from titancli.models import Llama3
from titancli.recipe.schema import Mesh, Training

GOOD = batch()
TRAINING = Training(steps=9, seq_len=16, mixed_precision_param="float32")
MOMENTS = ("enter", "leave", "gradients_ready", "step_applied")


class Everything:
    """Notes what it is shown; at the moment `raises` it raises."""

    def __init__(self, raises: str = "", veto: Any = None, metrics: Any = None) -> None:
        self.raises, self.veto, self.metrics = raises, veto, metrics
        self.seen: list[Any] = []

    def at(self, moment: str, *what: Any) -> None:
        self.seen.append((moment, *what))
        if moment == self.raises:
            raise ValueError(f"no {moment}")

    @contextmanager
    def around_backward(self, backward: Backward) -> Iterator[None]:
        self.at("enter", backward.step.number, backward.is_first, len(backward.batches))
        yield
        self.at("leave")

    def gradients_ready(self, step: Step) -> Any:
        self.at("gradients_ready", float(step.norm) > 0, step.tokens, step.lr)
        return self.veto

    def step_applied(self, step: Step) -> Any:
        self.at("step_applied", step.number, bool(step.skipped))
        return self.metrics


def made(*hooks: Any, **parts: Any) -> Engine:
    engine = Engine.of(Llama3(**TINY), training=TRAINING, **parts)
    for hook in hooks:
        engine.hooks.add(hook)
    return engine


def step(engine: Engine) -> dict[str, Any]:
    return engine.forward_backward(GOOD) | engine.optim_step()


def bits(engine: Engine) -> list[torch.Tensor]:
    return [local(tensor).clone() for tensor in engine.save_state()[0].values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_a_hook_sees_a_step_at_its_moments_and_adds_metrics() -> None:
    hook = Everything(metrics={"own": 2.0, "nan": torch.tensor(float("nan"))})
    with made() as plain, made(hook) as engine:
        for number in (1, 2):
            engine.forward_backward(GOOD)
            found, expected = step(engine), {}
            plain.forward_backward(GOOD)
            expected = step(plain)
            assert found.pop("own") == 2.0 and found.pop("nan").isnan()
            assert {k: float(v) for k, v in found.items()} == {k: float(v) for k, v in expected.items()}
            assert hook.seen == [
                *(("enter", number, True, 1), ("leave",), ("enter", number, False, 1), ("leave",)),
                ("gradients_ready", True, 2 * GOOD["tokens"].numel(), found["lr"]),
                ("step_applied", number, False),
            ]
            hook.seen.clear()
        assert same(bits(plain), bits(engine))


def test_a_hook_may_compute_once_more_evaluate_and_draw_and_changes_nothing() -> None:
    class Busy:
        def around_backward(self, backward: Backward) -> None:
            backward.compute()
            self.first = [p.grad.clone() for _, p in engine.named_parameters()]
            backward.forget()
            assert all(p.grad is None for _, p in engine.named_parameters())
            self.before = engine.forward(GOOD)

        def gradients_ready(self, step: Step) -> None:
            assert same(self.first, [p.grad for _, p in engine.named_parameters()])
            torch.rand(3)

        def step_applied(self, step: Step) -> dict[str, Any]:
            assert not torch.equal(engine.forward(GOOD), self.before)
            return {"after": engine.evaluate(GOOD)["loss"]}

    with made() as plain, made(Busy()) as engine:
        step(plain)
        found = step(engine)
        assert same(bits(plain), bits(engine))
        assert found["after"] == plain.evaluate(GOOD)["loss"]


@pytest.mark.parametrize("verb", ["forward_backward", "optim_step", "save", "load", "clear_gradients"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_hook_cannot_call_verbs_that_change_something(moment: str, verb: str) -> None:
    class Calls(Everything):
        def at(self, now: str, *what: Any) -> None:
            if now == moment:
                given = {"forward_backward": (GOOD,), "save": ("nowhere",), "load": ("nowhere",)}
                getattr(engine, verb)(*given.get(verb, ()))

    with made(Calls()) as engine, pytest.raises(TitanError, match=f"{verb}: the engine is in the middle of"):
        step(engine)


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_hook_raises_ends_the_verb_and_the_engine_goes_on(moment: str, tmp_path: Any) -> None:
    hook = Everything()
    with made(hook) as engine, made() as plain:
        engine.save(tmp_path / "step-0")
        hook.raises = moment
        with pytest.raises(ValueError, match=f"no {moment}"):
            step(engine)
        hook.raises = ""
        if moment in ("gradients_ready", "step_applied"):
            with pytest.raises(TitanError, match="optim_step raised an error after it had started"):
                engine.forward_backward(GOOD)
            engine.load(tmp_path / "step-0")
        assert engine.status["accumulated"] == 0
        step(engine)
        step(plain)
        assert same(bits(plain), bits(engine))


@pytest.mark.parametrize("veto", [True, torch.tensor(1.0), torch.tensor([float("nan")])])
def test_a_veto_skips_the_step_and_counts_it(veto: Any, caplog: pytest.LogCaptureFixture) -> None:
    hook, other = Everything(veto=veto), Everything(veto=torch.tensor(False))
    with made(other, hook, Everything(veto=False)) as engine:
        before = [p.detach().clone() for _, p in engine.named_parameters()]
        found = step(engine)
        assert float(found["skipped_steps"]) == 1 and engine.step == 1
        assert same(before, [p for _, p in engine.named_parameters()])
        assert other.seen[-1] == ("step_applied", 1, True)
        assert "step 1 was skipped: a callback has vetoed it" in caplog.text
        hook.veto = None
        assert float(step(engine)["skipped_steps"]) == 1
        assert not same(before, [p for _, p in engine.named_parameters()])


def test_a_step_without_targets_is_shown_as_skipped() -> None:
    hook = Everything()
    with made(hook) as engine:
        nothing = {**GOOD, "targets": torch.full_like(GOOD["targets"], -100)}
        engine.forward_backward(nothing)
        engine.optim_step()
        assert hook.seen[-1] == ("step_applied", 1, True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"grad_norm": 1.0}, "Everything returned the metric 'grad_norm', which there is already"),
        ({"own": torch.zeros(2)}, "step_applied of Everything must return metrics"),
        (3.0, "step_applied of Everything must return metrics"),
        ({"own": "text"}, "step_applied of Everything must return metrics"),
    ],
)
def test_what_are_no_metrics_is_refused(returned: Any, message: str) -> None:
    with made(Everything(metrics=returned)) as engine, pytest.raises(TitanError, match=message):
        step(engine)


def test_what_is_no_veto_is_refused() -> None:
    with made(Everything(veto="yes")) as engine, pytest.raises(TitanError, match="gradients_ready of Every"):
        step(engine)


def test_two_hooks_that_return_the_same_metric_are_refused() -> None:
    hooks = Everything(metrics={"own": 1.0}), Everything(metrics={"own": 1.0})
    with made(*hooks) as engine, pytest.raises(TitanError, match="returned the metric 'own'"):
        step(engine)


def test_the_same_hook_twice_is_refused_and_two_engines_have_their_own() -> None:
    hook = Everything()
    with made(hook) as one, made() as other:
        with pytest.raises(TitanError, match="the hook Everything was added to the engine twice"):
            one.hooks.add(hook)
        step(other)
        assert hook.seen == []
        step(one)
        assert hook.seen


def of_two_ranks(moment: str, folder: Path) -> list[str]:
    """A hook that vetoes on rank 1 alone; then one that raises on both, and then on rank 1 alone."""
    rank = torch.distributed.get_rank()
    found: list[str] = []
    hook = Everything(veto=rank == 1)
    with made(hook, mesh=Mesh(dp_shard=2)) as engine:
        found.append(f"skipped {float(step(engine)['skipped_steps']):g}")
        hook.veto = None
        engine.save(folder)
        for everywhere in (True, False):
            hook.raises = moment if everywhere or rank == 1 else ""
            try:
                step(engine)
                found.append("nothing raised")
            except (ValueError, RankFailure) as error:
                found.append(type(error).__name__ + (" of rank 1" if "rank 1" in str(error) else ""))
            hook.raises = ""
            if (everywhere or moment == "gradients_ready") and engine.ranks.lost is None:
                if moment not in ("enter", "leave"):
                    engine.load(folder)
                found.append(f"skipped {float(step(engine)['skipped_steps']):g}")
    return found


@pytest.mark.parametrize("moment", MOMENTS)
def test_ranks_agree_on_a_veto_and_hear_of_an_error(ranks: Ranks, moment: str, tmp_path: Path) -> None:
    first, second = ranks(2, of_two_ranks, moment, tmp_path / "step-1")
    shared = ["skipped 1", "ValueError", "skipped 1"]
    if moment == "gradients_ready":  # both hear of it before the step is applied, and can load
        assert first == [*shared, "RankFailure of rank 1", "skipped 1"]
        assert second == [*shared, "ValueError", "skipped 1"]
        return
    assert first[:3] == shared and second == [*shared, "ValueError"]
    if moment in ("enter", "leave"):  # later, rank 0 is done with its step
        assert first[3] == "RankFailure of rank 1"
