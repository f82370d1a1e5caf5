"""A pool of processes for multi-rank tests: importing torch costs seconds, so ranks start once per session.

`ranks(n, function, *args)` runs a module-level function on n gloo ranks, each with a fresh process group,
and returns the results by rank. A rank that raises fails the test with its traceback; one that hangs, with a
time-out.
"""

from __future__ import annotations

import datetime
import gc
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
ROOT = Path(__file__).parent.parent.parent


def serve(number: int, rank: int) -> None:
    """Run cases that come over a pipe until it closes."""
    import torch
    import torch.distributed as dist

    from titancli.parallel.mesh import forget_meshes

    connection: Connection[Any, Any] = Connection(number)
    torch.set_num_threads(1)
    while True:
        try:
            world, store, function, args = connection.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
        )
        gc.freeze()  # what is there by now is no garbage, and need not be looked through
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=60),
            )
            result = (True, function(*args))
        except BaseException:
            result = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_meshes()
            # Engines lie in cycles, and with them live their groups, each with three threads that wake up
            # over and over: after some dozen cases they would take more time than the cases do.
            gc.collect()
        connection.send(result)


class Ranks:
    def __init__(self) -> None:
        self._workers: list[tuple[subprocess.Popen[bytes], Connection[Any, Any]]] = []

    def _start(self, count: int) -> None:
        for rank in range(len(self._workers), count):
            ours, theirs = Pipe()
            program = f"from tests.ranks import serve; serve({theirs.fileno()}, {rank})"
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            theirs.close()
            self._workers.append((process, ours))

    def __call__(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
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
