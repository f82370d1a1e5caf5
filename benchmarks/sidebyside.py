"""Variants of one thing, measured side by side on a machine that may be noisy.

Each variant is a process of its own that waits between its steps. They take turns, one step each, every other
round in reverse (A B C C B A …), so that what slows the machine down slows all of them. Every process has one
thread.

A ratio is taken within each round. But two processes of one program differ too, by where the system has put
their memory, for as long as they live, and no number of rounds shows it: `starts` starts all of them anew.
The median of a start's rounds is one observation, the median of the starts is the ratio, and `Ratio` has its
interval.
`instructions` counts what noise does not touch.

A script that uses this is its own worker: `python script.py --worker NAME` calls the function of that name,
which prepares everything, gives its step to `serve`, and may return numbers of its own from each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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


def measure(
    names: Sequence[str], *, rounds: int, warmup: int = 1, starts: int = 1
) -> dict[str, list[Numbers]]:
    """Run variants side by side: for each, what its steps cost, round by round and start by start.

    Args:
        names: the variants.
        rounds: measured steps of each after a start.
        warmup: steps before them.
        starts: times that all are started anew; each step has the number of its own as "start".
    """
    results: dict[str, list[Numbers]] = {name: [] for name in names}
    for start in range(starts):
        variants = []
        for name in names:  # one after the other: starting is not measured, and two cores are soon full
            variants.append(Variant(name))
            variants[-1].ready()
        for _ in range(warmup):
            for variant in variants:
                variant.step()
        for number in range(rounds):
            for variant in variants if number % 2 == 0 else reversed(variants):
                results[variant.name].append({**variant.step(), "start": start})
        for variant in variants:
            variant.close()
    return results


def median(steps: list[Numbers], key: str) -> float:
    return statistics.median(step[key] for step in steps)


class Ratio(NamedTuple):
    """The median of observed ratios, and an interval that holds the true one in at least 95 of 100 cases."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1: only then is one of the two faster."""
        return self.low > 1 or self.high < 1

    def __format__(self, spec: str) -> str:
        """Return all three, each in the format of `spec`, and what can be concluded."""
        if math.isnan(self.low):
            return f"{self.value:{spec}} (too few for an interval)"
        between = f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"
        return between if self.differs else f"{between}: no difference"


def ratio(ours: list[Numbers], theirs: list[Numbers], key: str) -> Ratio:
    """Return ours / theirs, paired within each round.

    An observation is the median of a start's rounds, or one round where all are of one start. The interval
    lies between two of the observations, by the binomial distribution alone (the sign test), so nothing is
    assumed about how they are distributed; fewer than six have none.
    """
    by_start: dict[float, list[float]] = {}
    for a, b in zip(ours, theirs, strict=True):
        by_start.setdefault(a["start"], []).append(a[key] / b[key])
    alone = next(iter(by_start.values())) if len(by_start) == 1 else None
    found = sorted(alone or map(statistics.median, by_start.values()))
    below, left_out = 0.5 ** len(found), 0
    while below <= 0.025:  # the chance that the true one lies below the observation at `left_out`
        left_out += 1
        below += math.comb(len(found), left_out) * 0.5 ** len(found)
    low, high = (found[left_out - 1], found[-left_out]) if left_out else (math.nan, math.nan)
    return Ratio(statistics.median(found), low, high)


def instructions(name: str, *, steps: int = 8, warmup: int = 2) -> float:
    """Return the instructions of one step of a variant: the processor's count where `perf` has one (few
    virtual machines give it), else that of valgrind's callgrind, which has AVX2 at most and takes 50 times as
    long. The count of a process with fewer steps is subtracted.

    Raises:
        SystemExit: neither is there, or the variant failed.
    """
    few, more = (_instructions(name, count) for count in (warmup, warmup + steps))
    return (more - few) / steps


def counter() -> str | None:
    """Return what `instructions` counts with: "perf", "callgrind", or None."""
    if shutil.which("perf"):
        asked = subprocess.run(
            ["perf", "stat", "-x,", "-e", "instructions:u", "true"], capture_output=True, text=True
        )
        if re.match(r"\d", asked.stderr):
            return "perf"
    return "callgrind" if shutil.which("valgrind") else None


def _instructions(name: str, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "count"
        count_with = {
            "perf": ["perf", "stat", "-x,", "-e", "instructions:u", "-o", str(counted)],
            "callgrind": ["valgrind", "--tool=callgrind", f"--callgrind-out-file={counted}"],
        }
        if (by := counter()) is None:
            raise SystemExit("instructions cannot be counted: neither perf's counter nor valgrind is here")
        done = subprocess.run(
            [*count_with[by], sys.executable, sys.argv[0], "--worker", name],
            input="go\n" * steps,
            capture_output=True,
            text=True,
            env={**os.environ, **ONE_THREAD, "PYTHONHASHSEED": "0"},
        )
        found = re.search(r"^(?:totals: (\d+)|(\d+),)", counted.read_text() if counted.exists() else "", re.M)
        if done.returncode or found is None or len(done.stdout.splitlines()) != steps + 1:
            raise SystemExit(f"{name} failed under {by}:\n{done.stderr[-3000:]}")
        return float(found[1] or found[2])


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
