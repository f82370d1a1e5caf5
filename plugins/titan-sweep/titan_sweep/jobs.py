"""Several `titan train` at once, each in its own process group. Torch-free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan_sweep.sweep import Job
from titancli.errors import EXIT_OK, EnvironmentProblem
from titancli.files import regular
from titancli.launchers.devices import visible_gpu_names
from titancli.process import as_child
from titancli.signals import heeded, say

POLL_SECONDS = 0.1
STOPPED_IN_GOOD_ORDER = (75, 130)


def shares(jobs: int, nproc: int | str | None) -> list[dict[str, str]]:
    """Return the environment of each of `jobs` concurrent jobs: its GPUs, or its share of the cores.

    Raises:
        EnvironmentProblem: the number of GPUs is not divisible by `jobs`.
    """
    if jobs == 1:
        return [{}]
    if gpus := visible_gpu_names():
        if len(gpus) % jobs:
            fit = [str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0]
            raise EnvironmentProblem(
                f"{len(gpus)} visible GPU{'s' if len(gpus) > 1 else ''} cannot be divided by --jobs {jobs}",
                hint=f"use --jobs {' or '.join(fit)}",
            )
        each = len(gpus) // jobs
        return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[n * each : (n + 1) * each])} for n in range(jobs)]
    if "OMP_NUM_THREADS" in os.environ:
        return [{}] * jobs
    ranks = jobs * (nproc if isinstance(nproc, int) else 1)
    return [{"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}] * jobs


class Jobs:
    """Runs jobs in the given order, one per share at a time, and retries a failed job once."""

    def __init__(
        self,
        command: Callable[[Job], Sequence[str]],
        shares: Sequence[Mapping[str, str]],
        *,
        report: Callable[[Job, int | None], None],
    ) -> None:
        """Create the runner; `report` is called with a job and None when it starts, and its exit code when
        it ends."""
        self._command = command
        self._free = deque(shares)
        self._report = report
        self._running: dict[subprocess.Popen[bytes], tuple[Job, Mapping[str, str]]] = {}
        self._waiting: list[int] = []
        """Signals that were not forwarded yet."""
        self.received: list[int] = []
        self.codes: dict[str, int] = {}
        """Exit code of each started job, by name."""

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs; after a signal no more are started, and the signal is forwarded to the running
        ones."""
        queue = deque(job for job in jobs if job.tries)
        tried: dict[str, int] = {}
        before: dict[int, Any] = {
            number: signal.signal(number, lambda n, frame: self._waiting.append(n)) for number in heeded()
        }
        try:
            while self._running or (queue and not self.received):
                self._hand_on()
                while queue and self._free and not self.received:
                    job = queue.popleft()
                    tried[job.name] = tried.get(job.name, 0) + 1
                    self._start(job)
                for job in self._ended():
                    failed = self.codes[job.name] not in (EXIT_OK, *STOPPED_IN_GOOD_ORDER)
                    if failed and not self.received and tried[job.name] < job.tries:
                        queue.append(job)
                time.sleep(POLL_SECONDS)
        finally:  # in any case, stop the remaining processes, which saves their state
            for process in self._running:
                process.terminate()
            for process in self._running:
                process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, job: Job) -> None:
        share = self._free.popleft()
        with open(job.log, "ab", opener=regular) as log:
            process = subprocess.Popen(
                self._command(job),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONSAFEPATH": "1", **share, **as_child()},
                start_new_session=True,  # Ctrl-C at the terminal reaches it through this process, once
            )
        self._running[process] = job, share
        self._report(job, None)

    def _ended(self) -> list[Job]:
        ended = []
        for process in [process for process in self._running if process.poll() is not None]:
            job, share = self._running.pop(process)
            self._free.append(share)
            self.codes[job.name] = process.returncode
            ended.append(job)
            self._report(job, process.returncode)
        return ended

    def _hand_on(self) -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            again = number == signal.SIGINT and number in self.received
            self.received.append(number)
            more = "; press Ctrl-C again to exit now" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            say(
                "\ninterrupted again: exiting now"
                if again
                else f"\n{name}: stopping all runs after their step and saving checkpoints{more}"
            )
            for process in self._running:
                process.send_signal(number)


def titan(*arguments: str) -> list[str]:
    """Return the command line of a `titan` that stops when this process dies."""
    return [sys.executable, "-m", "titan_sweep.job", *arguments]
