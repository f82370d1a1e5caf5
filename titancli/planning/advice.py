"""Find the fastest change that makes a recipe fit: candidates are tried one at a time, then in
combination."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from titancli.errors import RecipeError, TitanError
from titancli.layout.degrees import Degrees
from titancli.planning.estimate import Estimate, estimate
from titancli.recipe.layout import check_layout, on
from titancli.recipe.schema import Recipe
from titancli.registry import current
from titancli.registry.fields import required_fields

MOST = 64
"""Maximum number of changes tried: the command should answer within three seconds."""
ROUGHLY = 1.1
"""Tolerance of scaled estimates: those within this factor of the limit are measured."""


@dataclass(frozen=True)
class Change:
    """Overrides that turn a recipe into another."""

    overrides: tuple[str, ...]
    apply: Callable[[Recipe], Recipe]
    group: str
    """At most one change of each group is made."""


@dataclass(frozen=True)
class Remedy:
    """Changes that make a recipe fit, with the peak memory and speed they lead to."""

    overrides: list[str]
    peak_bytes: int
    tokens_per_second: float | None
    slower: float | None
    """Speed lost relative to the unchanged recipe, if that fitted; 0.1 is 10 % slower."""


def remedy(recipe: Recipe, found: Estimate) -> Remedy | None:
    """Return the fastest of the changes that make the recipe fit; None if none of those tried does.

    Each candidate is first scaled from `found`, which never makes it look slower than it is. Then the most
    promising are measured, until no other can be faster than one that fits.
    """
    tried = 0
    changes = list(_changes(recipe, found))
    for together in (1, 2, 3):
        rough: list[tuple[float, tuple[Change, ...]]] = []
        for chosen in combinations(changes, together):
            if len({change.group for change in chosen}) < together:
                continue
            if tried == MOST:
                break
            tried += 1
            other = _with(recipe, found, chosen, measured=False)
            if other is not None and other.limit is not None and other.worst.total < ROUGHLY * other.limit:
                rough.append((_worth(other), chosen))
        best: tuple[float, Remedy] | None = None
        for worth, chosen in sorted(rough, key=lambda one: -one[0]):
            if best is not None and worth <= best[0]:
                break
            other = _with(recipe, found, chosen)
            if other is not None and other.fits and (best is None or _worth(other) > best[0]):
                best = (_worth(other), _remedy(found, other, chosen))
        if best is not None:
            return best[1]
    return None


def _worth(found: Estimate) -> float:
    """Return tokens per second, or minus the peak memory if the device's speed is unknown."""
    return -found.worst.total if found.speed is None else found.speed.tokens_per_second


def _remedy(found: Estimate, other: Estimate, chosen: tuple[Change, ...]) -> Remedy:
    overrides = list(dict.fromkeys(override for change in chosen for override in change.overrides))
    peak = round(other.worst.total)
    if found.speed is None or other.speed is None:
        return Remedy(overrides, peak, None, None)
    rate = other.speed.tokens_per_second
    return Remedy(overrides, peak, rate, 1 - rate / found.speed.tokens_per_second)


def _with(
    recipe: Recipe, found: Estimate, chosen: tuple[Change, ...], *, measured: bool = True
) -> Estimate | None:
    """Estimate the changed recipe; None if it is invalid."""
    degrees = found.work.degrees
    changed = on(recipe, degrees)
    for change in chosen:
        changed = change.apply(changed)
    if any(True for callback in changed.callbacks for _ in callback.check(changed)):
        return None
    try:
        return _estimated(changed, changed.degrees(degrees.world), found, measured)
    except RecipeError:
        return None


def _estimated(recipe: Recipe, degrees: Degrees, found: Estimate, measured: bool = True) -> Estimate | None:
    try:
        if next(check_layout(on(recipe, degrees)), None) is not None:
            return None
        return estimate(recipe, degrees, found.work.device, like=found.work, measured=measured)
    except TitanError:
        return None


def ranks_that_fit(recipe: Recipe, found: Estimate) -> int | None:
    """Return the smallest world size, among doublings of `dp_shard`, that the unchanged recipe fits on."""
    degrees = found.work.degrees
    for times in (2, 4, 8, 16, 32, 64):
        more = dataclasses.replace(degrees, dp_shard=degrees.dp_shard * times)
        other = _estimated(on(recipe, more), more, found)
        if other is not None and other.fits:
            return more.world
    return None


# ------------------------------------------------------------------------------------------ candidates


def _changes(recipe: Recipe, found: Estimate) -> Iterator[Change]:
    """Yield the candidates, cheapest first."""
    work, degrees = found.work, found.work.degrees
    # Only with stochastic rounding: rounded to nearest, a second moment does not decay.
    optimizer = recipe.optimizer
    if optimizer.rounds_stochastically and optimizer.state_dtype != "bfloat16":
        yield _field("optimizer", "state_dtype", "bfloat16")
    if recipe.activation_checkpoint.mode == "none":
        yield _section("activation_checkpoint", "recompute", mode="selective", selective_ac_option="op")
    if recipe.activation_checkpoint.mode != "full":
        yield _section("activation_checkpoint", "recompute", mode="full")
    if (
        "reshard_after_forward" in recipe.parallelize.__dataclass_fields__
        and work.reshard != "always"
        and degrees.pp == 1
    ):
        yield _field("parallelize", "reshard_after_forward", "always")
    if work.device.is_gpu and not recipe.callbacks:
        yield from _offloads()
    whole = recipe.training.local_batch_size * degrees.dp * recipe.accumulation(degrees)
    yield from _fewer_rows(recipe, degrees, whole)
    for change in _meshes(degrees):
        yield _keeping_the_batch(change, whole)


def _offloads() -> Iterator[Change]:
    """Yield the callbacks of installed plugins that move activations to the host."""
    for name, config in current().components("callback"):
        if config.offloads_activations and not required_fields(config):
            yield _callback(name, config())


def _callback(name: str, callback: Any) -> Change:
    """Return a change that adds a callback to a recipe without any."""
    text = f'callbacks=[{{type="{name}"}}]'
    return Change((text,), lambda recipe: dataclasses.replace(recipe, callbacks=[callback]), "callbacks")


def _keeping_the_batch(change: Change, whole: int) -> Change:
    """Keep the global batch size: with fewer data-parallel ranks, a step takes more passes."""
    rows = _section("training", "", global_batch_size=whole)
    return Change(
        (*change.overrides, *rows.overrides), lambda recipe: rows.apply(change.apply(recipe)), change.group
    )


def _fewer_rows(recipe: Recipe, degrees: Degrees, whole: int) -> Iterator[Change]:
    """Yield smaller local batch sizes; the global batch stays the same, so a step takes more passes."""
    rows = recipe.training.local_batch_size
    while rows % 2 == 0 and degrees.pp == 1:
        rows //= 2
        yield _section("training", "rows", local_batch_size=rows, global_batch_size=whole)


def _meshes(degrees: Degrees) -> Iterator[Change]:
    """Yield meshes that move ranks from data parallelism to dimensions that leave less on each rank."""
    for copies in range(degrees.dp_replicate - 1, 0, -1):
        if degrees.dp_replicate % copies == 0:
            shards = degrees.dp_shard * degrees.dp_replicate // copies
            yield _section("mesh", "mesh", dp_replicate=copies, dp_shard=shards)
    for name, most in (("tp", 8), ("cp", 8), ("pp", 16)):
        degree = getattr(degrees, name)
        while degree * 2 <= most:
            degree *= 2
            taken = degree // getattr(degrees, name)
            if degrees.dp_shard % taken:
                break
            yield _section("mesh", "mesh", **{name: degree, "dp_shard": degrees.dp_shard // taken})


def _section(name: str, group: str, **values: Any) -> Change:
    """Return a change of fields of a core section."""

    def apply(recipe: Recipe) -> Recipe:
        section = dataclasses.replace(getattr(recipe, name), **values)
        return dataclasses.replace(recipe, **{name: section})

    return Change(tuple(f"{name}.{key}={value}" for key, value in values.items()), apply, group)


def _field(slot: str, key: str, value: Any) -> Change:
    """Return a change of one field of a component."""

    def apply(recipe: Recipe) -> Recipe:
        config = dataclasses.replace(getattr(recipe, slot), **{key: value})
        return dataclasses.replace(recipe, **{slot: config})

    return Change((f"{slot}.{key}={value}",), apply, f"{slot}.{key}")


def as_data(recipe: Recipe, found: Estimate | None) -> dict[str, Any] | None:
    """Return the verdict as plain JSON; None if nothing was estimated."""
    if found is None:
        return None
    if found.fits is not False:
        return {"fits": found.fits, "change": None, "ranks": None}
    change = remedy(recipe, found)
    cheapest = None if change is None else dataclasses.asdict(change)
    return {"fits": False, "change": cheapest, "ranks": ranks_that_fit(recipe, found)}
