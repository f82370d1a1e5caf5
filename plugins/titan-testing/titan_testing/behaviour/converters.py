"""Converters and plans: stable names, gradients that recomputation does not change, and weights that load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from titan_testing.behaviour.engines import (
    LENGTH,
    batch_of,
    engine_of,
    gradients,
    small_experts,
    small_model,
    step,
    weights,
    whole,
)
from titan_testing.behaviour.ranks import Job, later
from titan_testing.behaviour.subject import Check, Subject, first_difference
from titancli.errors import RecipeError
from titancli.layout.degrees import Degrees
from titancli.registry.component import build

RECOMPUTED = ("full", "selective")
RANKS = 0.25
"""Tolerance of gradients on two ranks: rounding by a scale of the rank's rows (float8) differs with the
number of ranks, while a sum that is taken twice, or not at all, is off by half its size or more."""


def parts(subject: Subject) -> dict[str, Any]:
    """Return the parts of an engine that it replaces; a converter also gets weights, which adapters need."""
    if subject.kind == "parallelize":
        return {"parallelize": subject.config}
    base = subject.folder / "base" / "step-1"
    model = model_of(subject)
    if not base.is_dir():
        with engine_of(model) as engine:
            engine.save(base)
    return {"model": model, "converters": [subject.config], "weights": str(base)}


def model_of(subject: Subject) -> Any:
    """Return a small model for it: of experts, where a converter finds nothing to change in a dense one."""
    try:
        if subject.kind == "converter":
            with torch.device("meta"):
                model = build(small_model(), seq_len=LENGTH)
            subject.build(mesh=Degrees(), compile=False).convert(model)
    except RecipeError:
        return small_experts()
    return small_model()


def names(subject: Subject) -> Iterator[str]:
    """Check that parameters keep their names and shapes; added ones must be the converter's own."""
    with torch.device("meta"):
        model = build(model_of(subject), seq_len=LENGTH)
    before = {name: tuple(p.shape) for name, p in model.named_parameters()}
    owns = lambda name: False  # noqa: E731
    if subject.kind == "converter":
        converter = subject.build(mesh=Degrees(), compile=False)
        converter.convert(model)
        owns = converter.owns or owns
        after = {name: tuple(p.shape) for name, p in model.named_parameters()}
    else:
        with engine_of(**parts(subject)) as engine:
            after = {name: tuple(p.shape) for name, p in engine.named_parameters()}
    if gone := before.keys() - after.keys():
        yield f"parameters lost their names: {', '.join(sorted(gone))}; change layers in place"
    if other := [name for name in before.keys() & after.keys() if before[name] != after[name]]:
        yield f"parameters changed their shapes: {', '.join(sorted(other))}"
    if new := sorted(name for name in after.keys() - before.keys() if not owns(name)):
        yield f"it adds {', '.join(new)}, but owns(name) does not claim them"


def recomputation(subject: Subject) -> Iterator[str]:
    """Check that gradients are the same whether blocks keep activations or recompute them."""
    found = {}
    for mode in ("none", *RECOMPUTED):
        engine = engine_of(**parts(subject), recompute=mode)
        try:
            found[mode] = gradients(engine, batch_of(), batch_of(seed=1))
        finally:
            engine.close()
    for mode in RECOMPUTED:
        if difference := first_difference(found["none"], found[mode], 1e-5):
            yield (
                f"with activation_checkpoint.mode = {mode!r} the gradients differ from those without: "
                f"{difference}. Recomputation must give the same result: use torch's generators for "
                f"random numbers, and do not change state in forward"
            )


def again(subject: Subject) -> Iterator[str]:
    """Check that a repeated step is the same: random draws must depend only on the seed and the step."""
    found = []
    for _ in range(2):
        with engine_of(**parts(subject)) as engine:
            found.append(gradients(engine, batch_of()))
    if difference := first_difference(found[0], found[1], 0.0):
        yield f"repeating the same step gives different gradients: {difference}"


def plain(subject: Subject) -> Iterator[str]:
    """Check that `plain` returns each parameter without the converter's own class, in the same memory."""
    from torch.distributed.tensor import DTensor

    engine = engine_of(**parts(subject))
    try:
        for name, parameter in engine.named_parameters():
            for converter in engine.converters:
                found = converter.plain(name, parameter.detach())
                inner = found.to_local() if isinstance(found, DTensor) else found
                if type(inner) not in (torch.Tensor, torch.nn.Parameter):
                    yield f"plain({name!r}) is a {type(inner).__name__}, not a plain tensor"
                elif tuple(found.shape) != tuple(parameter.shape):
                    yield (
                        f"plain({name!r}) is {list(found.shape)}, but the parameter is "
                        f"{list(parameter.shape)}"
                    )
                else:
                    yield from _same_memory(converter, name, parameter, inner)
    finally:
        engine.close()


def _same_memory(converter: Any, name: str, parameter: Any, inner: torch.Tensor) -> Iterator[str]:
    inner.fill_(3.0)
    if not (whole(converter.plain(name, parameter.detach())) == 3.0).all():
        yield f"a change of plain({name!r}) does not change the parameter, so a load would have no effect"


def saved(subject: Subject) -> Iterator[str]:
    """Check that after a save and a load into a fresh model, the next step is bitwise the same."""
    engine, fresh = engine_of(**parts(subject)), None
    try:
        step(engine, batch_of())
        engine.save(subject.folder / "step-1")
        fresh = engine_of(**parts(subject))
        fresh.load(subject.folder / "step-1")
        if found := first_difference(weights(engine), weights(fresh), 0.0):
            yield f"weights are different after loading a checkpoint: {found}"
        one, other = gradients(engine, batch_of(seed=1)), gradients(fresh, batch_of(seed=1))
        if found := first_difference(one, other, 0.0):
            yield (
                f"after a resume the gradients are different: {found}. Recompute everything that "
                f"depends on the weights in after_step"
            )
    finally:
        engine.close()
        if fresh is not None:
            fresh.close()


def two_ranks(subject: Subject) -> Iterator[str]:
    """Check that gradients on two ranks are those of one, or that a TitanError rejects the layout."""
    engine = engine_of(**parts(subject))
    try:
        deterministic = not first_difference(
            gradients(engine, batch_of()), _at_another_step(engine), tolerance=1e-6
        )
        reference = gradients(engine, batch_of())
    finally:
        engine.close()
    if not deterministic:  # random draws differ between data-parallel ranks
        return
    layouts = {"dp_shard = 2": {"dp_shard": 2}, "tp = 2": {"tp": 2}}
    later(Job(subject.label, "ranks", parts(subject), layouts, "gradients", RANKS, [batch_of()], reference))
    return
    yield


def _at_another_step(engine: Any) -> dict[str, torch.Tensor]:
    """Return the gradients with another step's random draws."""
    engine.step += 1
    try:
        return gradients(engine, batch_of())
    finally:
        engine.step -= 1


def same_answer(subject: Subject) -> Iterator[str]:
    """Check that on one rank a plan changes no gradient."""
    one, other = engine_of(), engine_of(**parts(subject))
    try:
        if found := first_difference(gradients(one, batch_of()), gradients(other, batch_of()), 1e-5):
            yield f"the gradients differ from those of the model itself: {found}"
    finally:
        one.close()
        other.close()


COMMON: dict[str, Check] = {
    "names": names,
    "again": again,
    "recomputation": recomputation,
    "resume": saved,
    "ranks": two_ranks,
}
CHECKS: dict[str, dict[str, Check]] = {
    "converter": {**COMMON, "plain": plain},
    "parallelize": {"same answer": same_answer, **COMMON},
}
