"""The learning-rate schedule: its corners, and its shapes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest

from titancli.errors import PluginError
from titancli.optimizers import ScheduleConfig, WarmupStableDecay, schedule
from titancli.optimizers.schedule import build, schedule_of
from titancli.recipe import load_recipe
from titancli.registry.component import component


def lr_factor(config, step, steps):
    return build(config, steps=config.total_steps or steps)(step)


def factors(steps=10, **fields):
    return [lr_factor(WarmupStableDecay(**fields), step, steps) for step in range(steps)]


def test_warm_up_rises_from_the_first_step_to_the_peak():
    assert factors(warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_linear_decay_starts_after_warm_up_and_leaves_something_for_the_last_step():
    result = factors(warmup_steps=0)
    assert result == pytest.approx([1 - step / 10 for step in range(10)])
    assert result[-1] > 0


def test_decay_ratio_keeps_the_rate_stable_first():
    result = factors(warmup_steps=2, decay_ratio=0.3)
    assert result[2:8] == pytest.approx([1.0] * 6)
    assert result[8:] == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)]
)
def test_each_shape_at_its_middle(shape, middle):
    assert factors(warmup_steps=0, decay_type=shape)[5] == pytest.approx(middle)


def test_the_rate_never_falls_below_its_minimum():
    result = factors(warmup_steps=0, min_lr_factor=0.2)
    assert result[5] == pytest.approx(0.2 + 0.8 * 0.5)
    assert lr_factor(WarmupStableDecay(warmup_steps=0, min_lr_factor=0.2), 50, 10) == pytest.approx(0.2)


def test_total_steps_sets_the_length():
    assert lr_factor(WarmupStableDecay(warmup_steps=0, total_steps=20), 10, 15) == pytest.approx(0.5)


def test_warm_up_longer_than_the_run_takes_all_of_it():
    assert factors(steps=4, warmup_steps=8) == [0.25, 0.5, 0.75, 1.0]
    assert factors(steps=4, warmup_steps=8, decay_ratio=0.5) == [0.25, 0.5, 0.75, 1.0]
    assert factors(steps=4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_decay_takes_what_warm_up_leaves():
    assert factors(steps=10, warmup_steps=6, decay_ratio=0.8)[5:] == pytest.approx([1, 1, 0.75, 0.5, 0.25])


def test_a_resume_with_more_steps_follows_the_longer_schedule():
    section = WarmupStableDecay(warmup_steps=10)
    assert [lr_factor(section, step, 3) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])
    assert lr_factor(section, 3, 20) == pytest.approx(0.4)
    assert lr_factor(section, 9, 20) == lr_factor(section, 10, 20) == 1.0


@pytest.mark.parametrize("fields", [{"decay_ratio": 0.0}, {"decay_ratio": 0.0, "min_lr_factor": 0.2}])
def test_without_decay_the_rate_stays_at_its_peak_also_after_the_schedule(fields):
    assert factors(steps=8, warmup_steps=2, total_steps=4, **fields) == [0.5, *[1.0] * 7]


# ------------------------------------------------------------------------------------------------ a plugin's


@component("schedule", "odd", target="tests.optimizers.test_schedule:odd")
class Odd(ScheduleConfig):
    """What each test makes of it."""


def odd(config, *, steps):
    return MADE["schedule"](steps)


MADE = {}


def odd_schedule(monkeypatch, make, steps=10, total_steps=None):
    """A recipe's schedule, of a plugin; `make` returns it, of so many steps."""
    monkeypatch.setitem(MADE, "schedule", make)
    monkeypatch.setattr(schedule, "current", lambda: SimpleNamespace(full_name=lambda cls: "lab/odd"))
    length = total_steps or steps
    training = SimpleNamespace(steps=steps)
    return schedule_of(
        SimpleNamespace(lr_scheduler=Odd(total_steps=total_steps), training=training, schedule_steps=length)
    )


def test_a_plugins_schedule_is_given_its_length(monkeypatch):
    factor = odd_schedule(monkeypatch, lambda steps: lambda step: 1 / steps, total_steps=20)
    assert factor(0) == factor(9) == 1 / 20


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda step: None, "the schedule lab/odd gave None at step 0"),
        (lambda step: math.nan if step == 9 else 1.0, "gave nan at step 9"),
        (lambda step: 5 - step, "gave -1 at step 6"),
        (lambda step: math.inf, "gave inf at step 0"),
        (lambda step: True, "gave True at step 0"),
        (lambda step: 1 / (9 - step), "raised an error at step 9: ZeroDivisionError"),
        (None, "built a NoneType, which cannot be called"),
    ],
)
def test_what_gives_no_factor_is_refused_before_the_first_step(monkeypatch, made, message):
    with pytest.raises(PluginError) as caught:
        odd_schedule(monkeypatch, lambda steps: made)
    assert message in str(caught.value)


def test_a_builder_that_raises_is_refused_by_name(monkeypatch):
    with pytest.raises(PluginError, match="lab/odd cannot be built: KeyError"):
        odd_schedule(monkeypatch, lambda steps: {}["x"])


def test_a_step_between_those_that_were_tried_is_refused_when_it_is_used(monkeypatch):
    factor = odd_schedule(monkeypatch, lambda steps: lambda step: -1.0 if step == 1 else 1.0, steps=5000)
    assert factor(0) == 1.0
    with pytest.raises(PluginError, match="at step 1"):
        factor(1)


def test_a_schedule_without_a_length_of_its_own_is_as_long_as_the_run():
    @component("schedule", "bare", target="a:b")
    class Bare:
        """Without the base section."""

    recipe = load_recipe("titan:llama3_debug", ["training.steps=7"]).recipe
    assert dataclasses.replace(recipe, lr_scheduler=Bare()).schedule_steps == 7
