"""Variants of one thing, measured side by side on a machine that may be noisy.

Each variant is a process of its own, started afresh, that waits between its steps. They take turns, one step
each (A B C A B C …), so that what slows the machine down slows all of them; the medians over the rounds
count, and a ratio is the median of the ratios within each round. Every process has one thread.

A script that uses this is its own worker: `python script.py --worker NAME` calls the function of that name,
which prepares everything, gives its step to `serve`, and may return numbers of its own from each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Numbers = dict[str, float]

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


# --------------------------------------------------------------------------------------------- the worker


def serve(step: Callable[[], Numbers | None]) -> None:
    """Do one step for each line on stdin, and answer with what it cost."""
    before = _rss_now()
    answer({})
    for _ in sys.stdin:
        with Cost() as cost:
            numbers = step() or {}
        answer({**cost.numbers, **numbers, "memory": peak_rss() - before, "rss": peak_rss()})


def turn(numbers: Numbers) -> None:
    """Answer what a step cost, and wait for the next turn. For steps of somebody else, a run or a trainer,
    who calls this after each; after the last one nothing waits."""
    answer(numbers)
    sys.stdin.readline()


class Cost:
    """CPU-seconds of this process, all threads, and seconds on the clock."""

    def __enter__(self) -> Cost:
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.numbers = {"cpu": time.process_time() - self._cpu, "wall": time.perf_counter() - self._wall}


def answer(numbers: Numbers) -> None:
    """One line on the true stdout; what libraries print goes to stderr."""
    sys.__stdout__.write(json.dumps(numbers) + "\n")
    sys.__stdout__.flush()


def peak_rss() -> float:
    """The most bytes this process has ever had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def _rss_now() -> float:
    """Bytes resident now; the peak so far where /proc is missing."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_rss()


def run_worker(workers: Mapping[str, Callable[[], None]]) -> bool:
    """Be the worker that the command line names, if it names one."""
    if len(sys.argv) < 3 or sys.argv[1] != "--worker":
        return False
    sys.stdout = sys.stderr
    workers[sys.argv[2]]()
    return True


# --------------------------------------------------------------------------------------------- the parent


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """A command line whose help is the script's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=documentation, formatter_class=raw)


class Variant:
    """One worker process."""

    def __init__(self, name: str, arguments: Sequence[str] = ()) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--worker", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if os.environ.get("QUIET", "1") == "1" else None,
            text=True,
            env={**os.environ, **ONE_THREAD},
        )

    def ready(self) -> None:
        self._read()

    def step(self) -> Numbers:
        self._process.stdin.write("go\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        return self._read()

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> Numbers:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            _, errors = self._process.communicate()
            raise SystemExit(f"{self.name} failed:\n{(errors or '')[-3000:]}")
        return json.loads(line)


def measure(names: Sequence[str], *, rounds: int, warmup: int = 1) -> dict[str, list[Numbers]]:
    """Run variants side by side: for each, what its steps cost, round by round, after `warmup` more."""
    variants = []
    for name in names:  # one after the other: starting is not measured, and two cores are soon full
        variants.append(Variant(name))
        variants[-1].ready()
    for _ in range(warmup):
        for variant in variants:
            variant.step()
    results: dict[str, list[Numbers]] = {name: [] for name in names}
    for _ in range(rounds):
        for variant in variants:
            results[variant.name].append(variant.step())
    for variant in variants:
        variant.close()
    return results


def median(steps: list[Numbers], key: str) -> float:
    return statistics.median(step[key] for step in steps)


def ratio(ours: list[Numbers], theirs: list[Numbers], key: str) -> float:
    """The median over the rounds of ours / theirs."""
    return statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))


def machine(*packages: str) -> str:
    """One line: date, processor, versions."""
    from importlib.metadata import PackageNotFoundError, version

    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} absent")
    python = f"Python {platform.python_version()}"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return f"{date}, {_processor()}, {os.cpu_count()} cores; {', '.join([python, *versions])}"


def _processor() -> str:
    with contextlib.suppress(OSError):  # Linux alone has it
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
