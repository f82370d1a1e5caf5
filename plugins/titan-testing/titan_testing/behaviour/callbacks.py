"""Callbacks: steps with and without them, with equal weights as a result."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from titan_testing.behaviour.engines import batch_of, engine_of, step, weights
from titan_testing.behaviour.subject import Check, Subject, first_difference


def steps(subject: Subject) -> Iterator[str]:
    """Check that steps leave the same weights as on an engine without the callback, unless it vetoes."""
    plain, engine = engine_of(), engine_of()
    run: Any = SimpleNamespace(folder=subject.folder, export=lambda *given: None, end_early=lambda why: None)
    try:
        callback = subject.target(subject.config, engine=engine, run=run)
        engine.hooks.add(callback)
        for number in range(2):
            before = float(engine.guard.skipped) if engine.guard else 0.0
            step(engine, batch_of(seed=number))
            if engine.guard is not None and float(engine.guard.skipped) > before:
                return  # it vetoes
            step(plain, batch_of(seed=number))
        if found := first_difference(weights(plain), weights(engine), 0.0):
            yield f"steps with it differ from those without it: {found}"
        engine.save(subject.folder / "step-2")
        engine.load(subject.folder / "step-2")
        step(engine, batch_of(seed=2))
    finally:
        plain.close()
        engine.close()


CHECKS: dict[str, dict[str, Check]] = {"callback": {"steps": steps}}
