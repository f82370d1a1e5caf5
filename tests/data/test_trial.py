"""A trial of what strangers wrote: what is around it, not what it finds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from titancli.data import trial, trial_child


def test_a_library_that_is_missing_is_left_to_who_uses_it() -> None:
    assert trial.harms_of("template", "no-such-library", {"{{ 1": "digest"}) == {}


def test_ctrl_c_is_for_the_parent() -> None:
    command = [sys.executable, "-P", trial_child.__file__, "template"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        deadline = time.monotonic() + 60
        while not _ignores(child.pid, signal.SIGINT) and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(json.dumps(["{{ messages[0].content }}"]).encode())
    assert (child.returncode, out) == (0, b".")


def _ignores(process: int, number: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_trial_needs_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their stacks count as memory, of which it has little."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(trial.subprocess, "run", lambda *_, **named: given.append(named))
    trial.run_child("parquet", [])
    assert {given[0]["env"][name] for name in trial.ALONE} == {"1"}
