"""A pytest plugin that notes what each test costs, and tells coverage.py which one runs."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import choice

FOLDER = "TITAN_TESTS_COSTS"
"""The environment variable with the folder into which each worker writes."""
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU-seconds of this process and of all below it, those that have ended included."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = process.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        number = int(process.parent.name)
        parents[number] = int(fields[1])
        seconds[number] = sum(map(int, fields[11:15])) / TICKS
    for number in parents:
        above = parents[number]
        while above not in (0, 1, os.getpid()):
            above = parents.get(above, 0)
        total += seconds[number] if above == os.getpid() else 0.0
    return total


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before, began = cpu_seconds(), time.perf_counter()
    choice.now(item.nodeid)
    yield
    choice.now("")
    slow = item.get_closest_marker("slow") is not None
    cpu, wall = cpu_seconds() - before, time.perf_counter() - began
    _note({"test": item.nodeid, "cpu": cpu, "wall": wall, "slow": slow})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and report.outcome != "passed":
        _note({"test": report.nodeid, "outcome": report.outcome})


def _note(row: Mapping[str, Any]) -> None:
    with open(Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
