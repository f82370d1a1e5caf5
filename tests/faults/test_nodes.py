"""What the nodes of `tests/nodes.py` promise to the tests that use them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nodes import Cluster, Node

ANSWER = """
import socket, sys
server = socket.create_server(("", 9000))
while True:
    peer, _ = server.accept()
    peer.sendall(socket.gethostname().encode())
    peer.close()
"""
ASK = """
import socket, sys
try:
    print(socket.create_connection(("a", 9000), timeout=1).recv(9).decode())
except OSError:
    print("silence")
"""


def python(node: Node, text: str, **options: object) -> subprocess.Popen[str]:
    return node.start("python3", "-c", text, text=True, stdout=subprocess.PIPE, **options)


def asked(node: Node) -> str:
    return python(node, ASK).communicate(timeout=30)[0].strip()


def answers(node: Node) -> None:
    """Wait until a node's question is answered: on a busy machine that takes longer than one of them."""
    deadline = time.monotonic() + 20
    while asked(node) != "a":
        assert time.monotonic() < deadline


def test_a_node_answers_until_it_is_unplugged_frozen_or_killed(cluster: Cluster) -> None:
    a, b = cluster.node("a"), cluster.node("b")
    server = python(a, ANSWER)
    answers(b)
    for harm, repair in ((a.unplug, a.plug), (b.unplug, b.plug), (a.freeze, a.thaw)):
        harm()
        assert asked(b) == "silence"
        repair()
        answers(b)
    a.kill()
    assert server.wait(10) != 0 and a.processes() == []
    assert asked(b) == "silence"
    assert asked(cluster.node("c")) == "silence"


def test_each_has_a_disk_of_its_own_and_all_have_the_shared_folder(cluster: Cluster) -> None:
    a, b = cluster.node("a", disk="1m"), cluster.node("b")
    assert [node.run("hostname").strip() for node in (a, b)] == ["a", "b"]
    b.run("sh", "-c", f"echo b > {cluster.local}/file && echo b > {cluster.shared}/file")
    assert a.run("cat", f"{cluster.shared}/file") == "b\n"
    assert a.run("ls", str(cluster.local)) == "" == "".join(os.listdir(cluster.local))
    with pytest.raises(subprocess.CalledProcessError):
        a.run("dd", "if=/dev/zero", f"of={cluster.local}/big", "bs=1M", "count=2")


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=[pytest.mark.cold, pytest.mark.slow])])
def test_what_is_started_on_a_node_runs_there_and_so_does_what_it_starts(
    cluster: Cluster, tmp_path: Path, cold: bool
) -> None:
    (tmp_path / "says.py").write_text(
        "import os, socket, subprocess, sys\nprint(socket.gethostname(), os.getcwd(), flush=True)\n"
        "sys.argv[1:] and subprocess.run([sys.executable, *sys.argv[1:]], check=True)\n"
    )
    words = (sys.executable, "says.py", "says.py")
    process = cluster.node("a").start(*words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=60)[0] == f"a {tmp_path}\n" * 2
    assert process.returncode == 0


def test_a_clock_is_shifted_for_all_that_runs_on_the_node(cluster: Cluster) -> None:
    if subprocess.run(["cc", "--version"], capture_output=True).returncode:
        pytest.skip("a shifted clock needs a C compiler")
    text = (
        "import datetime, time\n"
        "print(time.time(), datetime.datetime.now().timestamp(), time.time(), time.monotonic())"
    )
    began, start = time.time(), time.monotonic()
    said = python(cluster.node("a", clock=20), text).communicate(timeout=30)[0]
    now, also, later, monotonic = map(float, said.split())
    assert began + 20 <= now <= later <= time.time() + 20
    assert int(now * 1000) <= int(also * 1000) <= int(later * 1000)  # datetime cuts to microseconds
    assert start <= monotonic <= time.monotonic()
