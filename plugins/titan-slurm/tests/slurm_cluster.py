"""A real Slurm on this machine: one controller, and nodes that have host names of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

_PROGRAMS = "slurmctld slurmd munged sbatch srun squeue sacct scancel scontrol sinfo sacctmgr"
NEEDS = pytest.mark.needs(*_PROGRAMS.split(), install="apt install slurmctld slurmd slurm-client munge")
NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may make nodes with host names of their own"
)
CONF = """
ClusterName=titan
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPort={controller}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=20
SlurmdParameters=config_overrides
NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=4 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def cluster(nodes: int) -> Iterator[Path]:
    """Run one with nodes n1, n2, …; what is started meanwhile uses it by the SLURM_CONF of this process."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket lies in it
    names = [f"n{number}" for number in range(1, nodes + 1)]
    controller, first = _free_ports(nodes + 1)
    ports = f"{first}-{first + nodes - 1}" if nodes > 1 else str(first)
    listed = f"n[1-{nodes}]" if nodes > 1 else "n1"
    conf = CONF.format(
        folder=folder, controller=controller, names=listed, ports=ports, host=socket.gethostname()
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()} {' '.join(names)}\n")
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    (folder / "state").mkdir()
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(_restore, before)
        options = {"key": "key-file", "munge": "socket", "munge.pid": "pid-file"}
        options |= {"munge.log": "log-file", "munge.seed": "seed-file"}
        flags = [f"--{option}={folder / name}" for name, option in options.items()]
        _daemon(stack, "munged", "--foreground", "--force", *flags)
        until(lambda: (folder / "munge").exists(), "munged")
        _daemon(stack, "slurmctld", "-D")
        daemons.clear()
        for name in names:
            lines = f'hostname {name} && mount --bind {folder}/hosts /etc/hosts && exec "$0" -D -N {name}'
            daemons[name] = _daemon(stack, "unshare", "--uts", "--mount", "sh", "-c", lines, "slurmd")
        until(lambda: told("sinfo", "-h", "-o", "%t %D").split() == ["idle", str(nodes)], "the nodes")
        stack.callback(lambda: subprocess.run(["scancel", "--user=root"], capture_output=True, timeout=20))
        yield folder


daemons: dict[str, int] = {}
"""The process of each node's slurmd."""


def lose(name: str) -> None:
    """Kill all that runs on a node, and have Slurm notice it now, not after minutes."""
    node = os.readlink(f"/proc/{daemons[name]}/ns/uts")
    while there := [process for process in _processes() if _on(process, node)]:
        for process in there:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    told("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")


def kill_titan(name: str) -> None:
    """Kill the command on a node, as the kernel does where memory runs out."""
    for process in running(name, b"titancli"):
        os.kill(process, signal.SIGKILL)


def running(name: str, module: bytes) -> list[int]:
    """Return the processes of `python [-u] -m MODULE` on a node."""
    node = os.readlink(f"/proc/{daemons[name]}/ns/uts")
    words = {process: _words(process) for process in _processes() if _on(process, node)}
    return [process for process, line in words.items() if [b"-m", module] in (line[1:3], line[2:4])]


def _words(process: int) -> list[bytes]:
    try:
        return (Path("/proc") / str(process) / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return []


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _on(process: int, node: str) -> bool:
    try:
        ended = (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not ended and os.readlink(f"/proc/{process}/ns/uts") == node
    except OSError:  # it has ended meanwhile
        return False


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout


def until(done: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait for it.

    Raises:
        TimeoutError: in vain.
    """
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} seconds")
        time.sleep(0.2)


def _daemon(stack: ExitStack, *command: str) -> int:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    return process.pid


def _restore(before: str | None) -> None:
    os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before)


def _free_ports(count: int) -> tuple[int, int]:
    """Return a free port, the first of several consecutive free ones."""
    for first in range(27000 + os.getpid() % 3000, 32000, 10):
        try:
            with ExitStack() as stack:
                for number in range(count):
                    stack.enter_context(socket.create_server(("", first + number)))
        except OSError:
            continue
        return first, first + 1
    raise OSError("no ports are free")
