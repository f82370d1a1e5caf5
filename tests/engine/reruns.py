"""CUDA graphs on the CPU: what was captured runs again, and its results are put where the capture left
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from titancli.engine import graphed
from titancli.observe.metrics import Reading, collector
from titancli.parallel.graphs import Slots


class Reruns:
    """Takes the place of `titancli.parallel.graphs.Pool`; a capture leaves no trace but its results."""

    slots: Slots
    captures = 0

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        Reruns.captures += 1
        before = [None if value is None else value.clone() for value in self._values()]
        drawn = torch.get_rng_state()
        made, left = work(), self._values()
        torch.set_rng_state(drawn)
        reported = dict(collector._thread.captured._readings)
        for value, earlier in zip(left, before, strict=True):
            if value is not None:
                value.fill_(7) if earlier is None else value.copy_(earlier)

        def replay() -> None:
            for (owner, name), earlier in zip(self.slots._places, before, strict=True):
                if earlier is None:
                    setattr(owner, name, None)
            with collector.captured() as reports:
                again = work()
            before_and_after = (tensors(made, reported), tensors(again, reports.drain()))
            for place, value in zip(*before_and_after, strict=True):
                place.copy_(value)
            for (owner, name), place in zip(self.slots._places, left, strict=True):
                if place is not None and place is not (value := getattr(owner, name)):
                    place.copy_(value)
                    setattr(owner, name, place)

        return replay, made

    def _values(self) -> list[Tensor | None]:
        return [getattr(owner, name) for owner, name in self.slots._places]


def tensors(made: Any, reports: dict[str, Reading]) -> list[Tensor]:
    numbers = [number for reading in reports.values() for number in (reading.value, reading.count)]
    return [leaf for leaf in tree_leaves((made, numbers)) if isinstance(leaf, Tensor)]


def reruns(monkeypatch: pytest.MonkeyPatch) -> type[Reruns]:
    """Let `compile.cuda_graphs = "step"` be tried on the CPU."""
    Reruns.captures = 0
    monkeypatch.setattr(graphed, "Pool", Reruns)
    monkeypatch.setattr(graphed, "refuse", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    capture = graphed.GraphedModel._capture

    def capturing(self: Any, *given: Any) -> Any:
        self._pool.slots = self._slots
        return capture(self, *given)

    monkeypatch.setattr(graphed.GraphedModel, "_capture", capturing)
    return Reruns
