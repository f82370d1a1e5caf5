"""Evaluation on held-out data, between the steps of any loop: nothing of what is trained is touched."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from titancli.data.loader import copied, state_of
from titancli.data.packing import PackedDataset
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem, TitanError
from titancli.observe.metrics import collector
from titancli.observe.phases import phase
from titancli.protocols.batch import IGNORE, Batch

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.observe.observers import Observers
    from titancli.protocols import Dataset
    from titancli.recipe.schema import Validation as Section

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Batches that one call evaluates."""
STOP_SECONDS = 15.0
"""Seconds after a signal in which an evaluation may end: job schedulers kill jobs 30 s after it, by
default."""


class UnreadableData(EnvironmentProblem):
    """A dataset cannot be evaluated; nothing was computed that other ranks wait for."""


@dataclass(frozen=True)
class Result:
    """One dataset's."""

    metrics: dict[str, float]
    """`loss`, `perplexity` where the loss is one of log-probabilities, and what the loss reports."""
    weight: float
    """Divisor of the loss, over all ranks: target tokens, or pairs."""


class Validation:
    """When to evaluate, and the loss of each dataset of `[validation]`, the same batches each time."""

    def __init__(
        self,
        section: Section,
        datasets: Mapping[str, Dataset],
        engine: Engine,
        observers: Observers,
        *,
        loss: Any = None,
    ) -> None:
        """`loss`: as in `Engine.evaluate`."""
        self._section, self._engine, self._observers, self._loss = section, engine, observers, loss
        self._evaluate = {name: Evaluation(name, data, engine, loss) for name, data in datasets.items()}
        self._reached: int | None = None
        self._evaluated: int | None = None
        self._seconds: float | None = None
        """Duration of the last evaluation."""
        self._alone = False
        self.on_metrics: Callable[[int, Mapping[str, float]], None] | None = None
        """Called with the step and the metrics of each evaluation."""

    @property
    def prepare(self) -> Callable[[Batch], Batch]:
        """Return the function that adds to a batch what the loss needs. Collective."""
        return next(iter(self._evaluate.values())).prepare

    @prepare.setter
    def prepare(self, function: Callable[[Batch], Batch]) -> None:
        for evaluation in self._evaluate.values():
            evaluation.prepare = function

    def between(self, step: int, asked_to_stop: Callable[[], bool]) -> bool:
        """Evaluate before the step after this one, if it is time; whether it was. Collective."""
        before, self._reached = self._reached, step
        if before is None:
            # What was saved before it was evaluated is evaluated again after a resume, for `on_metrics`.
            again = self.on_metrics is not None and step % self._section.freq == 0
            due = again if step else self._section.at_start
        else:
            due = step // self._section.freq > before // self._section.freq
        if due:
            self._run(step, asked_to_stop)
        return due

    def at_end(self, step: int, asked_to_stop: Callable[[], bool], *, stopped_at: float | None) -> bool:
        """Evaluate the last step, which is saved; return whether that is done. Collective.

        Args:
            stopped_at: when a signal was heeded, by `time.monotonic`: then there is little time. Or None.
        """
        if step == self._evaluated:
            return True
        if stopped_at is None:
            return self._run(step, asked_to_stop)
        passed = time.monotonic() - stopped_at
        left = STOP_SECONDS - max(Ranks().gather(passed))
        if self._seconds is None or self._seconds > left:
            took = "" if self._seconds is None else f", which took {self._seconds:.0f} s before"
            logger.info("stopped: no evaluation of step %d%s", step, took)
            return False
        deadline = time.monotonic() + left
        return self._run(step, lambda: time.monotonic() > deadline)

    def alone(self, step: int, asked_to_stop: Callable[[], bool]) -> bool:
        """Evaluate, with the number of tokens and, where the text is known, its bytes. Collective.

        Returns:
            Whether it came to its end; it does not if a signal came.
        """
        self._alone = True
        return self._run(step, asked_to_stop)

    def _run(self, step: int, cancelled: Callable[[], bool]) -> bool:
        with phase("evaluation"):
            return self._run_timed(step, cancelled)

    def _run_timed(self, step: int, cancelled: Callable[[], bool]) -> bool:
        began = time.perf_counter()
        metrics: dict[str, float] = {}
        for name, evaluation in self._evaluate.items():
            try:
                found = evaluation(self._section.steps, cancelled)
            except UnreadableData as error:
                if step == 0 or self._alone:  # a mistake, and nothing that was trained is lost
                    raise
                logger.warning("step %d was not evaluated, training continues: %s", step, error.message)
                continue
            if found is None:
                logger.info("stopped: the evaluation of step %d was abandoned", step)
                self._observers.pause(time.perf_counter() - began)
                return False
            counts = evaluation.counts(found, self._section.steps) if self._alone else {}
            metrics |= {f"validation/{name}/{key}": value for key, value in (found.metrics | counts).items()}
        seconds = time.perf_counter() - began
        self._evaluated, self._seconds = step, max(Ranks().gather(seconds))
        self._observers.validated(step, metrics, seconds)
        if self.on_metrics is not None:
            self.on_metrics(step, metrics)
        return True


class Evaluation:
    """One dataset, and the loss on all of it or on its beginning: each row counts once on every layout."""

    def __init__(self, name: str, data: Dataset, engine: Engine, loss: Any = None) -> None:
        if isinstance(data, PackedDataset):
            data.pads = True
        self._name, self._data, self._engine, self._loss = name, data, engine, loss
        self._start = state_of(data)
        self.prepare: Callable[[Batch], Batch] = lambda batch: batch

    def __call__(self, steps: int | None, cancelled: Callable[[], bool] = lambda: False) -> Result | None:
        """Evaluate the first `steps` batches, or all. Collective; ranks may have different numbers of them.

        Args:
            cancelled: asked every few batches; where it is true on some rank, the evaluation ends with None.

        Raises:
            UnreadableData: on every rank, where the data cannot be read on one of them, or have no targets.
        """
        totals: dict[str, Any] = {}
        perplexity = False
        with collector.muted():
            batches = self._batches(steps)
            while some := self._next(batches, cancelled):
                if None in some:
                    return None
                prepared = [self.prepare(batch) for batch in some if batch is not None]
                perplexity = perplexity or self._is_of_log_probabilities(prepared[0])
                found = self._engine.evaluate(prepared, self._loss)
                weight = found.pop("weight").double()
                sums = {name: value.double() * weight for name, value in found.items()} | {"weight": weight}
                totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
        numbers = torch.stack(list(totals.values())).tolist() if totals else []
        values = dict(zip(totals, numbers, strict=True))
        weight = values.pop("weight", 0.0)
        if not weight:
            raise UnreadableData(f"{self._label} has nothing to predict", hint="use a dataset with more text")
        metrics = {name: value / weight for name, value in values.items()}
        if perplexity:
            metrics = {"loss": metrics.pop("loss"), "perplexity": _exp(values["loss"] / weight), **metrics}
        return Result(metrics, weight)

    def counts(self, found: Result, steps: int | None) -> dict[str, float]:
        """Return `tokens`, and of text that was read to its end `bytes` (UTF-8) and `bits_per_byte`."""
        if "perplexity" not in found.metrics:
            return {}
        counts = {"tokens": found.weight}
        if steps is None and isinstance(self._data, PackedDataset):
            with collector.muted():
                # On every rank: none waits for another, which a long text may take longer than is allowed.
                size = self._data.text_bytes()
            if size is not None:
                bits = found.metrics["loss"] * found.weight / math.log(2)
                counts |= {"bits_per_byte": bits / size, "bytes": float(size)}
        return counts

    @property
    def _label(self) -> str:
        return f"validation.datasets.{self._name}"

    def _is_of_log_probabilities(self, batch: Batch) -> bool:
        loss = self._engine.loss if self._loss is None else self._loss
        return loss.token_weights(batch) is not None

    def _batches(self, steps: int | None) -> Iterator[Batch]:
        self._data.load_state_dict(copy.deepcopy(self._start))
        yield from map(copied, itertools.islice(self._data, steps))

    def _next(self, batches: Iterator[Batch], cancelled: Callable[[], bool]) -> list[Batch | None]:
        """Return the next batches, equally many on every rank; none at the end on all of them, and None if
        cancelled.

        A rank whose data have ended passes batches without targets.
        """
        mine: list[Batch] = []

        def take() -> tuple[int, Described | None, bool]:
            try:
                mine.extend(itertools.islice(batches, AT_ONCE))
            except Exception as error:
                hint = error.hint if isinstance(error, TitanError) else None
                why = error.message if isinstance(error, TitanError) else str(error) or type(error).__name__
                raise UnreadableData(f"{self._label}: {why}", hint=hint) from error
            return len(mine), _described(mine[-1]) if mine else None, cancelled()

        everyones = Ranks().allgather_call(f"evaluating {self._label}", take)
        if any(ends for *_, ends in everyones):
            return [None]
        most, like = max(((count, described) for count, described, _ in everyones), key=lambda one: one[0])
        if len(mine) < most and (like is None or "targets" not in like.tensors):
            raise UnreadableData(
                f"{self._label} ends earlier on some ranks, and its batches have no targets to leave out",
                hint="use a dataset that gives every rank the same number of batches",
            )
        return [*mine, *(like.without_targets() for _ in range(most - len(mine)) if like is not None)]


@dataclass(frozen=True)
class Described:
    """The shape of a batch."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    unit: int

    def without_targets(self) -> Batch:
        made = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self.tensors.items()}
        made["targets"].fill_(IGNORE)
        if "positions" in made:
            made["positions"] += torch.arange(made["positions"].shape[1])
        return Batch(made, unit=self.unit)


def _described(batch: Batch) -> Described:
    return Described({name: (tuple(t.shape), t.dtype) for name, t in batch.items()}, batch.unit)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
