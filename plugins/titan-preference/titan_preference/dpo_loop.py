"""Direct preference optimisation: the loop of pretraining, on batches that have the reference's
log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from titancli.loops.pretrain import pretrain
from titancli.loops.reference import Referenced

if TYPE_CHECKING:
    from titan_preference import DpoLoop
    from titancli import Engine
    from titancli.data.loader import Loader
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers


def build(
    config: DpoLoop, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    reference = Referenced(engine, run)
    if run.validation is not None:
        run.validation.prepare = reference
    return partial(pretrain, engine, data, observers, run, lambda batches: [*map(reference, batches)])
