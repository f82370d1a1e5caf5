"""Exchange of whole weights under Hugging Face names, out of an engine and into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from titancli.engine.core import EngineCore
from titancli.engine.weights import (
    NamedTensor,
    WeightLoader,
    base_parameters,
    take_weights,
    tensor_infos,
    whole_tensors,
)
from titancli.errors import TitanError
from titancli.models.loss import of_loss

if TYPE_CHECKING:
    from titancli.protocols import HFForm


def hf_form(engine: EngineCore) -> HFForm:
    """Return the Hugging Face form of an engine's model.

    Raises:
        TitanError: the model has no such form.
    """
    if engine.hf_form is None:
        raise TitanError("this model has no Hugging Face form, so its weights have no Hugging Face names")
    return engine.hf_form


def weights(engine: EngineCore) -> Iterator[NamedTensor]:
    """Yield all weights; see `titancli.Engine.weights`."""
    engine.ready("weights")
    call, version = engine.call("weights"), engine.version
    with call.agreed():
        form = hf_form(engine)
    with call.shared():
        mine = {name: tensor for name, tensor in engine.plain_parameters() if not of_loss(name)}
        home = engine.parts[0].parameter_device or engine.device
        known = tensor_infos(mine.items(), engine.parts, engine.mesh, engine.placement)
        wholes = whole_tensors(mine, known, engine.mesh, home)
    parameters = iter(wholes if engine.adapters is None else engine.adapters.merged(wholes))
    while True:
        if engine.busy is not None:
            raise TitanError(f"weights: the engine {engine.busy}")
        if engine.version != version and engine.call_lock.verb != "load_weights":  # it may read from here
            raise TitanError(
                f"weights: the weights have changed since the first was sent (version {version}, now "
                f"{engine.version})",
                hint="call weights() again, and send all of them before the next step",
            )
        with call.shared():
            parameter = next(parameters, None)
        if parameter is None:
            return
        for hf_name, value in form.to_hf(*parameter):
            yield hf_name, value if dist.get_rank() == 0 else None


def load_weights(engine: EngineCore, given: Iterable[NamedTensor] | None) -> None:
    """Load whole weights; see `titancli.Engine.load_weights`."""
    with engine._verb("load_weights", mends="weights") as call:
        if engine.adapters is not None:
            raise TitanError(
                "load_weights: this engine has adapters in addition to its base and cannot load whole "
                "weights",
                hint="build an engine without adapters, or load a checkpoint of adapters",
            )
        before = engine.version
        with call.agreed():
            form = hf_form(engine)
        with call.shared():
            own = base_parameters(engine.parts, engine.converters)
            known = tensor_infos(own.items(), engine.parts, engine.mesh, engine.placement)
            shapes = {one.name: one.shape for one in known}

            def begin() -> None:
                engine.mark_unusable("load_weights failed after it had started", "weights")

            loader = WeightLoader(dict(engine.plain_parameters()), shapes, form, begin)
            take_weights(loader, given, engine.device)
        engine._has_new_weights(before + 1)
        engine.hooks.weights_loaded()
        engine.unusable = None
