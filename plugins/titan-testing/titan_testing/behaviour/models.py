"""Models: initial values that depend on the seed, and equal results on every layout that a model supports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from titan_testing.behaviour.engines import LENGTH, ROWS, batch_of, engine_of, gradients, weights
from titan_testing.behaviour.ranks import Job, later
from titan_testing.behaviour.subject import Check, Example, Subject, first_difference
from titancli import Batch
from titancli.errors import TitanError

LARGEST = 20_000_000
"""Maximum number of parameters of a model tested here."""
LAYOUTS: dict[str, dict[str, int]] = {
    "dp_shard = 2": {"dp_shard": 2},
    "dp_replicate = 2": {"dp_replicate": 2},
    "tp = 2": {"tp": 2},
    "cp = 2": {"cp": 2},
    "pp = 2": {"pp": 2},
    "ep = 2": {"dp_shard": 2, "ep": 2},
}


def example(subject: Subject, seed: int = 0) -> Example:
    """Return the author's example, or random tokens of the model's vocabulary."""
    if subject.example is not None:
        return subject.example(ROWS)
    with torch.device("meta"):
        model = subject.build(seq_len=LENGTH)
    if "tokens" not in model.inputs:
        raise TitanError(
            f"it takes {', '.join(model.inputs)}, but the kit only knows tokens: pass "
            f'examples={{"{subject.label}": rows -> Example(batch, loss=...)}}'
        )
    vocabulary = subject.config.vocab_size or model.output.weight.shape[0]
    return Example(batch_of(vocabulary, seed))


def size(subject: Subject) -> Iterator[str]:
    """Check that the model is small enough."""
    if (count := _parameters(subject)) > LARGEST:
        yield (
            f"with these values it has {count:.1e} parameters, too many for a check on a CPU: pass small "
            f'sizes, configs={{"{subject.label}": {{...}}}}'
        )


def _parameters(subject: Subject) -> int:
    with torch.device("meta"):
        model = subject.build(seq_len=LENGTH)
    return sum(parameter.numel() for parameter in model.parameters())


def initial_values(subject: Subject) -> Iterator[str]:
    """Check that initialization is reproducible, finite and complete."""
    if _parameters(subject) > LARGEST:
        return
    given, found = example(subject), []
    for _ in range(2):
        engine = engine_of(subject.config, loss=given.loss)
        try:
            found.append(weights(engine))
        finally:
            engine.close()
    if difference := first_difference(found[0], found[1], 0.0):
        yield (
            f"a second initialization gives different values: {difference}. init_weights must fill "
            f"every parameter, each from generator_for(its name)"
        )
    if wrong := [name for name, value in found[0].items() if not value.isfinite().all()]:
        yield f"after init_weights, {', '.join(wrong)} is not finite or not filled"


def recomputation(subject: Subject) -> Iterator[str]:
    """Check that every parameter has a gradient, the same in micro-batches and with recomputation."""
    if _parameters(subject) > LARGEST:
        return
    given, found = example(subject), {}
    for mode in ("none", "full", "selective"):
        engine = engine_of(subject.config, loss=given.loss, recompute=mode)
        try:
            found[mode] = gradients(engine, given.batch)
            if mode == "none":
                halves = gradients(engine, *given.batch.split(ROWS // 2))
                trained = [name for name, _ in engine.trained_parameters()]
        finally:
            engine.close()
    if missing := [name for name in trained if name not in found["none"]]:
        yield f"{', '.join(missing)} has no gradient: forward does not use it"
    if difference := first_difference(found["none"], halves, 1e-4):
        yield f"two micro-batches do not give the gradients of one batch: {difference}"
    for mode in ("full", "selective"):
        if difference := first_difference(found["none"], found[mode], 1e-5):
            yield f"with activation_checkpoint.mode = {mode!r} the gradients are different: {difference}"


def documents(subject: Subject) -> Iterator[str]:
    """Check that two documents in a row do not see each other."""
    with torch.device("meta"):
        model = subject.build(seq_len=LENGTH)
    if subject.example is not None or "document_ids" not in model.inputs or _parameters(subject) > LARGEST:
        return
    half = LENGTH // 2
    tokens = example(subject).batch["tokens"]
    positions = torch.arange(half).repeat(ROWS, 2)
    ids = torch.arange(LENGTH).div(half, rounding_mode="floor").int().repeat(ROWS, 1)
    packed = {"tokens": tokens, "targets": tokens, "positions": positions, "document_ids": ids}
    engine = engine_of(subject.config)
    try:
        together = engine.forward(Batch(packed))
        apart = [
            engine.forward(
                Batch({"tokens": piece, "targets": piece, "positions": torch.arange(half).repeat(ROWS, 1)})
            )
            for piece in tokens.split(half, dim=1)
        ]
    finally:
        engine.close()
    if found := first_difference({"log p": torch.cat(apart, 1)}, {"log p": together}, 1e-4):
        yield f"documents of one row see each other, although document_ids are among its inputs: {found}"


def layouts(subject: Subject) -> Iterator[str]:
    """Check that every supported layout of two ranks gives the gradients of one, or is rejected by a
    TitanError."""
    if _parameters(subject) > LARGEST:
        return
    given = example(subject)
    engine = engine_of(subject.config, loss=given.loss)
    try:
        reference = gradients(engine, given.batch)
        experts = bool(engine.model.experts)
    finally:
        engine.close()
    degrees = subject.config.mesh_degrees
    chosen = {
        name: mesh
        for name, mesh in LAYOUTS.items()
        if (degrees is None or mesh.keys() <= set(degrees)) and (experts or "ep" not in mesh)
    }
    made: dict[str, Any] = {"model": subject.config, **({"loss": given.loss} if given.loss else {})}
    later(Job(subject.label, "layouts", made, chosen, "gradients", 1e-4, [given.batch], reference))
    return
    yield


CHECKS: dict[str, dict[str, Check]] = {
    "model": {
        "size": size,
        "initial values": initial_values,
        "recomputation": recomputation,
        "documents": documents,
        "layouts": layouts,
    }
}
