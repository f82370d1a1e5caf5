"""Rows of several datasets: `mix`, by weight, and `concat`, all of them in each epoch.

Each row comes from the dataset that lags furthest behind its share of the rows so far. So shares are exact to
a row everywhere, and the position is a count per dataset, independent of the ranks. Each rank draws its own
rows and skips those of the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from titancli.data import Concat, Mix
from titancli.data.loader import copied
from titancli.data.packing import STATE_VERSION, refuse_other_data
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.observe.metrics import collector, report
from titancli.protocols import Dataset, Tokenizer
from titancli.protocols.batch import IGNORE, MIX, Batch
from titancli.registry.component import build as build_component

T = TypeVar("T", bound="SeveralDatasets")

KEYS = ("tokens", "targets", "positions")
COUNTS = ("bad_rows", "cut_rows")
"""Metrics that are summed over the datasets of a mixture."""
WASTED = "wasted_tokens"
"""Metric that is a fraction of a dataset's rows."""


class _Source:
    """One of the datasets, built for one rank and one row per batch."""

    def __init__(self, name: str, dataset: Dataset) -> None:
        self.name, self.dataset = name, dataset
        self._rows = iter(dataset)
        self.readings: dict[str, float] = {}
        """Last values of the metrics that count since the process began."""

    def next(self) -> Batch | None:
        """Return the next row; None at the end."""
        with self._listening():
            row = next(self._rows, None)
            return None if row is None else copied(row)

    def skip(self) -> bool:
        """Skip a row; return whether there was one."""
        with self._listening():
            skipped = self.dataset.skip(1)
        return self.next() is not None if skipped is None else skipped == 1

    @contextmanager
    def _listening(self) -> Iterator[None]:
        with collector.captured() as reported:
            yield
        for name, reading in reported.drain().items():
            if name in (*COUNTS, WASTED):
                self.readings[name] = float(reading.value)
            else:
                report(name, reading.value, reduce=reading.reduce, count=reading.count)

    def load(self, state: dict[str, Any]) -> None:
        try:
            self.dataset.load_state_dict(state)
        except EnvironmentProblem as error:
            raise EnvironmentProblem(f"datasets.{self.name}: {error.message}", hint=error.hint) from error
        self._rows = iter(self.dataset)


class SeveralDatasets(ABC):
    """Batches of rows of several datasets: the `Dataset` of `titancli.protocols`."""

    label: str
    """Name in error messages."""

    def __init__(
        self,
        config: Concat | Mix,
        datasets: Mapping[str, Dataset],
        *,
        seq_len: int,
        filler_id: int,
        rows: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self._seq_len, self._filler_id = seq_len, filler_id
        self._rows, self._dp_rank, self._dp_size = rows, dp_rank, dp_size
        self._sources = {name: _Source(name, dataset) for name, dataset in datasets.items()}
        self._masks = config.document_mask
        self._counts = dict.fromkeys(datasets, 0)
        """Global rows of each dataset."""
        self._stage_counts = dict.fromkeys(datasets, 0)
        """Global rows of each dataset since the current shares began."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position on; the last one may be padded with rows without
        targets."""
        while (batch := self._batch()) is not None:
            yield batch

    def _batch(self) -> Batch | None:
        mine = range(self._dp_rank * self._rows, (self._dp_rank + 1) * self._rows)
        found: list[dict[str, Tensor]] = []
        for number in range(self._rows * self._dp_size):
            if (row := self._row(number in mine)) is None:
                if number == 0:
                    return None
                found += [self._filler() for _ in range(self._rows - len(found))]
                break
            if number in mine:
                found.append(row)
        self._go_on(self._rows * self._dp_size)
        for name, count in self._counts.items():
            report(f"{MIX}{name}/rows", count, reduce="max")  # every rank counts those of all
        self._report()
        return Batch({name: torch.cat([row[name] for row in found]) for name in found[0]})

    def _report(self) -> None:
        """Report the metrics of all datasets together since the process began."""
        readings = {name: source.readings for name, source in self._sources.items()}
        for metric in COUNTS:
            if found := [values[metric] for values in readings.values() if metric in values]:
                report(metric, sum(found), reduce="max")
        if any(WASTED in values for values in readings.values()):
            wasted = sum(values.get(WASTED, 0.0) * self._counts[name] for name, values in readings.items())
            report(WASTED, wasted / max(sum(self._counts.values()), 1), reduce="max")

    def skip(self, rows: int) -> int:
        """Skip this many global rows without making them; return how many were skipped."""
        stride, skipped = self._rows * self._dp_size, 0
        while skipped < rows:
            found, wanted = 0, min(stride, rows - skipped)
            while found < wanted and self._row(False) is not None:
                found += 1
            if found:
                self._go_on(wanted)
            skipped += found
            if found < wanted:
                break
        return skipped

    def _row(self, mine: bool) -> dict[str, Tensor] | None:
        """Return the next global row, or an empty dict if it is another rank's; None at the end."""
        while (name := self._choose()) is not None:
            source = self._sources[name]
            if mine and (batch := source.next()) is not None:
                self._count(name)
                return self._same_keys(name, batch)
            if not mine and source.skip():
                self._count(name)
                return {}
            self._has_ended(name)
        return None

    def _furthest_behind(self, shares: Mapping[str, float]) -> str:
        """Return the dataset that lags furthest behind its share of the rows."""
        total = sum(shares.values())
        done = 1 + sum(self._stage_counts[name] for name in shares)
        return max(shares, key=lambda name: shares[name] / total * done - self._stage_counts[name])

    def _count(self, name: str) -> None:
        self._counts[name] += 1
        self._stage_counts[name] += 1

    @abstractmethod
    def _choose(self) -> str | None:
        """Return the dataset of the next row; None at the end."""

    @abstractmethod
    def _has_ended(self, name: str) -> None:
        """Take note that a dataset has no more rows."""

    def _go_on(self, rows: int) -> None:
        """Take note that this many rows were dealt."""
        return

    def _same_keys(self, name: str, batch: Batch) -> dict[str, Tensor]:
        row = dict(batch)
        if self._masks and "document_ids" not in row:
            row["document_ids"] = torch.zeros((1, self._seq_len), dtype=torch.int32)
        wanted = {*KEYS, *(["document_ids"] if self._masks else [])}
        if set(row) != wanted or batch.rows != 1:
            raise EnvironmentProblem(
                f"datasets.{name} returns {', '.join(row)} in batches of {batch.rows} rows, but only rows "
                f"with {', '.join(sorted(wanted))} can be mixed",
                hint="a dataset with document_ids says so by `document_mask` in its config",
            )
        return {**row, **self._marks(name)}

    def _marks(self, name: str | None) -> dict[str, Tensor]:
        """Return the tensors that mark a row's dataset; None: no dataset."""
        return {f"{MIX}{other}": torch.tensor([float(other == name)]) for other in self._sources}

    def _filler(self) -> dict[str, Tensor]:
        shape = (1, self._seq_len)
        row = {
            "tokens": torch.full(shape, self._filler_id),
            "targets": torch.full(shape, IGNORE),
            "positions": torch.arange(self._seq_len)[None],
        }
        if self._masks:
            row["document_ids"] = torch.zeros(shape, dtype=torch.int32)
        return {**row, **self._marks(None)}

    @property
    def _identity(self) -> dict[str, Any]:
        return {"datasets": list(self._sources)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, the same on every rank; `rows` counts each dataset's
        rows."""
        states = {name: source.dataset.state_dict() for name, source in self._sources.items()}
        return {
            "version": STATE_VERSION,
            "epoch": min(int(state.get("epoch", 0)) for state in states.values()),
            "rows": dict(self._counts),
            "rows_of_stage": dict(self._stage_counts),
            "sources": states,
            "data": {
                **self._identity,
                **{f"datasets.{name}": state.get("data") for name, state in states.items()},
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], *more: str) -> None:
        """Continue from a position, with any number of ranks and rows.

        Args:
            more: other keys that the state must have.

        Raises:
            EnvironmentProblem: the state was saved with other data or shares, or is another dataset's.
        """
        own = {name: value for name, value in state.get("data", {}).items() if name in self._identity}
        keys = ("rows", "rows_of_stage", "sources", *more)
        refuse_other_data({**state, "data": own}, self._identity, self.label, *keys)
        for name, source in self._sources.items():
            source.load(state["sources"][name])
        self._counts, self._stage_counts = dict(state["rows"]), dict(state["rows_of_stage"])


class MixDataset(SeveralDatasets):
    """Rows of several datasets, by weight."""

    label = "dataset mix"

    def __init__(self, config: Mix, datasets: Mapping[str, Dataset], **options: Any) -> None:
        """Create the dataset; see `SeveralDatasets`."""
        super().__init__(config, datasets, **options)
        self.rows_per_step: int | None = None
        self._mix = config
        self._step = self._row_of_step = 0
        self._ended: list[str] = []
        self._over = False

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position on; the last one may be padded with rows without targets.

        Raises:
            RecipeError: the weights change at a step, but the dataset is not used in training.
        """
        if self._mix.stages and self.rows_per_step is None:
            raise RecipeError(
                "dataset.stages are for training alone: elsewhere there are no steps",
                hint="remove them there",
            )
        return super().__iter__()

    def _choose(self) -> str | None:
        weights = {
            name: weight for name, weight in self._weights().items() if name not in self._ended and weight
        }
        return self._furthest_behind(weights) if weights and not self._over else None

    def _has_ended(self, name: str) -> None:
        self._ended.append(name)
        self._over = self._mix.exhausted == "end"

    def _weights(self) -> dict[str, float]:
        begun = [stage.weights for stage in self._mix.stages if stage.from_step <= self._step]
        return begun[-1] if begun else self._mix.weights

    def _go_on(self, rows: int) -> None:
        """Count rows towards steps, and apply new weights where a stage begins."""
        if self.rows_per_step is None:
            return
        before = self._weights()
        self._row_of_step += rows
        while self._row_of_step >= self.rows_per_step:
            self._step, self._row_of_step = self._step + 1, self._row_of_step - self.rows_per_step
        if self._weights() is not before:
            self._stage_counts = dict.fromkeys(self._stage_counts, 0)

    @property
    def _identity(self) -> dict[str, Any]:
        weights = {"weights": self._mix.weights, "exhausted": self._mix.exhausted}
        stages = [[stage.from_step, stage.weights] for stage in self._mix.stages]
        return {**weights, "stages": stages, **super()._identity}

    def state_dict(self) -> dict[str, Any]:
        own = {"step": [self._step, self._row_of_step], "ended": list(self._ended), "over": self._over}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any], *more: str) -> None:
        super().load_state_dict(state, "step", "ended", "over", *more)
        self._step, self._row_of_step = state["step"]
        self._ended, self._over = list(state["ended"]), state["over"]


class ConcatDataset(SeveralDatasets):
    """All rows of several datasets in each epoch, mixed by how many rows each has in it."""

    label = "dataset concat"

    def __init__(self, config: Concat, datasets: Mapping[str, Dataset], **options: Any) -> None:
        """Create the dataset; see `SeveralDatasets`."""
        super().__init__(config, datasets, **options)
        self._epoch = 0
        self._epochs: float = math.inf
        self._sizes: dict[str, int] = {}
        """Rows of each dataset in the epoch; empty: not counted yet."""
        if not config.repeat:
            self.end_after(1)

    def rows_left(self, epochs: int) -> int:
        """Return the rows from the position to the end of the first `epochs` epochs.

        Raises:
            TitanError: a dataset cannot count its rows.
        """
        return sum(self._left(name, epochs) for name in self._sources)

    def end_after(self, epochs: int) -> None:
        """End after this many epochs."""
        self._epochs = epochs
        for source in self._sources.values():
            source.dataset.end_after(epochs)

    def _choose(self) -> str | None:
        while True:
            sizes = self._sizes = self._sizes or {name: self._size(name) for name in self._sources}
            if any(self._stage_counts[name] < sizes[name] for name in sizes):
                # A dataset that is done with its share lags behind no other.
                return self._furthest_behind(sizes)
            if self._epoch + 1 >= self._epochs:
                return None
            self._epoch, self._sizes = self._epoch + 1, {}
            self._stage_counts = dict.fromkeys(self._stage_counts, 0)

    def _size(self, name: str) -> int:
        """Return the rows of a dataset in the current epoch."""
        return self._left(name, self._epoch + 1) - self._left(name, self._epoch)

    def _left(self, name: str, epochs: int) -> int:
        left = self._sources[name].dataset.rows_left(epochs)
        if left is None:
            raise RecipeError(
                f"datasets.{name} does not say how many rows an epoch has, which {self.label} needs",
                hint="use dataset.type = mix, or a dataset with rows_left",
            )
        return left

    def _has_ended(self, name: str) -> None:
        raise EnvironmentProblem(
            f"datasets.{name} has fewer rows than it counted", hint="its files may have changed: start anew"
        )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any], *more: str) -> None:
        super().load_state_dict(state, "epoch", *more)
        self._epoch, self._sizes = state["epoch"], {}


def build(config: Mix, **runtime: Any) -> MixDataset:
    """Build `[dataset] type = "mix"`.

    Raises:
        TitanError: one of the datasets cannot be built.
    """
    return _built(MixDataset, config, **runtime)


def build_concat(config: Concat, **runtime: Any) -> ConcatDataset:
    """Build `[dataset] type = "concat"`.

    Raises:
        TitanError: one of the datasets cannot be built.
    """
    return _built(ConcatDataset, config, **runtime)


def _built(
    cls: type[T], config: Any, *, tokenizer: Tokenizer | None, seq_len: int, seed: int, **options: int
) -> T:
    """Build the datasets of a config, each for one rank and one row per batch, and what is made of them."""
    one = {"tokenizer": tokenizer, "seq_len": seq_len, "rows": 1, "dp_rank": 0, "dp_size": 1, "seed": seed}
    datasets = {name: build_component(part, **one) for name, part in config.datasets.items()}
    filler = 0 if tokenizer is None else tokenizer.eos_id
    return cls(config, datasets, seq_len=seq_len, filler_id=filler, **options)
