"""Explain an out-of-memory error of a run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from titancli.errors import TitanError
from titancli.observe.memory import live_bytes
from titancli.observe.peaks import device_name
from titancli.observe.phases import RAISED_IN
from titancli.observe.profiler import is_out_of_memory
from titancli.planning import out_of_memory

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.worker.run_context import RunContext

logger = logging.getLogger(__name__)


def advised(
    error: Exception, context: RunContext, engine: Engine | None, step: int | None
) -> TitanError | None:
    """Return an error that says what was in memory and what would make it fit; None if memory has not run
    out, or nothing is known.

    Args:
        step: the current step; None before the first.
    """
    if not is_out_of_memory(error):
        return None
    try:
        return _advise(error, context, engine, step)
    except Exception:  # advice must not hide the error itself
        logger.debug("no advice on memory", exc_info=True)
        return None


def _advise(error: Exception, context: RunContext, engine: Engine | None, step: int | None) -> TitanError:
    phase = getattr(error, RAISED_IN, None)
    where = f"in step {step}" if step else "before the first step"
    cause = str(error).partition(" GPU ")[0].partition("\n")[0]
    message = f"out of memory {where}{f' ({phase})' if phase else ''}: {cause}"
    recipe, degrees = context.recipe, context.recipe.degrees(context.place.world)
    parameters = [] if engine is None else [tensor for _, tensor in engine.named_parameters()]
    live = live_bytes(parameters, None if engine is None else engine.optimizer, context.device)
    device = device_name(context.device)
    more = out_of_memory.memory_report(recipe, degrees, device, live)
    change = out_of_memory.advice(recipe, degrees, device)
    hint = "make training.local_batch_size or seq_len smaller" if change is None else f"add {change}"
    return TitanError(f"{message}\n{more}" if more else message, hint=hint)
