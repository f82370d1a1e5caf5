"""`Loader`: batches prefetched by a thread or by processes, and copied to the device.

Each batch comes with the dataset's state after it, so that a checkpoint stores the position of the last batch
that was *used*, not of the last one that was prefetched.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from titancli.data.values import Limits, fault, readable
from titancli.errors import EnvironmentProblem, PluginError
from titancli.protocols import Dataset
from titancli.protocols.batch import IGNORE, Batch

STOP_SECONDS = 10.0
"""Time that a batch in preparation is given when the loader is stopped."""


class Preparers(Protocol):
    """Prepares a dataset's batches elsewhere: `titancli.data.workers.Workers`."""

    def batches(self, state: dict[str, Any]) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yield the batches from a position on, and the position after each."""
        ...

    def stop(self) -> None:
        """Stop preparing batches; may be called from any thread."""
        ...


class _Item(NamedTuple):
    batch: Batch | None
    """None: the data ended, or `error` is the reason why there are no more."""
    state: dict[str, Any]
    error: BaseException | None = None


class _Queue:
    """A bounded queue between the loader and its thread, which either can close."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[_Item] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, item: _Item) -> bool:
        """Wait for room; return False if the queue was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < self._size)
            if not self.closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self.closed

    def get(self) -> _Item:
        """Wait for an item. The last one, an end or an error, stays in the queue."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items))
            if self._items[0].batch is None:
                return self._items[0]
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()


class Loader(Iterator[Batch]):
    """An iterator over a dataset's batches on a device, with up to `prefetch` of them prepared in advance.

    On CUDA, batches are pinned in the thread and copied asynchronously. Errors of the dataset are raised
    here, at the batch that they prevented, and at every later call.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        device: torch.device | str,
        prefetch: int = 2,
        vocab_size: int | None = None,
        rows: int | None = None,
        workers: Preparers | None = None,
    ) -> None:
        """Create the loader.

        Batches with a negative token id or position, an id of `vocab_size` or more, or a number of rows other
        than `rows` end the data with an error; None: no such limit. With `workers` the dataset itself is not
        read.
        """
        self.dataset, self._limits, self._workers = dataset, Limits(vocab_size), workers
        self._rows = rows
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device(
                "cuda", torch.cuda.current_device()
            )  # the thread's current device may differ
        self._prefetch = max(1, prefetch)
        self._state = state_of(dataset)
        self._queue: _Queue | None = None
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The dataset's state after the last batch handed out."""
        return self._state

    def __next__(self) -> Batch:
        queue = self._queue or self._start()
        batch, state, error = queue.get()
        if error is not None:
            raise error
        self._state = state
        if batch is None:
            raise StopIteration
        return batch if self._device.type == "cpu" else batch.to(self._device)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state; prefetched batches are dropped.

        Raises:
            TitanError: the dataset rejects the state, or the thread does not end.
        """
        self.close()
        if self._thread is not None and self._thread.is_alive():
            raise EnvironmentProblem(
                f"the dataset has not returned a batch within {STOP_SECONDS:.0f} s", hint="restart the run"
            )
        self.dataset.load_state_dict(state)
        self._state = state_of(self.dataset)
        self._thread = None

    def close(self) -> None:
        """Stop the thread and drop prefetched batches. The next batch is the one after the last used."""
        if self._finalizer is not None:
            self._finalizer()
        self._queue = None

    def _start(self) -> _Queue:
        if self._thread is not None:  # closed: the dataset is ahead of the last batch used
            self.load_state(self._state)
        # The thread holds no reference to the loader, so dropping the loader ends the thread. The finalizer
        # also runs at exit: a daemon thread in torch while Python shuts down can crash it.
        queue = _Queue(self._prefetch)
        thread = threading.Thread(
            target=_produce,
            args=(self.dataset, self._workers, self._state, self._device, queue, self._limits, self._rows),
            name="titan-data",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _stop, queue, thread, self._workers)
        self._queue, self._thread = queue, thread
        thread.start()
        return queue


def _produce(
    dataset: Dataset,
    workers: Preparers | None,
    state: dict[str, Any],
    device: torch.device,
    queue: _Queue,
    limits: Limits,
    rows: int | None,
) -> None:
    cuda = device.type == "cuda"
    try:
        if cuda:  # a new thread begins on device 0 and would open a context there
            torch.cuda.set_device(device)
        batches = _alone(dataset) if workers is None else workers.batches(state)
        for batch, state in batches:
            _check_values(batch, limits)
            if rows is not None:
                _check_rows(batch, rows)
            if workers is None:
                batch = copied(batch)
            if cuda:
                batch = Batch({name: tensor.pin_memory() for name, tensor in batch.items()}, unit=batch.unit)
            if not queue.put(_Item(batch, state)):
                return
        queue.put(_Item(None, state))
    except BaseException as error:  # passed on to the consumer, whatever it is
        queue.put(_Item(None, {}, error))


def _alone(dataset: Dataset) -> Iterator[tuple[Batch, dict[str, Any]]]:
    for batch in dataset:
        yield batch, state_of(dataset)


def copied(batch: Any) -> Any:
    """Return a batch in memory of its own: a dataset may reuse its buffers for the next batch."""
    if not isinstance(batch, Mapping) or not all(isinstance(value, torch.Tensor) for value in batch.values()):
        return batch  # the engine reports the error
    return Batch({name: tensor.clone() for name, tensor in batch.items()}, unit=getattr(batch, "unit", 1))


def state_of(dataset: Dataset) -> dict[str, Any]:
    """Return a copy of a dataset's state: the dataset may return the same dict again with other values.

    Raises:
        PluginError: the state is not a dict.
    """
    state: Any = dataset.state_dict()
    if not isinstance(state, dict):
        raise PluginError(
            f"state_dict() of the dataset {type(dataset).__name__} returned a {type(state).__name__}",
            hint="it must return a dict of plain JSON, its position",
        )
    return copy.deepcopy(state)


def _check_values(batch: Batch, limits: Limits) -> None:
    """Check a batch's values while they are on the CPU: on a GPU they are not read."""
    if readable(batch) and (found := fault(batch, limits, "the dataset returns")) is not None:
        raise EnvironmentProblem(found.message, hint=found.hint)


def _check_rows(batch: Batch, rows: int) -> None:
    """Check the number of rows: with fewer, a step would be smaller than in the recipe, or differ across
    ranks."""
    found = getattr(batch, "rows", rows)  # the engine reports values that are not batches
    if found != rows:
        raise EnvironmentProblem(
            f"the dataset returned a batch of {found} rows, but training.local_batch_size is {rows}",
            hint=f"each batch must have the `rows` that the dataset is built with: pad one with rows whose "
            f"targets are all {IGNORE}",
        )


def _stop(queue: _Queue, thread: threading.Thread, workers: Preparers | None) -> None:
    queue.close()
    if workers is not None:
        workers.stop()
    if thread is not threading.current_thread():
        thread.join(STOP_SECONDS)
