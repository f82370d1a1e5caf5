"""Collect statistics of the outputs of a model's modules, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titancli.distributed.together import Ranks
from titancli.errors import UsageError

if TYPE_CHECKING:
    from titancli import Engine


def modules_of(engine: Engine, patterns: Sequence[str]) -> list[str]:
    """Return the modules whose output is observed: layers, the modules beside them, and those that match the
    patterns. Collective.

    Raises:
        UsageError: a pattern matches nothing.
    """
    names = {name for part in engine.parts for name, _ in part.named_modules() if name}
    plain = {name for name in names if "." not in name and name != "layers"}
    plain |= {name for name in names if name.count(".") == 1 and name.startswith("layers.")}
    known = Ranks().gather(names | {name for name, _ in engine.named_parameters()})
    for pattern in patterns:
        if not any(matches(name, [pattern]) for own in known for name in own):
            raise UsageError(
                f"--layer {pattern}: the model has no such module or parameter",
                hint=f"its modules are {', '.join(sorted(plain)[:6])}, … and those inside them",
            )
    return sorted(plain | {name for name in names if matches(name, patterns)})


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name, or a module that contains it, matches one of the patterns; a number is that
    of a layer."""
    wholes = [f"layers.{pattern}" if pattern.isdecimal() else pattern for pattern in patterns]
    return any(fnmatchcase(name, whole) or fnmatchcase(name, f"{whole}.*") for whole in wholes)


@contextmanager
def watched(engine: Engine, names: Sequence[str], *, plainly: bool) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the sum of squares, the number, and the largest magnitude of each module's outputs.

    Args:
        plainly: whether blocks run uncompiled: hooks do not run inside compiled ones.
    """
    found: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(first, Tensor) or not first.is_floating_point():
                return
            values = (first.to_local() if isinstance(first, DTensor) else first).detach().float()
            if not values.numel():
                return  # experts without a token
            numbers = [
                values.square().sum(dtype=torch.float64),
                torch.tensor(values.numel()),
                values.abs().max(),
            ]
            before = found.get(name)
            if before is not None:
                numbers = [
                    before[0] + numbers[0],
                    before[1] + numbers[1],
                    torch.maximum(before[2], numbers[2]),
                ]
            found[name] = numbers

        return hook

    with ExitStack() as stack:
        if plainly:
            stack.enter_context(engine.as_written())
        for part in engine.parts:
            for name, module in part.named_modules():
                if name in names:
                    stack.callback(module.register_forward_hook(watch(name)).remove)
        yield found


def numbers_of(activations: dict[str, list[Tensor]]) -> dict[str, list[float]]:
    """Return the results of `watched`, read to the host."""
    return {name: [float(number) for number in numbers] for name, numbers in activations.items()}


def added(ranks: Sequence[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return `rms` and `max` of activations over all ranks; copies of a module on several ranks do not
    change a mean."""
    merged: dict[str, list[float]] = {}
    for own in ranks:
        for name, (squares, count, most) in own.items():
            before = merged.get(name, [0.0, 0.0, 0.0])
            largest = max(before[2], most, key=lambda number: (math.isnan(number), number))
            merged[name] = [before[0] + squares, before[1] + count, largest]
    return {name: {"rms": (s / n) ** 0.5 if n else 0.0, "max": most} for name, (s, n, most) in merged.items()}
