"""What titan's agent changes in torch's rendezvous, and what the command that started it says meanwhile."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from titancli.launch import LaunchRequest
from titancli.launchers import Local, agent, torchrun


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What one node knows of the others: `a` and `b`, lost after 8 seconds."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

    monkeypatch.setattr(  # put back at the end
        torchs._BackendRendezvousStateHolder, "_sanitize", torchs._BackendRendezvousStateHolder._sanitize
    )
    agent._ask_no_other_clock()
    settings = Mock(keep_alive_interval=timedelta(seconds=1), keep_alive_max_attempt=8, min_nodes=1)
    made = torchs._BackendRendezvousStateHolder(Mock(), settings)
    for rank, name in enumerate("ab"):
        made.state.participants[torchs._NodeDesc(name, 1, 0)] = rank
    return made


def test_a_report_that_cannot_be_written_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher import api

    def fails(options: Any) -> None:
        raise ChildFailedError("rank", {1: ProcessFailure(0, 7, -9, "N/A")})

    changes = ("_count_only_nodes_that_fit", "_ask_no_other_clock", "_record_no_steps")
    for name in (*changes, "_wait_for_no_other_program", "die_with_parent"):
        monkeypatch.setattr(agent, name, lambda: None)
    monkeypatch.setattr(api, "LocalElasticAgent", api.LocalElasticAgent)  # put back at the end
    monkeypatch.setattr(agent, "heeded", list)
    monkeypatch.setattr(run, "run", fails)
    assert agent.main([str(tmp_path / "no/report.json"), "--standalone", "script.py"]) == 1
    said = capsys.readouterr().err
    assert "report.json: No such file or directory; ranks that failed: [{'rank': 1, 'exit_code': -9" in said


def test_a_program_at_the_endpoint_that_never_answers_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as torchs

    monkeypatch.setattr(torchs, "_create_tcp_store", torchs._create_tcp_store)  # put back at the end
    agent._wait_for_no_other_program()
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"localhost:{other.getsockname()[1]}"
        child = os.fork()  # torch cannot be interrupted there
        if child == 0:
            try:
                sys.stderr = (tmp_path / "said").open("w")
                torchs._create_tcp_store(RendezvousParameters("c10d", endpoint, "one", 1, 2, read_timeout=1))
            finally:
                os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended == agent.EXIT_LOST
    assert (tmp_path / "said").read_text() == f"what listens at {endpoint} is no rendezvous\n"


def test_a_node_is_lost_when_it_has_given_no_sign_for_long_whatever_its_clock(
    holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    a, b = holder.state.participants
    behind, ahead = (datetime.now(UTC) + timedelta(seconds=shift) for shift in (-300, 300))
    holder.state.last_heartbeats = {a: behind, b: ahead}
    for _ in range(3):
        holder._sanitize()
        assert holder.state.last_heartbeats == {a: behind, b: ahead}  # they are what the nodes have written
        now += 3.9
    assert set(holder.state.participants) == {a, b}
    holder.state.last_heartbeats[a] += timedelta(seconds=1)
    holder._sanitize()
    assert set(holder.state.participants) == {a} and set(holder.state.last_heartbeats) == {a}


def test_a_node_that_waits_says_so_each_time_and_a_spare_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks: list[int] = []
    monkeypatch.setattr(torchrun, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(torchrun, "children", lambda process: ranks)
    request = LaunchRequest(tmp_path, tmp_path, None, [], 1, 4, None, False, False, min_nodes=2)
    drawing = Mock(step=None)
    waiting = torchrun.Waiting(Local(), request, drawing)

    def said(step: int | None) -> str:
        drawing.step = step
        waiting.look(1)
        return capsys.readouterr().err

    others = (
        "waiting for other machines (--nnodes 2:4), at most 600 seconds (launcher.join_timeout_seconds)\n"
    )
    assert [said(None), said(None), said(None)] == ["", others, ""]
    assert [said(5), said(5), said(6)] == ["the run has enough machines: this one waits as a spare\n", "", ""]
    ranks.append(7)
    assert said(7) == "" and not waiting.idle
    ranks.clear()
    assert [said(8), said(8), waiting.idle] == ["", others, True]
