"""A pool of processes for multi-rank tests: ranks start once for each file.

`ranks(n, function, *args)` runs a module-level function on n gloo ranks, each with a fresh process group,
and returns the results by rank. A rank that raises fails the test with its traceback; one that hangs, with a
time-out.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests import choice

TIMEOUT = 120.0
GROUP_SECONDS = 60
"""The time limit of the process group that ranks start with."""
ROOT = Path(__file__).parent.parent.parent


class Packer(pickle.Pickler):
    """Tensors by value: in shared memory each would hold a file open, and a shell may allow 1,024."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        numbers = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return unpacked, (bytearray(numbers), value.dtype, value.shape, value.requires_grad)


def packed(value: Any) -> bytes:
    file = io.BytesIO()
    Packer(file).dump(value)
    return file.getvalue()


def unpacked(numbers: bytearray, dtype: Any, shape: Any, requires_grad: bool) -> Any:
    import torch

    whole = torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return whole.reshape(shape).requires_grad_(requires_grad)


class Died(AssertionError):
    """A process of the pool ended in the middle of a case."""


class Stderr:
    """What a process writes to its stderr: in a file, for a pipe that nobody reads would stop it."""

    def __init__(self) -> None:
        self.file, self._seen = tempfile.TemporaryFile("ab+"), 0  # noqa: SIM115 - open as long as the process

    def read(self) -> bytes:
        """Return what is new. The process shares the file's position, which is therefore not used."""
        size = os.fstat(self.file.fileno()).st_size
        new = os.pread(self.file.fileno(), size - self._seen, self._seen)
        self._seen += len(new)
        return new


class Ranks:
    def __init__(self) -> None:
        self._workers: list[tuple[subprocess.Popen[bytes], Connection[Any, Any]]] = []
        self._stderrs: list[Stderr] = []

    def _start(self, count: int) -> None:
        for rank in range(len(self._workers), count):
            ours, theirs = Pipe()
            stderr = Stderr()
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.ranks", str(theirs.fileno()), str(rank)],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stderr=stderr.file,
                env={**os.environ, "OMP_NUM_THREADS": "1", choice.TEST: ""},
            )
            theirs.close()
            ours.send(sys.path)  # where the modules of the functions are
            self._workers.append((process, ours))
            self._stderrs.append(stderr)

    def __call__(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        from tests.ranks.refused import skip_where_refused  # ranks import this file, and not pytest

        skip_where_refused(*args)
        try:
            return self._run(world, function, *args)
        except Died as died:
            # Where a peer is gone before it was accepted, gloo's own thread throws, and nobody can catch it:
            # https://github.com/pytorch/pytorch/issues/188266
            if "gloo/transport" not in str(died):
                raise
            warnings.warn(f"the case is run again: {died}", stacklevel=2)
            return self._run(world, function, *args)

    def _run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        self._start(world)
        test = os.environ.get(choice.TEST, "")
        with tempfile.TemporaryDirectory() as folder:
            for _, connection in self._workers[:world]:
                connection.send_bytes(packed((world, os.path.join(folder, "store"), function, args, test)))
            outcomes = []
            for rank, (process, connection) in enumerate(self._workers[:world]):
                if not connection.poll(TIMEOUT):
                    self.close()
                    raise AssertionError(f"rank {rank} of {world} gave no answer in {TIMEOUT:.0f} s")
                try:
                    outcomes.append(pickle.loads(connection.recv_bytes()))
                except EOFError:
                    code, said = process.wait(), self._forward()[rank]
                    self.close()
                    raise Died(f"rank {rank} of {world} died with {code}: {said[-1000:]}") from None
        self._forward()
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failures:
            # A group that could not be made leaves torch's count of groups, and with it the next one's name,
            # another on each rank: every case after it would wait for the others in vain.
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for _, value in outcomes]

    def _forward(self) -> list[str]:
        """Hand on what ranks wrote to stderr in this case, where pytest captures it, and return it."""
        said = [stderr.read() for stderr in self._stderrs]
        os.write(2, b"".join(said))
        return [text.decode(errors="replace") for text in said]

    def close(self) -> None:
        self._forward()
        for process, connection in self._workers:
            connection.close()  # at which it ends by itself, and is measured whole; else sooner:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20 if os.environ.get(choice.START) else 0)
            process.terminate()
            process.wait()
        self._workers.clear()
        self._stderrs.clear()
