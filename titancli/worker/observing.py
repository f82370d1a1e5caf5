"""Open the loggers of a run, and what passes its metrics to them."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from titancli.distributed.together import require_same
from titancli.observe.events import EventLog, EventLogger, Listener, logs_as_events
from titancli.observe.machine import machine
from titancli.observe.observers import Observers
from titancli.observe.peaks import device_name, device_peak
from titancli.process import Place
from titancli.registry.component import build
from titancli.runs import RunFolder
from titancli.worker.data import digest_of, epochs, identity_of

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.recipe.schema import Recipe
    from titancli.worker.run_context import RunContext

logger = logging.getLogger(__name__)


def open_loggers(
    recipe: Recipe,
    folder: RunFolder,
    place: Place,
    stack: ExitStack,
    *,
    restart: int,
    several_nodes: bool,
    listeners: Sequence[Listener],
) -> list[Any]:
    """Build the loggers of a rank. It happens before the engine, so that a missing package is reported at
    once.

    Args:
        restart: how often the ranks of the attempt have been restarted.
        listeners: receive rank 0's events.
    """
    own: list[Any] = []
    if place.rank == 0:
        events = EventLog(folder.events, tuple(listeners))
        stack.callback(events.close)
        stack.enter_context(logs_as_events(events))
        if restart:
            cause = "a node or a rank was lost" if several_nodes else "a rank failed"
            logger.warning("%s; all ranks were restarted (restart %d)", cause, restart)
        own = [EventLogger(events)]
    return own + [build(config, run_folder=folder.path, is_main=place.rank == 0) for config in recipe.loggers]


def observe(context: RunContext, engine: Engine, loggers: Sequence[Any], data: Any) -> Observers:
    """Make the observers that pass metrics to loggers, and record the layout of the run. Collective.

    Raises:
        TitanError: the ranks have different data.
    """
    recipe, place, device = context.recipe, context.place, context.device
    checkpoint = str(context.checkpoint) if context.checkpoint else None
    found = {
        "world": place.world,
        "mesh": asdict(engine.mesh.degrees),
        "device": device_name(device),
        "restarts": context.restart,
    }
    identity = None if data is None else identity_of(data.state)
    require_same("data", json.dumps(identity, sort_keys=True), socket.gethostname())
    if place.rank == 0:
        here = {"machine": machine(), "data": identity, "data_digest": digest_of(identity)}
        context.folder.update_attempt(**found, checkpoint=checkpoint, **here)
        found["epochs"] = epochs(recipe, data, engine)
    steps = recipe.training.steps
    known = {"attempt": len(context.record["attempts"]), "checkpoint": checkpoint, "steps": steps}
    # Peaks are those of bf16, so a run that computes in fp32 has no utilization.
    peak = device_peak(device) if recipe.training.mixed_precision_param == "bfloat16" else None
    return Observers(
        loggers,
        device=device,
        log_freq=recipe.metrics.log_freq,
        total_steps=steps,
        epochs=recipe.training.epochs,
        info={**context.record, "recipe": context.loaded.data, **known, **found},
        world=place.world,
        flops_per_token=engine.flops_per_token,
        peak_flops=peak,
    )
