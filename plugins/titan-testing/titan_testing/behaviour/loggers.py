"""Loggers: a whole run, with metrics that appear, disappear, and are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_testing.behaviour.subject import Check, Subject

STEPS: list[dict[str, float]] = [
    {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0},
    {"loss": float("nan"), "lr": 0.1},
    {"loss": float("inf"), "lr": 0.1, "later/than_the_first": 3},
    {},
]


def call_all(logger: Any, folder: Path, first: int) -> None:
    """Make all calls of a run that the logger implements."""

    def call(method: str, *given: Any) -> None:
        if hasattr(logger, method):
            getattr(logger, method)(*given)

    call("run_start", {"id": "run", "recipe": {"name": "kit", "training": {"steps": 3}}})
    for step, metrics in enumerate(STEPS, first):
        call("step_end", step, dict(metrics))
    call("validated", first + 1, {"validation/books/loss": 2.5}, 0.1)
    call("checkpoint_saved", first + 2, folder / "checkpoints" / f"step-{first + 2}")
    call("run_end", {"why": "done", "step": first + 2})


def a_run(subject: Subject) -> Iterator[str]:
    """Check that a logger accepts a run and a resumed one in the same folder, on the main rank and
    another."""
    for number in range(2):
        for is_main in (True, False):
            logger = subject.build(run_folder=subject.folder, is_main=is_main)
            call_all(logger, subject.folder, 1 + number * len(STEPS))
    return
    yield


CHECKS: dict[str, dict[str, Check]] = {"logger": {"run": a_run}}
