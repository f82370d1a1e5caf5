"""Hundreds of steps with all that a run does on the way: what it holds does not grow with the steps."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

from tests.run.conftest import Finished

HEAP = """\
import gc, tracemalloc
from titancli import component, hookimpl

@component("callback", "heap", target="heap:Heap")
class Config:
    \"\"\"Records what Python's objects take after some steps.\"\"\"
    at: list[int]
    \"\"\"These steps.\"\"\"

class Heap:
    def __init__(self, config, *, engine, run):
        self.at = config.at
        tracemalloc.start()

    def step_applied(self, step):
        if step.number in self.at:
            gc.collect()
            with open("heap.txt", "a") as file:
                print(tracemalloc.get_traced_memory()[0], file=file)
        return {}

@hookimpl
def titan_components():
    return [Config]
"""
MOST = 1000
"""Bytes per step. A number and a name kept of each step would be about 100."""


def test_python_objects_do_not_grow(train: Callable[..., Finished], here: Path) -> None:
    (here / "heap.py").write_text(HEAP)
    (here / "remote").mkdir()
    held = "validation.datasets.held={type='text_files',paths=['text.txt']}"
    try:
        done = train(
            *("tiny.toml", "--run-dir", "r", "-p", "./heap.py", "training.steps=120"),
            *(
                "checkpoint.interval=10",
                "checkpoint.keep_latest_k=2",
                f"checkpoint.remote=file://{here}/remote",
            ),
            *("validation.freq=10", "validation.steps=1", held),
            "callbacks=[{type='heap',at=[59,119]},{type='best'}]",
        )
    finally:
        tracemalloc.stop()
    assert done.code == 0, done.err
    early, late = map(int, (here / "heap.txt").read_text().split())
    assert (late - early) / 60 < MOST
