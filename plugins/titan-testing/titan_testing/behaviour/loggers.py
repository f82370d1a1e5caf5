"""Loggers: a whole run told to them, with numbers that come, go, and are none."""

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


def told(logger: Any, folder: Path, first: int) -> None:
    """All that a run tells, as far as the logger listens."""

    def tell(method: str, *given: Any) -> None:
        if hasattr(logger, method):
            getattr(logger, method)(*given)

    tell("run_start", {"id": "run", "recipe": {"name": "kit", "training": {"steps": 3}}})
    for step, metrics in enumerate(STEPS, first):
        tell("step_end", step, dict(metrics))
    tell("validated", first + 1, {"validation/books/loss": 2.5}, 0.1)
    tell("checkpoint_saved", first + 2, folder / "checkpoints" / f"step-{first + 2}")
    tell("run_end", {"why": "done", "step": first + 2})


def a_run(subject: Subject) -> Iterator[str]:
    """A run, and one that goes on in the same folder, on the main rank and on another."""
    for number in range(2):
        for is_main in (True, False):
            logger = subject.target(subject.config, run_folder=subject.folder, is_main=is_main)
            told(logger, subject.folder, 1 + number * len(STEPS))
    return
    yield


CHECKS: dict[str, dict[str, Check]] = {"logger": {"run": a_run}}
