"""The values of transformers' buffers and its initialization of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titan_transformers.theirs import refused
from titancli.errors import RecipeError


def buffer_values(values: Mapping[str, Any], base: Any) -> dict[str, Tensor]:
    """Return the values that transformers' own initialization puts into each buffer, as it does for models
    that it loads.

    Tested with zeros and with ones: a buffer that stays unchanged is an error.
    """
    found: list[dict[str, Tensor]] = []
    for number in (0, 1):
        with torch.device("cpu"), torch.no_grad():
            for module in base.modules():
                own = dict(module.named_buffers(recurse=False))
                for name, buffer in own.items():
                    module._buffers[name] = torch.full(buffer.shape, number, dtype=buffer.dtype)
                if own:
                    base._init_weights(module)  # parameters are on meta, where nothing is drawn
            found.append({name: buffer.clone() for name, buffer in base.named_buffers()})
    left = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
    if left:
        raise refused(values, f"transformers does not define the contents of the buffers {', '.join(left)}")
    base.to("meta")
    return found[0]


@contextmanager
def seeded(generator: torch.Generator) -> Iterator[None]:
    """Draw from torch's default generators as from a fresh generator with this one's seed."""
    devices = [generator.device] if generator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(generator.initial_seed())
        yield


def initial_values(
    base: Any, unit: nn.Module, path: str, generator: torch.Generator, *, whole: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole fp32 values of a unit's parameters, by name, as transformers would draw them.

    Args:
        base: model whose `_init_weights` is used.
        unit: module on meta, not needed afterwards.
        whole: include the parameters of its submodules.

    Raises:
        RecipeError: transformers does not initialize a parameter.
    """
    unit.to_empty(device=generator.device, recurse=whole)
    with torch.no_grad(), torch.device(generator.device), seeded(generator):
        for parameter in unit.parameters(whole):
            parameter.fill_(float("nan"))
        if whole:
            unit.apply(base._init_weights)
        else:
            base._init_weights(unit)
    for name, parameter in unit.named_parameters(path, whole):
        if bool(parameter.isnan().any()):
            raise RecipeError(
                f"model.config: transformers does not define the initial value of {name}", hint="give weights"
            )
        yield name, parameter.detach()
    unit.to("meta")
