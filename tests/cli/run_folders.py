"""Run folders written by hand, from what real runs have left."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

LOCK = """\
recipe = 1
name = "tiny"

[training]
steps = 100
seq_len = 32

[optimizer]
type = "titan/adamw"
lr = 0.001
"""
MESH = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}


def at(second: float) -> str:
    """A time of 2026-01-31, so many seconds after noon."""
    minutes, seconds = divmod(second, 60)
    return f"2026-01-31T12:{int(minutes):02}:{seconds:09.6f}Z"


def event(kind: str, second: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"version": 1, "event": kind, "time": at(second), **fields}


def began(second: float = 0.0, step: int = 0, attempt: int = 1) -> dict[str, Any]:
    known = {"world": 1, "mesh": MESH, "device": "CPU", "checkpoint": None}
    return event("run_start", second, steps=100, attempt=attempt, step=step, **known)


def step(number: int, second: float, loss: float | str = 2.0, **metrics: Any) -> dict[str, Any]:
    """Ten tokens a step, one step a second."""
    known = {"loss": loss, "lr": 1e-3, "step_seconds": 1.0, "tokens_per_second": 10.0}
    return event("step", second, step=number, steps=100, metrics={**known, **metrics})


def attempt(outcome: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    return {
        "started": at(0),
        "argv": ["titan", "train", "tiny.toml"],
        "host": socket.gethostname(),
        "platform": "Linux",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "git": None,
        "plugin_files": [],
        "recipe": "/x/tiny.toml",
        "drift": [],
        "checkpoint": None,
        "world": 1,
        "mesh": MESH,
        "device": "CPU",
        "outcome": outcome,
        **values,
    }


def ended(why: str, number: int | None = 100, **values: Any) -> dict[str, Any]:
    return {"why": why, "signal": None, "step": number, "checkpoint": None, "metrics": {}, **values}


def make(
    path: Path,
    events: list[dict[str, Any]] | bytes = b"",
    attempts: list[dict[str, Any]] | None = None,
    *,
    created: float = 0.0,
    lock: str = LOCK,
) -> Path:
    """A run's folder; without `attempts`, of one that finished."""
    (path / "logs").mkdir(parents=True)
    (path / "checkpoints").mkdir()
    (path / "recipe.lock.toml").write_text(lock)
    lines = events if isinstance(events, bytes) else "".join(f"{json.dumps(e)}\n" for e in events).encode()
    (path / "events.jsonl").write_bytes(lines)
    record = {"format": 1, "run_id": "f00", "name": "tiny", "created": at(created)}
    record["attempts"] = [attempt(ended("finished"))] if attempts is None else attempts
    (path / "run.json").write_text(json.dumps(record))
    return path
