"""Worker processes that prepare batches: each prepares every n-th batch of its rank, and skips all other
rows.

A worker rebuilds the dataset from its config and seeks to the same position. So the rows, their order, and
the position after each batch are the same as without workers. Each batch is sent with that position and with
everything reported and logged while it was prepared.

Workers are forked by a server that has imported only torch, so they inherit no device, lock or thread of the
rank.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from titancli import registry
from titancli.data.loader import Loader
from titancli.data.shards.workers import end_with_parent
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.observe.metrics import Reading, collector, report
from titancli.protocols import Dataset, DatasetDefaults
from titancli.protocols.batch import Batch
from titancli.registry.component import build
from titancli.registry.error_source import blame

logger = logging.getLogger(__name__)

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for the rank that may reach all of its processes; workers serve batches until the rank ends."""
END_SECONDS = 5.0
NOT_POSITION = ("version", "data", "sources")
"""Keys of a position that do not locate it, or are too long to print."""


@dataclass(frozen=True)
class Rebuild:
    """Everything needed to build a dataset, in another process too."""

    config: Any
    tokenizer: Any
    """The tokenizer's config; None: the dataset needs none."""
    seq_len: int
    rows: int
    dp_rank: int
    dp_size: int
    seed: int
    rows_per_step: int | None = None
    epochs: int | None = None
    """Where the data end; None: by the config."""

    def __call__(self) -> Dataset:
        runtime = {"rows": self.rows, "dp_rank": self.dp_rank, "dp_size": self.dp_size, "seed": self.seed}
        tokenizer = None if self.tokenizer is None else build(self.tokenizer)
        dataset: Dataset = build(self.config, tokenizer=tokenizer, seq_len=self.seq_len, **runtime)
        if hasattr(dataset, "rows_per_step"):
            dataset.rows_per_step = self.rows_per_step
        if self.epochs is not None:
            dataset.end_after(self.epochs)
        return dataset

    @property
    def stride(self) -> int:
        """Return the rows of a micro-batch on all ranks."""
        return self.rows * self.dp_size


class _Sent(NamedTuple):
    """A message of a worker: a batch, an error, or neither at the end of the data."""

    tensors: dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...]]] | None
    unit: int
    state: dict[str, Any]
    error: BaseException | None
    readings: dict[str, Reading]
    records: list[tuple[str, int, str]]
    """Logger, level and message."""


class Workers:
    """Worker processes that stand in for a rank's dataset in a `Loader`."""

    def __init__(self, rebuild: Rebuild, dataset: Dataset, *, count: int, depth: int) -> None:
        """Create the workers, which are started with the first batch.

        Args:
            dataset: the dataset that `rebuild` builds.
            count: number of processes.
            depth: batches that each prepares in advance.

        Raises:
            RecipeError: the dataset cannot skip rows.
        """
        if dataset.skip(0) is None:
            raise RecipeError(
                f"the dataset {type(dataset).__name__} cannot skip rows, so each worker would prepare all",
                hint="set training.dataloader.num_workers = 0; a plugin's dataset can offer skip(rows)",
            )
        self._rebuild, self._count, self._depth = rebuild, count, depth
        self._stop: Finalize | None = None

    def batches(self, state: dict[str, Any]) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yield batches from a position on, and the position after each. Only one iteration at a time.

        Raises:
            EnvironmentProblem: a worker died.
            BaseException: an error of the dataset, with the affected rows as a note.
        """
        workers: list[tuple[Any, Connection]] = []
        # Before the interpreter's own exit handler, which would wait for the processes.
        self._stop = Finalize(self, _kill, (workers,), exitpriority=10)
        try:
            self._start(workers, state)
            for number in range(10**18):
                process, connection = workers[number % self._count]
                try:
                    sent: _Sent = connection.recv()
                except (EOFError, OSError) as error:
                    raise self._dead(process, number, state) from error
                _repeat(sent)
                if sent.error is not None:
                    raise _at(sent.error, f"data worker {process.pid}, {self._rows(number, state)}")
                if sent.tensors is None:
                    return
                state = sent.state
                yield Batch({n: _tensor(*parts) for n, parts in sent.tensors.items()}, unit=sent.unit), state
        finally:
            _kill(workers)  # also those started while it was being stopped
            for _, connection in workers:
                connection.close()

    def stop(self) -> None:
        """End the processes; may be called from any thread."""
        if self._stop is not None:
            self._stop()

    def _start(self, workers: list[tuple[Any, Connection]], state: dict[str, Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        # The current environment: the server has that of its start.
        made_of = (dict(os.environ), registry.plugin_files())
        resource_tracker.ensure_running()  # starting it later would unblock signals
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # the server and its forks inherit it
        try:
            for number in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, *made_of), name=f"titan-data-{number}")
                process.start()
                theirs.close()
                workers.append((process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, (_, connection) in enumerate(workers):
            with suppress(ConnectionError):  # it died; reading from it reports that
                connection.send((self._rebuild, state, number, self._count, self._depth))

    def _rows(self, number: int, state: dict[str, Any]) -> str:
        first = number * self._rebuild.stride + self._rebuild.dp_rank * self._rebuild.rows
        place = {name: value for name, value in state.items() if name not in NOT_POSITION}
        return (
            f"rows {first:,} to {first + self._rebuild.rows - 1:,} since this start of the data, "
            f"at the position {json.dumps(place)}"
        )

    def _dead(self, process: Any, number: int, state: dict[str, Any]) -> EnvironmentProblem:
        process.join(END_SECONDS)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with {code}"
        return EnvironmentProblem(
            f"data worker {process.pid} {how} while it prepared {self._rows(number, state)}, or later rows",
            hint="a machine that runs out of memory kills processes: with fewer "
            "training.dataloader.num_workers less is needed; --resume continues before these rows",
        )


def _kill(workers: list[tuple[Any, Connection]]) -> None:
    for process, _ in workers:
        process.kill()  # it holds nothing that must be saved
    for process, _ in workers:
        process.join(END_SECONDS)


def _at(error: BaseException, where: str) -> BaseException:
    """Add where it was raised to an error: in the message, for errors shown to users."""
    if isinstance(error, TitanError):
        error.message += f" ({where})"
    else:
        error.add_note(where)
    return error


def _repeat(sent: _Sent) -> None:
    """Report and log what the worker reported and logged."""
    for name, reading in sent.readings.items():
        report(name, reading.value, reduce=reading.reduce, count=reading.count)
    for name, level, message in sent.records:
        logging.getLogger(name).log(level, "%s", message)


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


# --------------------------------------------------------------------------------------- in a worker process


class _Share(DatasetDefaults):
    """Every `workers`-th batch of a dataset."""

    def __init__(self, dataset: Dataset, stride: int, number: int, workers: int) -> None:
        self._dataset, self._stride, self._number, self._workers = dataset, stride, number, workers
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Batch]:
        batches, others = iter(self._dataset), self._number
        while self._skip(others) and (batch := next(batches, None)) is not None:
            yield batch
            others = self._workers - 1

    def _skip(self, batches: int) -> bool:
        """Skip batches of the other workers; return whether there were enough."""
        rows = batches * self._stride
        return not rows or self._dataset.skip(rows) == rows


class _Closed(Exception):
    """The rank no longer reads."""


class _Records(logging.Handler):
    """Keeps log records until they are sent."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append((record.name, record.levelno, record.getMessage()))

    def drain(self) -> list[tuple[str, int, str]]:
        found, self._kept = self._kept, []
        return found


def _work(connection: Connection, environment: dict[str, str], plugin_files: Sequence[Path]) -> None:
    """Prepare batches and send them until the other end is closed."""
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(environment, TOKENIZERS_PARALLELISM="false")  # there is one process per core already
    torch.set_num_threads(1)
    records = _Records()
    logging.getLogger().addHandler(records)
    loader = None

    def send(batch: Batch | None, error: BaseException | None = None) -> None:
        tensors = None if batch is None else {name: _flat(tensor) for name, tensor in batch.items()}
        at: dict[str, Any] = {} if loader is None else loader.state
        unit = 1 if batch is None else batch.unit
        sent = _Sent(tensors, unit, at, error, collector.drain(), records.drain())
        try:
            connection.send(sent)
        except ConnectionError as closed:
            raise _Closed from closed

    try:
        registry.configure(files=plugin_files, checks=False)
        registry.current().names("dataset")  # configs may come from plugin files, which only this imports
        rebuild: Rebuild
        rebuild, state, number, workers, depth = connection.recv()
        with collector.muted():  # the rank has checked the rows
            dataset = rebuild()
        dataset.load_state_dict(state)
        loader = Loader(_Share(dataset, rebuild.stride, number, workers), device="cpu", prefetch=depth)
        for batch in loader:
            send(batch)
        send(None)
    except BaseException as error:  # passed on to the rank, whatever it is
        with suppress(_Closed):
            send(None, _plain(error))
    finally:
        if loader is not None:
            loader.close()


def _flat(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype, tuple[int, ...]]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def _plain(error: BaseException) -> BaseException:
    """Return the error in a form that can be sent: one of titan's, or another with its traceback as a
    note. Blame is determined here, since frames cannot be sent."""
    blamed = blame(error)
    if isinstance(error, TitanError):
        kind = next(cls for cls in type(error).__mro__ if cls.__module__ == TitanError.__module__)
        own = error if kind is type(error) else kind(error.message, hint=error.hint)
        if blamed is not None:
            own.blamed = blamed  # type: ignore[union-attr]
        return own
    found = error
    if any(cls.__module__ != "builtins" for cls in (type(error), *map(type, error.args))):
        found = RuntimeError(f"{type(error).__name__}: {error}")  # others may not accept their own arguments
    found.add_note("".join(traceback.format_exception(error)))
    if blamed is not None:
        found.blamed = blamed  # type: ignore[attr-defined]
    return found
