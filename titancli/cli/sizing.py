"""The batch of a new recipe, so that it fits the GPUs that are there or named: by `titan plan`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from titancli.launchers.devices import visible_gpu_models
from titancli.observe.peaks import DEVICES, Device
from titancli.process import quiet
from titancli.recipe.load import Loaded, load_recipe
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
    quiet()
    if "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a plan needs no GPU, and takes no memory of one
    from titancli.planning.advice import remedy
    from titancli.planning.estimate import Estimate, estimate

    def planned(overrides: list[str], like: Estimate | None) -> tuple[Loaded, Estimate | None]:
        loaded = _loaded(text(overrides))
        degrees, _ = check_world(loaded, world)
        return loaded, estimate(loaded.recipe, degrees, device, like=None if like is None else like.work)

    where = f"{world} × {device.name}"
    whole = rows_of_step or MOST_ROWS * world
    counts = [count for count in (16, 8, 4, 2, 1) if count >= rows and whole % (count * world) == 0]
    if not counts:
        batch = [f"training.local_batch_size={rows}", f"training.global_batch_size={rows * world}"]
        return Size(batch, f"{where}: a step has {rows * world} rows, {rows} on each; not planned")
    last: Estimate | None = None
    for more in ([], ["training.dtype=bfloat16"]) if adapters else ([],):
        last = None  # another dtype is another model to measure
        for count in counts:
            batch = [*more, f"training.local_batch_size={count}"]
            loaded, found = planned(batch, last)
            if found is None:
                return Size([], f"{where}: no estimate for this model; it has the smallest batch")
            if found.fits:
                return Size(batch, f"{where}: fits with {' '.join(batch)}: {_gib(found.worst.total)}")
            last = found
    assert last is not None
    change = remedy(loaded.recipe, last)
    if change is None:
        needs = f"{where}: it does not fit, on each GPU it needs {_gib(last.worst.total)}"
        return Size(batch, needs if adapters else f"{needs}; adapters need less: --lora")
    batch = [*batch, *change.overrides]
    return Size(batch, f"{where}: fits with {' '.join(batch)}: {_gib(change.peak)}")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB (estimate)"


def _loaded(text: str) -> Loaded:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(text, encoding="utf-8")
        return load_recipe(str(file))
