"""Which rank's error is the cause, and what the user sees of it."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from titancli.errors import PluginError, RankFailure
from titancli.observe import failures


def leave(logs: Path, error: Exception, rank: int) -> None:
    try:
        raise error
    except Exception as raised:
        failures.write(logs, raised, rank=rank, world=2, step=12)


def test_the_cause_is_the_first_error_that_is_not_about_the_connection(tmp_path: Path) -> None:
    leave(tmp_path, RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), 0)
    leave(tmp_path, ValueError("bad row"), 1)
    found = failures.cause(failures.read(tmp_path), [], [])
    assert found is not None
    assert (found.rank, found.step, found.message) == (1, 12, "bad row")


def test_an_error_that_echoes_another_ranks_is_never_the_cause(tmp_path: Path) -> None:
    leave(tmp_path, RankFailure("rank 1 failed in forward_backward: ValueError: bad row"), 0)
    leave(tmp_path, ValueError("bad row"), 1)
    found = failures.cause(failures.read(tmp_path), [], [])
    assert found is not None and found.rank == 1


def test_of_an_echo_the_report_holds_what_the_rank_saw_itself(tmp_path: Path) -> None:
    echo = RankFailure("rank 1 did not call forward_backward within 5 s")
    echo.__cause__ = RuntimeError("gloo: timed out")
    leave(tmp_path, echo, 0)
    [report] = failures.read(tmp_path)
    assert (report.type, report.message, report.communication) == ("RuntimeError", "gloo: timed out", True)


def test_a_rank_that_was_killed_is_the_cause_of_the_others_lost_connections(tmp_path: Path) -> None:
    leave(tmp_path, RuntimeError("Connection reset by peer"), 0)
    found = failures.cause(failures.read(tmp_path), [failures.killed(1, 2, 9, 3)], [])
    assert found is not None
    assert (found.rank, found.message) == (1, "killed by SIGKILL")


def test_when_all_errors_are_about_the_connection_the_first_counts(tmp_path: Path) -> None:
    leave(tmp_path, RuntimeError("gloo: timed out"), 1)
    leave(tmp_path, RuntimeError("Connection reset by peer"), 0)
    found = failures.cause(failures.read(tmp_path), [], [])
    assert found is not None
    assert found.rank == 1


def test_a_rank_that_the_launcher_killed_in_the_end_is_not_the_cause(tmp_path: Path) -> None:
    leave(tmp_path, RuntimeError("gloo: timed out"), 0)
    found = failures.cause(failures.read(tmp_path), [], [failures.killed(1, 2, 9, 3)])
    assert found is not None
    assert found.rank == 0
    assert "another rank may hang" in failures.block(found, None)
    reports = failures.read(tmp_path)
    assert failures.silent(reports, 3) == [1, 2]
    text = failures.block(found, tmp_path / "rank-0.log", failures.silent(reports, 3))
    assert f"ranks 1, 2 may hang or be unreachable; see {tmp_path}/rank-1.log" in text


def test_reports_of_an_attempt_before_are_passed_over(tmp_path: Path) -> None:
    leave(tmp_path, ValueError("old"), 0)
    leave(tmp_path, ValueError("older"), 1)
    before = failures.there(tmp_path)
    assert failures.read(tmp_path, before=before) == []
    leave(tmp_path, ValueError("new"), 1)
    assert [found.message for found in failures.read(tmp_path, before=before)] == ["new"]


def with_clock(path: Path, seconds: float, **changed: Any) -> None:
    """As if the report's host had another clock; the disk's is as it is."""
    report = json.loads(path.read_text())
    report["time"] = (datetime.fromisoformat(report["time"]) + timedelta(seconds=seconds)).isoformat()
    stat = path.stat()
    path.write_text(json.dumps(report | changed))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("skew", [-20.0, 20.0])
def test_clocks_of_hosts_that_differ_do_not_change_the_cause(tmp_path: Path, skew: float) -> None:
    """Nor do they hide a report: the host that failed may be behind the one that asks."""
    before = failures.there(tmp_path)
    leave(tmp_path, ValueError("bad row"), 1)
    time.sleep(0.02)  # a tick of the disk's clock
    leave(tmp_path, ValueError("a consequence"), 0)
    with_clock(tmp_path / "rank-1.error.json", skew, host="elsewhere")
    found = failures.cause(failures.read(tmp_path, before=before), [], [])
    assert found is not None and (found.rank, found.host) == (1, "elsewhere")


def test_the_earlier_step_comes_first_whatever_the_disk_says(tmp_path: Path) -> None:
    leave(tmp_path, ValueError("a consequence"), 0)
    leave(tmp_path, ValueError("bad row"), 1)
    for step in (11, None):
        with_clock(tmp_path / "rank-1.error.json", 60, step=step)
        found = failures.cause(failures.read(tmp_path), [], [])
        assert found is not None and found.rank == 1


def test_the_block_names_rank_step_cause_and_log(tmp_path: Path) -> None:
    leave(tmp_path, ValueError("bad row"), 1)
    [failure] = failures.read(tmp_path)
    text = failures.block(failure, tmp_path / "rank-1.log")
    assert text.startswith(f"rank 1 of 2 on {failure.host} failed at step 12: ValueError")
    assert text.count("Traceback") == 1
    assert "ValueError: bad row" in text
    assert text.endswith(f"log: {tmp_path / 'rank-1.log'}")


def test_an_error_with_a_remedy_is_told_without_a_traceback(tmp_path: Path) -> None:
    leave(tmp_path, PluginError("no tensorboard", hint="pip install it"), 0)
    [failure] = failures.read(tmp_path)
    text = failures.block(failure, None)
    assert "Traceback" not in text
    assert "no tensorboard\n pip install it" in text
    assert failure.exit_code == 4


def test_frames_inside_torch_are_left_out_but_for_the_last(tmp_path: Path) -> None:
    import torch

    try:
        torch.nn.Linear(2, 3)(torch.zeros(5))
    except RuntimeError as error:
        failures.write(tmp_path, error, rank=0, world=1, step=1)
    [failure] = failures.read(tmp_path)
    files = [line for line in failure.traceback.splitlines() if line.startswith("  File ")]
    assert len(files) == 2
    assert "test_failures.py" in files[0]
    assert "linear.py" in files[1]
