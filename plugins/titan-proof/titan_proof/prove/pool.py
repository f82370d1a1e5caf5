"""Ranks for many cases: processes that start once, and import torch once. They are restarted if one of
them dies, hangs, or leaves the others in the middle of an exchange. Torch-free."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from titancli.process import as_child, loopback_only

SECONDS = 180.0
"""Time limit of the ranks for one case."""
GRACE = 3.0
"""How long to wait for the other ranks after one has failed: they may be in an exchange with it."""


class Pool:
    """Ranks on this machine. A context manager: the ranks end when it exits.

    Args:
        folder: for logs, and for files that the ranks exchange.
        files: plugins in single files.
        blocked: plugins that are disabled.
        seconds: time limit of the ranks for one case.
        device: `cpu`, or `cuda`: rank N has GPU N.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[Path] = (),
        blocked: Sequence[str] = (),
        seconds: float = SECONDS,
        *,
        device: str = "cpu",
    ) -> None:
        self.folder, self.files, self.blocked, self.seconds = folder, list(files), list(blocked), seconds
        self.device = device
        self.processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._jobs = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, ranks: int, job: dict[str, Any]) -> dict[str, Any]:
        """Give ranks a job, and return the answer of rank 0, or of the first rank that failed.

        An answer has a `status`, which is `failed` if a rank raised, died or hung.
        """
        if any(process.poll() is not None for process in self.processes):
            self.close()  # one died while idle
        self._start(ranks)
        self._jobs += 1
        job = {
            **job,
            "world": ranks,
            "device": self.device,
            "store": str(self.folder / f"store-{self._jobs}"),
        }
        for pipe in self._pipes[:ranks]:
            pipe.send_bytes(json.dumps(job).encode())
        answers = self._answers(ranks)
        wrong = [answer for answer in answers if answer["status"] in ("failed", "refused")]
        # An error that a rank raises because another one ended does not show the cause.
        wrong.sort(key=lambda answer: (answer.get("echo", False), answer["rank"]))
        return wrong[0] if wrong else answers[0]

    def _answers(self, ranks: int) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + self.seconds
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        stuck = False
        while waiting and not stuck:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            stuck = not ready
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = json.loads(pipe.recv_bytes()) | {"rank": rank}
                except (EOFError, OSError):
                    answers[rank] = {"rank": rank, "status": "failed", "reason": self._end_of(rank)}
                if answers[rank]["status"] != "right" and waiting:
                    until = min(until, time.monotonic() + GRACE)
        broken = any(answer["status"] == "failed" for answer in answers.values())
        if waiting and not broken:
            silent = sorted(waiting.values())
            who = f"rank{'s' * (len(silent) > 1)} {' and '.join(map(str, silent))}"
            reason = f"{who} did not answer within {self.seconds:.0f} s"
            answers[silent[0]] = {"rank": silent[0], "status": "failed", "reason": reason}
        if waiting or broken:
            self.close()
        return [answers[rank] for rank in sorted(answers)]

    def _end_of(self, rank: int) -> str:
        code = self.processes[rank].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        log = (self.folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()[-3:]
        return "\n".join([f"rank {rank} {how}", *log])

    def _start(self, count: int) -> None:
        for rank in range(len(self.processes), count):
            ours, theirs = Pipe()
            words = [str(theirs.fileno()), str(rank)]
            words += [f"-p{file}" for file in self.files] + [f"-pno:{name}" for name in self.blocked]
            environment = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", **loopback_only(), **as_child()}
            if self.device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            with open(self.folder / f"rank-{rank}.log", "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "titan_proof.prove.rank", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **environment},
                )
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """End all ranks; the next `ask` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes.clear()
        self._pipes.clear()
