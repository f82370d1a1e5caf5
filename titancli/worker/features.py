"""What takes part in a run beside its loop: each feature is a context manager around the loop, which adds its
hooks to `engine.hooks` and `run.hooks` where the recipe wants it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from titancli.observe.profiler import Profiler
from titancli.worker.digests import digested
from titancli.worker.saving import saved

if TYPE_CHECKING:
    from titancli.worker.opened import Opened


@contextmanager
def fed(opened: Opened) -> Iterator[None]:
    """Close the data after the block."""
    if opened.data is None:
        yield
        return
    with closing(opened.data):
        yield


@contextmanager
def profiled(opened: Opened) -> Iterator[None]:
    """Record traces and memory snapshots inside the block, on a schedule or when asked."""
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
    fed,
    profiled,
    digested,
)
"""The outermost first."""


@contextmanager
def taking_part(opened: Opened) -> Iterator[None]:
    """Have all features take part in the loop that is built and run inside the block."""
    with ExitStack() as stack:
        for feature in FEATURES:
            stack.enter_context(feature(opened))
        yield


@contextmanager
def garbage_between_steps() -> Iterator[None]:
    """Keep what stands now; garbage is collected by `Run` alone, at times that are the same on all ranks.

    What whoever called this has frozen stays frozen: there is no way to thaw the rest alone.
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
