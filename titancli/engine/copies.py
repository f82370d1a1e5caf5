"""Copies of an engine: frozen snapshots of its weights, and exported folders."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titancli.checkpoint import save_checkpoint
from titancli.checkpoint.format.newfolder import refuse_used
from titancli.distributed import process_group
from titancli.distributed.together import Ranks
from titancli.engine import checkpoints, exchange
from titancli.engine.build import build_engine
from titancli.engine.core import EngineCore
from titancli.engine.first_weights import allocate
from titancli.engine.inputs import name_of
from titancli.engine.recipes import weights_alone
from titancli.engine.weights import Renewal
from titancli.errors import PluginError, TitanError
from titancli.models.blocks.state import named_state
from titancli.models.loss import module_of
from titancli.recipe import lock_text

E = TypeVar("E", bound=EngineCore)
Form = Literal["hf", "peft"]
DTYPES = ("float32", "bfloat16", "float16")

logger = logging.getLogger(__name__)


def snapshot(engine: E) -> E:
    """Return a frozen copy; see `Engine.snapshot`."""
    with engine._verb("snapshot") as call:
        with call.agreed():
            recipe = weights_alone(engine.recipe)
        with call.shared():
            fill = _allocated(engine)
            made = build_engine(type(engine), recipe, device=engine.device, frozen=True, fill=fill)
            process_group.enlist(made)
            made._ends.callback(process_group.leave, made)
            with torch.no_grad():
                for own, given in zip(_stored(made), _stored(engine), strict=True):
                    own.copy_(given)
            Renewal(made.parts, made.converters).weights_loaded()
        made.settings, made.recipe = engine.settings, engine.recipe
        made.step, made.version, made.tokens_seen = engine.step, engine.version, engine.tokens_seen
        made.base, made.kept, made.begins_as_base = engine.base, engine.kept, engine.begins_as_base
        return made


def _allocated(engine: EngineCore) -> Callable[[list[Any]], None]:
    """Allocate memory for meta parts; their values are copied later."""

    def fill(parts: list[Any]) -> None:
        for part, other in zip(parts, engine.parts, strict=True):
            home = part.parameter_device or engine.device
            allocate(part, home, engine.device)
            for own, given in zip(part.buffers(), other.buffers(), strict=True):
                own.copy_(given)

    return fill


def _stored(engine: EngineCore) -> list[torch.Tensor]:
    tensors = [tensor.detach() for part in engine.parts for _, tensor in named_state(part)]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def own_lock(engine: EngineCore) -> str:
    """Return the text of the recipe that an engine was built from; empty, with a warning, if no plugin
    provides its components."""
    try:
        return lock_text(engine.recipe)
    except PluginError as error:
        if dist.get_rank() == 0:
            logger.warning("the checkpoint has no recipe: %s", error.message)
        return ""


def export(engine: EngineCore, folder: Path, form: Form, dtype: str | None) -> None:
    """Export the weights; see `Engine.export`."""
    with engine._verb("export") as call:
        with call.agreed():
            call.given(f"to {folder.name} as {form}, {dtype}")
            if form not in ("hf", "peft"):
                raise TitanError(f"export: the form {form!r} is not known", hint='use "hf" or "peft"')
            if dtype not in (None, *DTYPES):
                raise TitanError(f"export: the dtype {dtype!r} is not known", hint=f"use {', '.join(DTYPES)}")
            if form == "peft" and engine.adapters is None:
                raise TitanError("export: this engine has no adapters", hint='use form="hf"')
            exchange.hf_form(engine)
            lock = lock_text(engine.recipe)
            if dist.get_rank() == 0:
                refuse_used(folder)
        with call.shared():
            _export(engine, folder.absolute(), lock, form, dtype)


def _export(engine: EngineCore, folder: Path, lock: str, form: Form, dtype: str | None) -> None:
    """Save the weights beside the folder, and convert them: memory grows with the largest tensor."""
    weights = folder.with_name(f".{folder.name}.weights")

    def convert() -> None:
        from titancli.checkpoint.hf import convert
        from titancli.checkpoint.hf.peft import to_peft

        if form == "peft":
            to_peft(weights, folder, dtype=convert.dtype_of(dtype), say=logger.debug)
        else:
            convert.to_hf(weights, folder, dtype=dtype, say=logger.debug)

    tensors, state = checkpoints.live_state(engine)
    kept = engine.recipe.loss.hf_form(exchange.hf_form(engine), {}).of_loss if form == "hf" else ()
    own = module_of(engine.loss) is not None and not kept
    if dist.get_rank() == 0 and own:
        logger.info("export: the parameters of the loss %s are left out", name_of(engine.loss))
    try:
        save_checkpoint(
            weights,
            {name: tensor for name, tensor in tensors.items() if name.startswith("model.")},
            {"engine": state},
            lock_text=lock,
            run_id="",
            mesh=asdict(engine.mesh.degrees),
            kept=engine.kept,
        )
        Ranks().broadcast_call(f"exporting {folder}", convert)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(weights, ignore_errors=True)
