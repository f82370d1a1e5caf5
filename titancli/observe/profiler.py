"""`[profiling]`: traces of torch's profiler and snapshots of the CUDA allocator, on a schedule or when asked.

Nothing here changes what is computed, and nothing that fails here ends a run. Which steps are recorded
follows from the step, and from a request (`titancli.observe.profile_request`) that the ranks have agreed on;
no rank waits for another.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import causes
from titancli.observe.phases import phases
from titancli.observe.profile_request import Requests, Wish

if TYPE_CHECKING:
    import torch

    from titancli.recipe.schema import Profiling

logger = logging.getLogger(__name__)

MAX_EVENTS = 100_000
"""Allocations and frees that a memory snapshot goes back."""
VIEWERS = "open them in https://ui.perfetto.dev or chrome://tracing"
MEMORY_VIEWER = "open them in https://docs.pytorch.org/memory_viz"
NO_SNAPSHOTS = "there are no memory snapshots on a CPU, only of the CUDA allocator"


@dataclass
class Window:
    """Steps in a row that are recorded, after some of warm-up. The same on every rank."""

    first: int
    last: int
    asked: Wish | None = None
    """The request that it is for; None: the schedule's."""
    recorder: Any = None
    """torch's profiler, on a rank that records."""
    error: str | None = None


class Profiler:
    """One rank's. A hook of the run (`titancli.protocols.RunHook`)."""

    def __init__(
        self,
        section: Profiling,
        folder: Path,
        *,
        rank: int,
        world: int,
        device: torch.device,
        total_steps: int,
    ) -> None:
        self._section, self._folder, self._rank, self._device = section, folder, rank, device
        self._total = total_steps
        self._ranks = section.ranks or list(range(world))
        self._mine = rank in self._ranks
        self._requests = Requests(folder) if rank == 0 else None
        self._traces = section.enable_profiling
        self._snapshots = section.enable_memory_snapshot
        self._window: Window | None = None
        self._step = 0

    # ------------------------------------------------------------------------------------- as a hook

    def poll(self) -> int:
        """Return the request to rank 0, for the ranks to agree on: a `Wish` as a number, 0 for none."""
        if self._requests is None or self._window is not None:
            return 0
        wish = self._requests.wish()
        return 0 if wish is None else int(wish)

    def before_step(self, done: int, agreed: int) -> None:
        """Another step begins, after `done` ones. `agreed` is what the ranks have agreed on."""
        self._step = done
        if self._window is None:
            self._window = self._planned(done, Wish.of(agreed))
            if self._window is not None:
                self._open(self._window, done)

    def step_done(self, done: int) -> None:
        """Advance the recording by a step."""
        self._step = done
        window = self._window
        if window is not None:
            if window.recorder is not None:
                self._guarded(window, window.recorder.step)
            if done >= window.last:
                self._close(window)
        if self._snapshots and self._mine and done % self._section.profile_freq == 0:
            self._snapshot(f"step-{done}")

    def run_start(self, done: int) -> None:
        """Begin to record memory, if the recipe asks for snapshots."""
        if self._snapshots and self._device.type != "cuda":
            self._snapshots = False
            if self._rank == 0:
                logger.warning("profiling.enable_memory_snapshot: %s", NO_SNAPSHOTS)
        if self._snapshots and self._mine:
            _record_memory(True)

    def close(self, error: BaseException | None) -> None:
        """End the recording after the loop, or after the error that ended it."""
        if self._window is not None:  # an incomplete one
            self._window.last = self._step
            self._close(self._window)
        if self._snapshots and self._mine:
            if error is not None and is_out_of_memory(error):
                self._snapshot(f"step-{self._step + 1}-out-of-memory")
            _record_memory(False)

    # ------------------------------------------------------------------------------------------- windows

    def _planned(self, done: int, wish: Wish | None) -> Window | None:
        """Return the steps to record that begin now, warm-up first; those of a schedule end at a multiple of
        `profile_freq`."""
        warmup, active = self._section.profiler_warmup, self._section.profiler_active
        if wish is not None:
            last = min(done + warmup + wish.steps, self._total)
            return Window(max(done + 1, last - wish.steps + 1), last, wish)
        left = self._section.profile_freq - done % self._section.profile_freq
        if not self._traces or left > warmup + active:
            return None
        last = done + left
        return Window(max(done + 1, last - active + 1), last) if last <= self._total else None

    def _open(self, window: Window, done: int) -> None:
        if window.asked is not None and self._requests is not None:
            self._requests.take(first_step=window.first, last_step=window.last)
        if not self._mine:
            return
        if window.asked is not None and window.asked.memory and not self._snapshots:
            self._guarded(window, lambda: _record_memory(self._device.type == "cuda"))

        def start() -> None:
            from torch.profiler import ProfilerActivity, profile, schedule

            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            plan = schedule(
                wait=0, warmup=window.first - done - 1, active=window.last - window.first + 1, repeat=1
            )
            window.recorder = profile(
                activities=activities,
                schedule=plan,
                record_shapes=True,
                on_trace_ready=lambda recorder: self._write(window, recorder),
            )
            window.recorder.start()
            phases.traced = True

        self._guarded(window, start)

    def _close(self, window: Window) -> None:
        self._window, phases.traced = None, False
        if window.recorder is not None:
            self._guarded(window, window.recorder.stop)
        memory = window.asked is not None and window.asked.memory
        if memory and self._device.type == "cuda" and self._mine:
            self._snapshot(f"step-{window.last}")
            if not self._snapshots:
                _record_memory(False)
        if window.error is not None:
            self._traces = False
            logger.warning(
                "no trace of steps %d to %d: %s; the run continues without further ones",
                window.first,
                window.last,
                window.error,
            )
        elif self._rank == 0 and window.last >= window.first:
            steps = f"step {window.last}" if window.first == window.last else f"steps {_span(window)}"
            logger.info("traces of %s are in %s: %s", steps, self._trace_folder(window), VIEWERS)
        if window.asked is not None and self._requests is not None:
            self._answer(self._requests, window, memory)

    def _answer(self, requests: Requests, window: Window, memory: bool) -> None:
        known = {"first_step": window.first, "last_step": window.last, "ranks": self._ranks}
        if window.error is not None or window.last < window.first:
            reason = window.error or "the run ended during the warm-up"
            requests.answer("failed", reason=reason, **known)
            return
        taken = memory and self._device.type == "cuda"
        snapshots = self._snapshot_folder(f"step-{window.last}") if taken else None
        requests.answer(
            "done",
            traces=str(self._trace_folder(window)),
            snapshots=None if snapshots is None else str(snapshots),
            **known,
        )

    def _write(self, window: Window, recorder: Any) -> None:
        if window.last < window.first or window.error:  # the run was stopped during the warm-up, or it failed
            return
        folder = self._trace_folder(window)
        folder.mkdir(parents=True, exist_ok=True)
        hidden = folder / f".rank-{self._rank}.json.gz"
        recorder.export_chrome_trace(str(hidden))
        os.replace(hidden, folder / f"rank-{self._rank}.json.gz")

    def _trace_folder(self, window: Window) -> Path:
        return self._folder / self._section.save_traces_folder / f"step-{window.last}"

    def _guarded(self, window: Window, action: Callable[[], Any]) -> None:
        """Run code whose failure must not end the run; the window is then over on this rank."""
        try:
            action()
        except Exception as error:
            window.error = window.error or f"{type(error).__name__}: {error}".partition("\n")[0]
            recorder, window.recorder, phases.traced = window.recorder, None, False
            if recorder is not None:
                with suppress(Exception):  # it failed already; what it records must not go on growing
                    recorder.stop()

    # ------------------------------------------------------------------------------------------ snapshots

    def _snapshot_folder(self, name: str) -> Path:
        return self._folder / self._section.save_memory_snapshot_folder / name

    def _snapshot(self, name: str) -> None:
        import torch

        folder = self._snapshot_folder(name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(folder / f"rank-{self._rank}.pickle"))
        except Exception as error:
            self._snapshots = False
            logger.warning("no memory snapshot in %s: %s; the run continues without", folder, error)
            return
        if self._rank == 0:
            logger.info("memory snapshots are in %s: %s", folder, MEMORY_VIEWER)


def _record_memory(wanted: bool) -> None:
    """Have the CUDA allocator keep its history, or not."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history("all" if wanted else None, max_entries=MAX_EVENTS)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, means that a device or the machine is out of memory."""
    import torch

    return any(
        isinstance(cause, torch.OutOfMemoryError | MemoryError)
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or "DefaultCPUAllocator: " in str(cause)
        for cause in causes(error)
    )


def _span(window: Window) -> str:
    return f"{window.first} to {window.last}"
