"""The other replicas, by torchft: membership, gradients and state."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import tomli
import torch
import torch.distributed as dist
from torch import Tensor

from titancli import TitanError, phase
from titancli.engine.replicas import shared_state, take_state
from titancli.errors import EnvironmentProblem
from titancli.observe.events import read_events

os.environ.setdefault("RUST_LOG", "warn")  # read at import; otherwise it prints several lines per step

from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

from titan_ft.transport import SafeTransport, bytes_of

if TYPE_CHECKING:
    from titan_ft import FaultTolerant
    from titancli.data.loader import Loader
    from titancli.engine import Engine


BUCKET_BYTES = 64 * 2**20
"""Bytes sent at once: the copy stays small beside the gradients."""


WAIT_SECONDS = 0.5
"""Pause between two meetings of too few replicas."""
QUORUM_RETRIES = 10_000
"""Retries by torchft if the lighthouse is gone, at most one every tenth of a second;
`quorum_timeout_seconds` is the actual limit."""


class NoQuorum(EnvironmentProblem):
    """The lighthouse does not answer, or too few replicas are there."""


class Replicas:
    """This replica among the others. Every rank has one, which exchanges with the same rank of the others."""

    def __init__(self, config: FaultTolerant, engine: Engine, data: Loader, folder: Path | None) -> None:
        self._config, self._engine, self._data = config, engine, data
        self._position = data.state
        """Position in the data at the beginning of the step."""
        self._began = time.monotonic()
        self._recipe = fingerprint(folder)
        # It reports a traceback per tensor; `failure` returns it as one line.
        logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
        self._taken_over = self._is_known = False
        self._may_be_late = not config.alone and config.replicas > 1
        """Whether this replica has not met the others yet, and must not assume that it is the first."""
        self._folder = folder
        self.count = 0
        """Replicas that took part in the last exchange."""
        self._lighthouse = lighthouse()
        limit = timedelta(seconds=config.timeout_seconds)
        group = ProcessGroupNCCL(limit) if engine.device.type == "cuda" else ProcessGroupGloo(limit)
        self._store = own_store()
        try:
            self._manager = Manager(
                pg=group,
                load_state_dict=self._take_over,
                state_dict=self._state,
                min_replica_size=config.min_replicas,
                use_async_quorum=False,  # every participant has the newest state before forward
                timeout=limit,
                quorum_timeout=timedelta(seconds=config.quorum_timeout_seconds),
                connect_timeout=limit,
                quorum_retries=QUORUM_RETRIES,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                store_addr=self._store.host,
                store_port=self._store.port,
                lighthouse_addr=self._lighthouse,
                checkpoint_transport=SafeTransport(limit, lambda: bytes_of(shared_state(engine)[0])),
                replica_id=f"replica-{config.replica}",
                hostname=socket.gethostname(),
            )
        except RuntimeError as error:
            raise EnvironmentProblem(
                f"the lighthouse {self._lighthouse} cannot be reached: {error}",
                hint="start it first: torchft_lighthouse --min_replicas 1",
            ) from error
        self._manager.load_state_dict({"step": engine.step, "batches_committed": 0})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.shutdown(wait=False)

    def begin(self) -> None:
        """Begin a step; a replica that is behind receives the others' state. Raises the errors of `meet`."""
        self._position, self._began = self._data.state, time.monotonic()
        self.meet()

    def meet(self) -> bool:
        """Determine who takes part in the step; return whether the state is now that of others.

        Raises:
            NoQuorum: the lighthouse does not answer, or too few replicas come in time.
            TitanError: the others' state does not fit.
        """
        self._taken_over = False
        with phase("quorum"):
            if self._too_few():  # the lighthouse itself accepts fewer
                time.sleep(WAIT_SECONDS)
            self._ask()
            while self._may_be_late and self._is_left_alone():
                time.sleep(WAIT_SECONDS)
                self._ask()
            self._may_be_late = False
        return self._taken_over

    def _ask(self) -> None:
        """Ask the lighthouse who is there. All ranks of this replica fail if one of them does."""
        failure: Exception | None = None
        try:
            self._manager.start_quorum()
            if self._too_few() and self._is_late():
                raise TimeoutError(self._too_few())
        except (TimeoutError, RuntimeError) as error:
            failure = error
        if on_any_rank(failure is not None):
            raise NoQuorum(
                f"too few replicas joined at {self._lighthouse}: "
                f"{failure or 'another rank of this replica waited without success'}",
                hint="start the lighthouse and the other replicas, or raise loop.quorum_timeout_seconds",
            ) from failure

    def _is_left_alone(self) -> bool:
        """Return whether others were there before and none is now.

        Raises:
            NoQuorum: this has lasted too long.
        """
        # The lighthouse counts quorums: the very first replica is alone in number 1.
        if self._manager.num_participants() > 1:
            return False
        if not on_any_rank(self._manager._quorum_id > 1 or had_company(self._folder)):
            return False
        if on_any_rank(self._is_late()):
            raise NoQuorum(
                f"no other replica is at {self._lighthouse}, but others were before this one joined: "
                "they may have finished",
                hint="see their run folders; start them again, or train without them: loop.alone=true",
            )
        return True

    def _is_late(self) -> bool:
        return time.monotonic() - self._began > self._config.quorum_timeout_seconds

    def abandon(self) -> None:
        """Rewind the data, so that the rows of a step that was not taken come again."""
        self._data.load_state(self._position)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum the tensors over all replicas; after a failure their values are undefined."""
        own = torch.zeros(self._config.replicas + 1, dtype=torch.float64, device=tensors[-1].device)
        own[self._config.replica] = 1.0
        own[-1] = self._recipe
        for bucket in buckets([*tensors, own]):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM).wait()
            if self._manager.errored() is not None:
                return
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])
        self._check(own.tolist())

    def _check(self, found: list[float]) -> None:
        *there, recipes = found
        self.count = int(sum(there))
        if max(there) > 1:
            number = there.index(max(there))
            wrong, mine = f"there is another replica {number}", number == self._config.replica
            hint = "give each a loop.replica of its own"
        elif recipes != self._recipe * self.count:
            wrong, mine = "the replicas run different recipes", True
            hint = "only loop.replica may differ: titan recipe diff RUN OTHER shows what does"
        else:
            return
        if mine and not self._is_known:
            raise TitanError(wrong, hint=hint)
        self._manager.report_error(RuntimeError(wrong))  # whoever came last leaves

    def agree(self) -> bool:
        """Return whether the step counts, on every rank of this replica alike."""
        counts = self._manager.should_commit()
        self._is_known = self._is_known or counts
        return counts

    def failure(self) -> str:
        """Return why the step did not count."""
        if found := self._manager.errored():
            return str(found.original_exception).splitlines()[0]
        return self._too_few() or "another rank of this replica could not exchange its gradients"

    def _too_few(self) -> str | None:
        there = self._manager.num_participants()
        if there == 0 or there >= self._config.min_replicas:  # 0: no meeting yet
            return None
        return f"{there} of at least {self._config.min_replicas} replicas are there"

    def _state(self) -> dict[str, Any]:
        tensors, counters = shared_state(self._engine)
        return {"tensors": tensors, "engine": counters, "data": self._position}

    def _take_over(self, state: dict[str, Any]) -> None:
        take_state(self._engine, state["tensors"], state["engine"])
        self._data.load_state(state["data"])
        self._position = self._data.state
        self._taken_over = True


def lighthouse() -> str:
    """Return the address of the lighthouse, which only who starts the run can name: replicas that meet there
    train one model.

    Raises:
        EnvironmentProblem: TORCHFT_LIGHTHOUSE is not set, or is not an address.
    """
    address = os.environ.get("TORCHFT_LIGHTHOUSE", "")
    if not address.startswith("http://"):
        what = f"is {address!r}, which is not an address" if address else "is not set"
        raise EnvironmentProblem(
            f"TORCHFT_LIGHTHOUSE {what}: the loop ft needs the address of its lighthouse",
            hint="add --env TORCHFT_LIGHTHOUSE=http://HOST:PORT",
        )
    return address


def on_any_rank(value: bool) -> bool:
    """Return whether the value is true on any rank of this replica."""
    found = torch.tensor(int(value))
    if dist.get_world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def had_company(folder: Path | None) -> bool:
    """Return whether a run has taken a step together with others."""
    events = [] if folder is None else read_events(folder / "events.jsonl")
    return any(e["event"] == "step" and e["metrics"].get("replicas", 0) > 1 for e in events)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in groups of one dtype and at most `BUCKET_BYTES`, unless a single one is larger."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    yield bucket


def own_store() -> dist.TCPStore:
    """Return a store for the ranks of this replica, shared by torchft's servers and clients."""
    place: list[Any] = [None]
    store = None
    if dist.get_rank() == 0:
        store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        place = [(store.host, store.port)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(place)
    host, port = place[0]
    return store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False)


def fingerprint(folder: Path | None) -> int:
    """Return a hash of the parts of the recipe that must be the same for all replicas."""
    if folder is None:
        return 0
    with suppress(OSError):
        data = tomli.loads((folder / "recipe.lock.toml").read_text(encoding="utf-8"))
        for section in ("checkpoint", "loggers", "launcher", "metrics", "name", "description"):
            data.pop(section, None)
        data["loop"].pop("replica")
        data["loop"].pop("alone", None)
        return int(hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:8], 16)
    return 0
