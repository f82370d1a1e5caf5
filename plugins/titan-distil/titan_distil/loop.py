"""Distillation: the loop of pretraining, on batches that have what the teacher says of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from titan_distil.store import Stored
from titan_distil.teacher import Teacher
from titancli import TitanError
from titancli.loops.pretrain import pretrain

if TYPE_CHECKING:
    from typing import Any

    from titan_distil import Distil
    from titancli import Engine
    from titancli.data.loader import Loader
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers


def build(
    config: Distil, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    if run.recipe is None:
        raise TitanError("the loop distil needs the recipe of its run")
    teacher: Teacher | Stored
    if config.teacher.topk is not None:
        teacher = Stored(engine, config.teacher, tokenizer, run, data)
    else:
        teacher = Teacher(engine, run.recipe, config.teacher)
    if run.validation is not None:
        run.validation.prepare = teacher
    return partial(distil, engine, data, observers, run, teacher)


def distil(engine: Engine, data: Loader, observers: Observers, run: Run, teacher: Teacher | Stored) -> None:
    """Train as `pretrain` does, and close the teacher."""
    pretrain(engine, data, observers, run, lambda batches: [*map(teacher, batches)])
    teacher.close()
