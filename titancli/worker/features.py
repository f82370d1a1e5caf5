"""Features that run beside the loop: each is a context manager around the loop, which adds its hooks to
`engine.hooks` and `run.hooks` if the recipe enables it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from titancli.observe.profiler import Profiler
from titancli.worker.digests import with_digests
from titancli.worker.saving import saved

if TYPE_CHECKING:
    from titancli.worker.opened import Opened


@contextmanager
def close_data(opened: Opened) -> Iterator[None]:
    """Close the data after the block."""
    if opened.data is None:
        yield
        return
    with closing(opened.data):
        yield


@contextmanager
def profiled(opened: Opened) -> Iterator[None]:
    """Record traces and memory snapshots inside the block, on a schedule or on request."""
    recipe = opened.recipe
    profiler = Profiler(
        recipe.profiling,
        opened.folder.path,
        rank=opened.place.rank,
        world=opened.place.world,
        device=opened.start.device,
        total_steps=recipe.training.steps,
    )
    opened.run.hooks.add(profiler)
    with profiler:
        yield


FEATURES: tuple[Callable[[Opened], AbstractContextManager[None]], ...] = (
    saved,
    close_data,
    profiled,
    with_digests,
)
"""All features, the outermost first."""


@contextmanager
def enter_features(opened: Opened) -> Iterator[None]:
    """Activate all features for the loop that is built and run inside the block."""
    with ExitStack() as stack:
        for feature in FEATURES:
            stack.enter_context(feature(opened))
        yield


@contextmanager
def garbage_between_steps() -> Iterator[None]:
    """Freeze existing objects, and disable automatic collection: `Run` collects garbage at the same steps on
    all ranks.

    If the caller has already frozen objects, they stay frozen, since the others cannot be unfrozen
    separately.
    """
    ours = gc.get_freeze_count() == 0
    gc.collect()
    if ours:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if ours:
            gc.unfreeze()
