"""The state of an engine, and loading it from checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from titancli.checkpoint import load_checkpoint
from titancli.checkpoint.exclude import NOTHING, Exclusion
from titancli.checkpoint.format.manifest import DamagedCheckpoint, names_and_sizes, read_manifest
from titancli.checkpoint.hf.sidecar_files import kept_of
from titancli.distributed.process_group import patient_group
from titancli.distributed.together import Ranks
from titancli.engine import recipes
from titancli.engine.optimizer_state import counters_of, optimizer_tensors
from titancli.engine.step import PART
from titancli.engine.turn_ends import keep_ends
from titancli.engine.weights import adapter_facts, saved_parameters
from titancli.models.loss import OPTIONAL

if TYPE_CHECKING:
    from titancli.checkpoint.format.manifest import Verify
    from titancli.engine.core import EngineCore
    from titancli.engine.status import RecoverableBy

logger = logging.getLogger(__name__)


def live_state(engine: EngineCore) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of an engine, even an unusable one, to load into it."""
    tensors = _live_tensors(engine, optimizer=True)
    counters: dict[str, Any] = {name: getattr(engine, name) for name in ("step", "version", "tokens_seen")}
    if engine.guard is not None:
        counters["guard"] = engine.guard.state()
    if kept := engine.hooks.state():
        counters[PART] = kept
    if engine.adapters is not None:
        counters["adapters"] = {**engine.adapters.facts, "base": engine.base}
    return tensors, counters


def _live_tensors(engine: EngineCore, *, optimizer: bool) -> dict[str, Tensor]:
    saved = saved_parameters(engine.parts, engine.converters)
    tensors = {f"model.{name}": tensor for name, tensor in saved}
    if optimizer and engine.optimizer is not None:
        tensors |= optimizer_tensors(engine.optimizer, engine.named_parameters())
        tensors |= engine.hooks.tensors()
    return tensors


def load(
    engine: EngineCore,
    folder: Path,
    *,
    optimizer: bool | None = None,
    verify: Verify = "full",
    exclude: Exclusion = NOTHING,
) -> dict[str, Any]:
    """Load a checkpoint; see `titancli.Engine.load`."""
    wanted = engine.optimizer is not None if optimizer is None else optimizer
    everything = wanted or engine.optimizer is None
    mends: RecoverableBy | None = "load" if everything else "weights"
    if exclude.patterns:
        mends = None if exclude.may_have_weights else "weights"
    with engine.call_lock.of("load"):
        engine.ready("load" if everything else "load(optimizer=False)", mends)
        if wanted:
            engine._trained("load(optimizer=True)")
        before, call = engine.version, engine.call("load")
        with call.agreed():
            call.given(f"of {folder.name}, {'the whole state' if wanted else 'only its weights'}")
        with call.shared():
            state = _load_newest(engine, folder, optimizer=wanted, verify=verify, exclude=exclude)
        engine._has_new_weights(max(engine.version, before + 1))
        engine.unusable = None
        return state


def _load_newest(engine: EngineCore, folder: Path, *, verify: Verify, **how: Any) -> dict[str, Any]:
    """Load a checkpoint, or the newest good one of a run: ranks hash the bytes as they read."""
    damaged: dict[Path, str] = {}
    while True:
        found = recipes.checkpoint_of(folder, verify=names_and_sizes(verify), damaged=damaged)
        try:
            return _load_state(engine, found, verify=verify, **how)
        except DamagedCheckpoint as error:
            if error.folder != found or found == folder.absolute():
                raise
            damaged[found] = error.why


def _load_state(
    engine: EngineCore, folder: Path, *, optimizer: bool, verify: Verify, exclude: Exclusion
) -> dict[str, Any]:
    """Fill the engine's tensors from a checkpoint and set its counters."""

    def look() -> tuple[dict[str, bytes], dict[str, Any]]:
        adapter_facts(engine.adapters, folder, base=engine.base)
        return kept_of(folder), _states_of(engine, folder, exclude) if optimizer else {}

    kept, states = Ranks(patient_group()).call(f"reading {folder}", look)
    anew = engine.hooks.lacking(states)
    if optimizer and anew and dist.get_rank() == 0:
        logger.warning("callbacks begin anew, since %s has no state of them: %s", folder, ", ".join(anew))
    tensors = {
        name: tensor
        for name, tensor in _live_tensors(engine, optimizer=optimizer).items()
        if not any(name.startswith(f"{PART}.{callback}.") for callback in anew)
    }

    def begin() -> None:
        engine.mark_unusable(
            f"loading {folder} failed after it had started", "load" if optimizer else "weights"
        )

    optional = None if optimizer else OPTIONAL
    state = load_checkpoint(
        folder,
        tensors,
        verify=verify,
        exclude=exclude,
        optional=optional,
        begin=begin,
        widens=engine.adapters is not None,  # those of older runs may be in bfloat16
    )
    if optimizer:
        counters = counters_of(state, folder, engine.guard, exclude)
        if counters is not None:
            engine.step, engine.tokens_seen = counters.step, counters.tokens_seen
            engine.version = max(engine.version, counters.version)
    engine.hooks.weights_loaded(states)
    engine.kept = kept or engine.kept
    keep_ends(engine)
    return state


def _states_of(engine: EngineCore, folder: Path, exclude: Exclusion) -> dict[str, Any]:
    """Return the state of callbacks in a checkpoint, except those excluded."""
    if not engine.hooks.callbacks:
        return {}
    record = read_manifest(folder).state.get("engine")
    states = record.get(PART) if isinstance(record, dict) else None
    if not isinstance(states, dict):
        return {}
    names = list(engine.hooks.tensors())

    def excluded(callback: str) -> bool:
        own = [name for name in names if name.startswith(f"{PART}.{callback}.")]
        return any(exclude.has(name) for name in (f"{PART}.{callback}", *own))

    return {callback: state for callback, state in states.items() if not excluded(callback)}
