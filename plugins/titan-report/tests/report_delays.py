"""A plugin for tests: components that sleep at one place each, in the first attempt of a run, and kill it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from titancli import component, hookimpl

SECONDS = 0.5
"""Of each delay."""
STALL = 4.0
"""Of the one between two steps, which must be ten times as long as what passes there as a rule."""
KILLED = Path("killed")
"""Is there once the first attempt has been killed."""


@component("loss", "delays", target="delays:loss")
class Loss:
    """Sleeps in an evaluation, a forward, a backward, and in a step that will be lost."""


@component("dataset", "delays", target="delays:dataset")
class Data:
    """Sleeps while it is waited for."""


@component("optimizer", "delays", target="delays:optimizer")
class Optimizer:
    """Sleeps in a step."""


@component("converter", "delays", target="delays:Converter")
class Saving:
    """Sleeps while a checkpoint is saved."""


@component("logger", "delays", target="delays:Logger")
class Logging:
    """Sleeps between two steps."""


@hookimpl
def titan_components() -> list[type]:
    return [Loss, Data, Optimizer, Saving, Logging]


def delay(due: bool = True, seconds: float = SECONDS) -> None:
    if due and not KILLED.exists():
        time.sleep(seconds)


def loss(config: Any) -> Any:
    import torch

    from titancli.losses.cross_entropy import CrossEntropy

    class Slow(CrossEntropy):
        calls, evaluated = 0, False

        def token_weights(self, batch: Any) -> None:
            """Or the head would make the sum by itself."""

        def __call__(self, out: Any, batch: Any) -> Any:
            if not torch.is_grad_enabled():
                delay(not self.evaluated)
                self.evaluated = True
                return super().__call__(out, batch)
            self.calls += 1
            if self.calls == 7 and not KILLED.exists():
                KILLED.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            delay(self.calls in (2, 6))  # the sixth step is lost
            result = super().__call__(out, batch)
            number = self.calls
            result.sum.register_hook(lambda gradient: delay(number == 3))
            return result

    return Slow()


def dataset(config: Any, **options: Any) -> Any:
    from titancli.data import TextFiles
    from titancli.observe.phases import phases
    from titancli.registry.component import build

    inner = build(TextFiles(paths=[Path("text.txt")]), **options)
    made = type(inner).__iter__

    class Slow(type(inner)):  # type: ignore[misc]
        def __iter__(self) -> Any:
            for number, batch in enumerate(made(self), 1):
                if number == 4 and not KILLED.exists():
                    while phases._name != "data":  # until the batches that were made ahead are used up
                        time.sleep(0.002)
                    delay()
                yield batch

    inner.__class__ = Slow
    return inner


def optimizer(config: Any, *, named_parameters: Any, **options: Any) -> Any:
    import torch

    class Slow(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            delay(self.calls == 4)
            return super().step(closure)

    return Slow([parameter for _, parameter in named_parameters], lr=1e-3)


class Converter:
    def __init__(self, config: Any, **options: Any) -> None:
        self.first: str | None = None

    def convert(self, model: Any) -> None: ...

    def after_step(self, model: Any) -> None: ...

    def plain(self, name: str, tensor: Any) -> Any:
        self.first = self.first or name
        delay(name == self.first)
        return tensor


class Logger:
    def __init__(self, config: Any, **options: Any) -> None: ...

    def step_end(self, step: int, metrics: Any) -> None:
        delay(step == 2, STALL)
