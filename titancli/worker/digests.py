"""Write a run's digests, one for each step, into its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from titancli.engine.digest import Digests
from titancli.observe.digests import DigestWriter

if TYPE_CHECKING:
    from titancli.worker.opened import Opened


@contextmanager
def with_digests(opened: Opened) -> Iterator[None]:
    """Write the digest of each step inside the block, if the recipe enables it."""
    if not (opened.recipe.debug.digests and opened.start.trains):
        yield
        return
    engine = opened.engine
    named = engine.trained_parameters()
    header = {
        "attempt": len(opened.start.record["attempts"]),
        "restart": opened.restart,
        "rank": opened.place.rank,
        "world": opened.place.world,
        "dp_rank": engine.mesh.dp_rank,
        "mesh": asdict(engine.mesh.degrees),
        "names": [name for name, _ in named],
    }
    with closing(DigestWriter(opened.folder.path, header)) as writer:
        digests = Digests(writer, named, engine.converters)
        digests.begin(engine.step)
        engine.hooks.add(digests)
        yield
        digests.write(wait=True)
