"""Callbacks: steps with and without them, with equal weights as a result."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from titan_testing.behaviour.engines import LENGTH, ROWS, batch_of, engine_of, step, weights
from titan_testing.behaviour.subject import Check, Subject, first_difference
from titancli import build, load_recipe
from titancli.data import ByteTokenizer
from titancli.loops.run import Run

SIZES = [f"training.seq_len={LENGTH}", f"training.local_batch_size={ROWS}", "training.steps=10"]


def steps(subject: Subject) -> Iterator[str]:
    """Check that steps leave the same weights as on an engine without the callback, unless it vetoes."""
    plain, engine = engine_of(), engine_of()
    run = Run(
        steps=10,
        stop=SimpleNamespace(requested=None),
        folder=subject.folder,
        recipe=load_recipe("llama3_debug", SIZES).recipe,
        tokenizer=build(ByteTokenizer()),
    )
    try:
        callback = subject.build(engine=engine, run=run)
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
