"""A pool of processes for multi-rank tests: ranks start once for each file.

`ranks(n, function, *args)` runs a module-level function on n gloo ranks, each with a fresh process group,
and returns the results by rank. A rank that raises fails the test with its traceback; one that hangs, with a
time-out.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
ROOT = Path(__file__).parent.parent.parent


class Ranks:
    def __init__(self) -> None:
        self._workers: list[tuple[subprocess.Popen[bytes], Connection[Any, Any]]] = []

    def _start(self, count: int) -> None:
        for rank in range(len(self._workers), count):
            ours, theirs = Pipe()
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.ranks", str(theirs.fileno()), str(rank)],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            theirs.close()
            ours.send_bytes(bytes(multiprocessing.current_process().authkey))
            ours.send(sys.path)  # where the modules of the functions are
            self._workers.append((process, ours))

    def __call__(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        from tests.ranks.refused import skip_where_refused  # ranks import this file, and not pytest

        skip_where_refused(*args)
        self._start(world)
        with tempfile.TemporaryDirectory() as folder:
            for _, connection in self._workers[:world]:
                connection.send((world, os.path.join(folder, "store"), function, args))
            outcomes = []
            for rank, (process, connection) in enumerate(self._workers[:world]):
                if not connection.poll(TIMEOUT):
                    self.close()
                    raise AssertionError(f"rank {rank} of {world} gave no answer in {TIMEOUT:.0f} s")
                try:
                    outcomes.append(connection.recv())
                except EOFError:
                    code = process.wait()
                    self.close()
                    raise AssertionError(f"rank {rank} of {world} died with {code}") from None
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failures:
            # A group that could not be made leaves torch's count of groups, and with it the next one's name,
            # another on each rank: every case after it would wait for the others in vain.
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for _, value in outcomes]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.terminate()
            process.wait()
        self._workers.clear()
