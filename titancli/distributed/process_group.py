"""The process group of a run: set up, its time limits, its flight recorder."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import EnvironmentProblem, UsageError
from titancli.files import regular
from titancli.process import Place

if TYPE_CHECKING:
    import torch


def choose_device(local_rank: int) -> torch.device:
    """Return this rank's device: its own GPU if there are any, else the CPU.

    Raises:
        EnvironmentProblem: there are GPUs, but fewer than ranks on this machine.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise EnvironmentProblem(
            f"local rank {local_rank} has no GPU: {count} {'is' if count == 1 else 'are'} visible",
            hint=f"use --nproc {count}, or make more GPUs visible with CUDA_VISIBLE_DEVICES",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def start_flight_recorder(logs: Path, entries: int) -> None:
    """Have the last collectives of this rank dumped into `logs` when one times out; 0 entries: do not.

    Set before the process group is made.
    """
    prefix = str(logs / "flight-recorder-rank-")
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE",), str(entries)),  # torch warns of the older name
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1" if entries else "0"),
    ):
        for name in names:
            os.environ[name] = value


def dump_flight_recorder(logs: Path, rank: int) -> Path | None:
    """Write what this rank's flight recorder holds, as JSON; None if it holds nothing.

    NCCL's watchdog writes its own when a collective times out; gloo has none that would.
    """
    from titancli.distributed.private import flight_record

    trace = flight_record()
    if b'"entries"' not in trace:
        return None
    path = logs / f"flight-recorder-rank-{rank}.json"
    with open(path, "wb", opener=regular) as file:
        file.write(trace)
    return path


_store: tuple[Any, Any] | None = None
"""The store of this process, and its address: one for all groups that it makes there."""


def init_process_group(
    device: torch.device,
    *,
    rank: int,
    world: int,
    restart: int = 0,
    folder: Path | None = None,
    timeout_seconds: int,
) -> None:
    """Make the default process group: NCCL for GPU tensors and gloo for CPU tensors, or gloo alone.

    One rank needs no address. Several meet in `folder`, which nobody but their user can read, and which
    torch unpickles from as it does from a TCP store, that anybody on the network can write to; without one,
    at the address in the environment that torchrun sets. A process may make one group after another; all
    ranks make as many.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_seconds)
    store: dist.Store = dist.HashStore()
    if world > 1:
        shared = _meeting_place(rank, world, timeout, folder and folder / f"start-{restart}")
        # The store outlives every group, and where it is torchrun's own it outlives a restart: without a
        # prefix of their own ranks would call those that are gone. Where it is rank 0's, each start has a new
        # one, and a node that has taken the place of another does not know how often the others were started.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
            restart = 0
        number = shared.add(f"groups-of-rank-{rank}-start-{restart}", 1)
        store = dist.PrefixStore(f"start-{restart}-group-{number}", shared)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _meeting_place(rank: int, world: int, timeout: timedelta, file: Path | None) -> Any:
    """Return the store that all ranks share: `file`, or at torchrun's address. It is reused: if rank 0 serves
    it, a second one at the same address would race with the end of the first."""
    import torch.distributed as dist

    global _store
    address = (file, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), rank, world)
    if _store is None or _store[0] != address:
        _store = None
        if file is None:
            _store = (address, next(dist.rendezvous("env://", rank, world, timeout=timeout))[0])
        else:
            _store = (address, dist.FileStore(str(file), world))
    _store[1].set_timeout(timeout)
    return _store[1]


def tighten_timeouts(seconds: int) -> None:
    """Set the time limit of collectives in every process group of this rank.

    Called by all ranks once the first step is done: until then ranks compile and load at different speeds.
    """
    import torch
    import torch.distributed as dist

    from titancli.distributed.together import Ranks

    if not dist.is_initialized():
        return
    # What was started under the old limit ends under it.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    Ranks().gather(None)
    set_timeouts(seconds)


def set_timeouts(seconds: float) -> None:
    """Set the same limit for collectives that start from now on; wait for nothing."""
    from titancli.distributed.private import groups, set_timeout

    for group in set(groups()) - set(_patient):
        set_timeout(group, timedelta(seconds=seconds))
    _limit_waits_of_pipelines()


PATIENCE = timedelta(hours=6)
"""Time limit for waiting for the slowest rank's disk, for which the limits of training are far too short.
A rank that ends is noticed at once: its connections are closed."""

_patient: weakref.WeakSet[Any] = weakref.WeakSet()
_patient_group: tuple[Any, Any] | None = None
"""The default group, as a weak reference, and the one that `patient_group` has made beside it."""


def new_patient_group() -> Any:
    """Make a gloo group of all ranks that waits for `PATIENCE`, whatever `tighten_timeouts` says; collective.
    None where one rank is alone."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    _patient.add(group)
    return group


def patient_group() -> Any:
    """Return one such group for all that the main thread waits for; collective when it is first called."""
    import torch.distributed as dist

    global _patient_group
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _patient_group is None or _patient_group[0]() is not dist.group.WORLD:
        _patient_group = (weakref.ref(dist.group.WORLD), new_patient_group())
    return _patient_group[1]


def present_timeout() -> timedelta | None:
    """Return the timeout of collectives in the default group (on the CPU if it has those); None: none."""
    import torch.distributed as dist

    from titancli.distributed.private import timeout_of

    return timeout_of(dist.group.WORLD)


@contextmanager
def groups_wait_as_the_default_one() -> Iterator[None]:
    """Let the groups that are made inside have the default group's time limit: torch gives gloo's half an
    hour."""
    from titancli.distributed.private import groups, set_timeout

    before, limit = set(groups()), present_timeout()
    yield
    if limit is None:
        return
    for group in set(groups()) - before:
        set_timeout(group, limit)
    _limit_waits_of_pipelines()


def _limit_waits_of_pipelines() -> None:
    """gloo's sends and receives keep the time limit that their group was made with, so torch's pipelines wait
    for them by the present one. (NCCL's watchdog knows the group's.)"""
    import torch

    from titancli.distributed.private import wait_in_pipelines_by

    if not torch.cuda.is_available():
        wait_in_pipelines_by(_wait)


def _wait(works: list[Any]) -> None:
    for work in works:
        wait(work)


def wait(work: Any) -> None:
    """Wait for a send or a receive, as long as the default group's collectives may take."""
    import torch

    limit = None if torch.cuda.is_available() else present_timeout()
    work.wait(limit) if limit else work.wait()


# ---------------------------------------------------------------------------------------- of an engine

_members: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines that use a process group that was made here."""
_made_here = False
_excepthook: Any = None
"""The excepthook to which torch adds the rank's number, for as long as the group lives."""


def join(device: torch.device | str | None, timeout_seconds: int) -> torch.device:
    """Make sure that there is a process group, and take a device.

    Where none is initialised: one of the ranks that torchrun has started, or of this process alone.

    Raises:
        UsageError: an engine cannot be on such a device.
        EnvironmentProblem: the other ranks cannot be met, or there are fewer GPUs than ranks.
    """
    import torch
    import torch.distributed as dist

    global _made_here, _excepthook
    _check_device(device)
    if dist.is_initialized():
        return _made_current(torch.device(device)) if device is not None else _present_device()
    place = Place.from_environment()
    chosen = torch.device(device) if device is not None else choose_device(place.local_rank)
    if chosen.type == "cuda" and chosen.index is None:
        chosen = choose_device(place.local_rank)
    _made_current(chosen)
    _excepthook = sys.excepthook
    try:
        init_process_group(
            chosen,
            rank=place.rank,
            world=place.world,
            restart=place.restart,
            timeout_seconds=timeout_seconds,
        )
    except (ValueError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"rank {place.rank} of {place.world} cannot connect to the others: {str(error).splitlines()[0]}",
            hint="start the ranks with torchrun; for a single rank, unset RANK and WORLD_SIZE",
        ) from error
    _made_here = True
    return chosen


def _check_device(device: torch.device | str | None) -> None:
    import torch

    if device is None:
        return
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"an engine cannot use the device {device!r}", hint='"cpu" or "cuda"')
    if kind == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem("torch finds no GPU", hint='use device="cpu", or omit it')
    count = torch.cuda.device_count()
    if kind == "cuda" and (torch.device(device).index or 0) >= count:
        raise EnvironmentProblem(
            f"an engine cannot use {device}: {count} GPU{' is' if count == 1 else 's are'} visible",
            hint="GPUs are numbered from cuda:0; CUDA_VISIBLE_DEVICES says which are visible",
        )


def enlist(engine: Any) -> None:
    """Record that an engine uses the process group. The last engine's `leave` ends a group created here."""
    if _made_here:
        _members.add(engine)


def leave(engine: Any = None) -> None:
    """Record that the engine, if one was built, no longer uses the process group."""
    import torch.distributed as dist

    global _made_here
    if engine is not None:
        _members.discard(engine)
    if _made_here and not _members:
        _made_here = False
        if dist.is_initialized():
            destroy()
        sys.excepthook = _excepthook


def destroy() -> None:
    """End the process group; a process may make another one after it."""
    import torch.distributed as dist

    from titancli.distributed.private import forget_meshes

    dist.destroy_process_group()
    forget_meshes()


def made_here() -> bool:
    """Return whether the process group is one that `join` made."""
    return _made_here


def _made_current(device: torch.device) -> torch.device:
    """Make the GPU the current one and return it: events, streams and collectives that name no GPU use the
    current one, and would wait for another GPU than the one that computes."""
    import torch

    if device.type != "cuda":
        return device
    if device.index is None:
        return _present_device()
    torch.cuda.set_device(device)
    return device


def _present_device() -> torch.device:
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
