"""The learning-rate schedule: its corners, and its shapes."""

from __future__ import annotations

import math

import pytest

from titancli.optimizers.schedule import lr_factor
from titancli.recipe.schema import LRScheduler


def factors(steps=10, **fields):
    return [lr_factor(LRScheduler(**fields), step, steps) for step in range(steps)]


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
    assert lr_factor(LRScheduler(warmup_steps=0, min_lr_factor=0.2), 50, 10) == pytest.approx(0.2)


def test_total_steps_sets_the_length():
    assert lr_factor(LRScheduler(warmup_steps=0, total_steps=20), 10, 15) == pytest.approx(0.5)


def test_warm_up_longer_than_the_run_takes_all_of_it():
    assert factors(steps=4, warmup_steps=8) == [0.25, 0.5, 0.75, 1.0]
    assert factors(steps=4, warmup_steps=8, decay_ratio=0.5) == [0.25, 0.5, 0.75, 1.0]
    assert factors(steps=4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_decay_takes_what_warm_up_leaves():
    assert factors(steps=10, warmup_steps=6, decay_ratio=0.8)[5:] == pytest.approx([1, 1, 0.75, 0.5, 0.25])


def test_a_resume_with_more_steps_follows_the_longer_schedule():
    section = LRScheduler(warmup_steps=10)
    assert [lr_factor(section, step, 3) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])
    assert lr_factor(section, 3, 20) == pytest.approx(0.4)
    assert lr_factor(section, 9, 20) == lr_factor(section, 10, 20) == 1.0


@pytest.mark.parametrize("fields", [{"decay_ratio": 0.0}, {"decay_ratio": 0.0, "min_lr_factor": 0.2}])
def test_without_decay_the_rate_stays_at_its_peak_also_after_the_schedule(fields):
    assert factors(steps=8, warmup_steps=2, total_steps=4, **fields) == [0.5, *[1.0] * 7]
