"""The batch of a new recipe, so that it fits the GPUs that are there or named: by `titan plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from titancli.launchers.devices import visible_gpu_models
from titancli.observe.peaks import DEVICES, Device
from titancli.process import torch_without_gpus
from titancli.recipe.load import Loaded, load_recipe
from titancli.recipe.schema import Recipe
from titancli.run.fit import check_world

MOST_ROWS = 16
"""Rows on a GPU at once, tried first: more hardly makes a step faster."""


@dataclass(frozen=True)
class Size:
    """Overrides with which a recipe fits, and what there is to say of it."""

    overrides: list[str]
    said: str


def device_here() -> tuple[Device | None, int]:
    """Return the kind of the GPUs of this machine, None without GPUs or for an unknown kind, and their
    number."""
    names = visible_gpu_models()
    known = [device for device in DEVICES.values() if names and device.is_gpu and device.known_as(names[0])]
    return (known[0] if known else None), len(names)


def size(
    text: Callable[[list[str]], str],
    rows: int,
    rows_of_step: int | None,
    device: Device,
    world: int,
    *,
    adapters: bool,
) -> Size:
    """Return the largest batch with which a recipe fits, or the changes without which it does not.

    Args:
        text: returns the recipe with overrides.
        rows: the least number of rows on a GPU at once.
        rows_of_step: rows of a step over all ranks, if the recipe says.
        adapters: whether the weights are frozen, and may be stored in bfloat16.
    """
    torch_without_gpus()
    from titancli.planning.advice import remedy
    from titancli.planning.estimate import Estimate, estimate

    where = f"{world} × {device.name}"
    whole = rows_of_step or MOST_ROWS * world
    counts = [count for count in (16, 8, 4, 2, 1) if count >= rows and whole % (count * world) == 0]
    if not counts:
        batch = [f"training.local_batch_size={rows}", f"training.global_batch_size={rows * world}"]
        return Size(batch, f"{where}: a step has {rows * world} rows, {rows} on each; not planned")
    tried: list[tuple[list[str], Recipe, Estimate]] = []
    for more in ([], ["training.dtype=bfloat16"]) if adapters else ([],):
        like = None  # another dtype is another model to measure
        for count in counts:
            batch = [*more, f"training.local_batch_size={count}"]
            loaded = _loaded(text(batch))
            degrees, _ = check_world(loaded, world)
            found = estimate(loaded.recipe, degrees, device, like=like)
            if found is None:
                return Size([], f"{where}: no estimate for this model; it has the smallest batch")
            if found.fits:
                return Size(batch, f"{where}: fits with {' '.join(batch)}: {_gib(found.worst.total)}")
            tried.append((batch, loaded.recipe, found))
            like = found.work
    batch, recipe, found = tried[-1]
    change = remedy(recipe, found)
    if change is None:
        needs = f"{where}: it does not fit, on each GPU it needs {_gib(found.worst.total)}"
        return Size(batch, needs if adapters else f"{needs}; adapters need less: --lora")
    batch = [*batch, *change.overrides]
    return Size(batch, f"{where}: fits with {' '.join(batch)}: {_gib(change.peak_bytes)}")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB (estimate)"


def _loaded(text: str) -> Loaded:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(text, encoding="utf-8")
        return load_recipe(str(file))
