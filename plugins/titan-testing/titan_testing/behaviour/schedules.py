"""Learning rate schedules: a reproducible factor at every step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from titan_testing.behaviour.subject import Check, Subject

LENGTHS = (1, 7, 1000)


def factors(subject: Subject) -> Iterator[str]:
    """Check that factors are finite numbers of at least 0 over runs of several lengths, and after the end."""
    for steps in LENGTHS:
        schedule = subject.build(steps=steps)
        for step in (*range(steps), 2 * steps):
            value = schedule(step)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf:
                yield f"with {steps} steps, it returns {value!r} at step {step}: not a finite number >= 0"
                break


def again(subject: Subject) -> Iterator[str]:
    """Check that a step always has the same factor: on a second call, in another order, in another
    instance."""
    one, other = (subject.build(steps=LENGTHS[-1]) for _ in range(2))
    first = [one(step) for step in range(LENGTHS[-1])]
    for step in reversed(range(LENGTHS[-1])):
        if one(step) != first[step] or other(step) != first[step]:
            yield f"step {step} has another factor on a second call: it must depend only on the step"
            return


CHECKS: dict[str, dict[str, Check]] = {"schedule": {"factors": factors, "again": again}}
