"""Optimizers: steps scaled by the learning rate, and state that is saved and restored by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from titan_testing.behaviour.engines import batch_of, engine_of, step, weights, whole
from titan_testing.behaviour.ranks import Job, later
from titan_testing.behaviour.subject import Check, Subject, first_difference
from titancli.engine import Engine, outside_of_state


def moves(subject: Subject) -> Iterator[str]:
    """Check that a step changes weights to finite values, and not at all with a learning rate of 0."""
    engine = engine_of(optimizer=subject.config)
    try:
        begin = weights(engine)
        step(engine, batch_of(), lr=0.0)
        if first_difference(begin, weights(engine), 0.0):
            yield "a step with a learning rate of 0 changes weights: it must use the `lr` of its param_groups"
        step(engine, batch_of(seed=1))
        after = weights(engine)
        if wrong := [name for name, value in after.items() if not value.isfinite().all()]:
            yield f"after a step, {', '.join(wrong)} is not finite"
        still = [name for name, value in after.items() if torch.equal(value, begin[name])]
        if still:
            yield (
                f"a step does not change {', '.join(still)}: every parameter passed to the optimizer "
                f"must be trained"
            )
    finally:
        engine.close()


def resume(subject: Subject) -> Iterator[str]:
    """Check that after restoring its state, a fresh optimizer's next step is bitwise the same."""
    engine, fresh = engine_of(optimizer=subject.config), None
    try:
        step(engine, batch_of())
        engine.save(subject.folder / "step-1")
        step(engine, batch_of(seed=1))
        fresh = engine_of(optimizer=subject.config)
        fresh.load(subject.folder / "step-1")
        step(fresh, batch_of(seed=1))
        if found := first_difference(weights(engine), weights(fresh), 0.0):
            yield (
                f"a step after a resume is different: {found}. The whole state must be tensors in "
                f"optimizer.state[parameter]"
            )
        trained, loaded = (_outside(one) for one in (engine, fresh))
        if lost := sorted(name for name in trained if repr(loaded.get(name)) != repr(trained[name])):
            yield (
                f"after a resume {', '.join(lost)} of the optimizer is not what it was: a checkpoint holds "
                f"tensors in optimizer.state[parameter] only"
            )
    finally:
        engine.close()
        if fresh is not None:
            fresh.close()


def _outside(engine: Engine) -> dict[str, Any]:
    optimizer = engine.optimizer
    return {} if optimizer is None else outside_of_state(optimizer, lambda tensor: whole(tensor).tolist())


def two_ranks(subject: Subject) -> Iterator[str]:
    """Check that two ranks with sharded parameters take the same steps as one, and resume."""
    engine = engine_of(optimizer=subject.config)
    try:
        for number in range(2):
            step(engine, batch_of(seed=number))
        reference = weights(engine)
    finally:
        engine.close()
    later(
        Job(
            subject.label,
            "ranks",
            {"optimizer": subject.config},
            {"dp_shard = 2": {"dp_shard": 2}},
            "weights",
            1e-2,
            [batch_of(seed=number) for number in range(2)],
            reference,
        )
    )
    return
    yield


CHECKS: dict[str, dict[str, Check]] = {"optimizer": {"moves": moves, "resume": resume, "ranks": two_ranks}}
