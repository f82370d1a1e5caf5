"""Compare the CPU time of something with that of other work in the same process.

A test that asserts seconds fails on a slower machine. Both of these get slower together.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object], times: int = 1) -> float:
    """Return the least CPU time of several calls, in seconds."""
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def unit() -> float:
    """Return the CPU-seconds of parsing argparse.py: about 0.02 on a processor of 2023."""
    source = inspect.getsource(argparse)
    return cpu_seconds(lambda: ast.parse(source), times=5)
