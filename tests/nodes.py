"""Several nodes on one machine: each has a network, mounts, a host name and a clock of its own.

A `Cluster` has a shared folder, which all its nodes see, and nodes that are joined by a bridge. Nothing of it
is visible outside: the bridge too lies in a namespace of its own, so that several clusters can stand at once.
It needs root, and the tools `unshare`, `nsenter` and `ip`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.warm import NODE

TOOLS = ("unshare", "nsenter", "ip", "mount")
NAMESPACES = ("--net", "--mount", "--uts")
CLOCK = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static double shift(void) { const char *s = getenv("CLOCK_SHIFT"); return s ? atof(s) : 0; }
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, at);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) at->tv_sec += (long)shift();
    return result;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
"""A library that shifts the time of day by CLOCK_SHIFT seconds: a time namespace shifts only the clocks that
count from the start of the machine."""


@cache
def unavailable() -> str | None:
    """Why there can be no nodes here; None if there can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"nodes need {', '.join(missing)}"
    probe = ["unshare", *NAMESPACES, "sh", "-c", "ip link add probe type bridge && mount -t tmpfs none /mnt"]
    if subprocess.run(probe, capture_output=True).returncode:
        return "nodes are namespaces, which only root may make here"
    return None


class Cluster:
    """Nodes that see each other. Leaving it ends all that runs on them."""

    def __init__(self, folder: Path) -> None:
        self.shared = folder
        """Seen by all nodes, at the same path."""
        self.local = Path(tempfile.mkdtemp(prefix="local-"))
        """A disk of its own on every node, at the same path."""
        self._files = Path(tempfile.mkdtemp(prefix="cluster-"))
        self._hub = _Holder(
            "unshare", "--net", script="ip link add bridge0 type bridge && ip link set bridge0 up"
        )
        self.nodes: dict[str, Node] = {}

    def node(self, name: str, *, disk: str = "64m", clock: int = 0) -> Node:
        """Start a node. Names sort as ranks do: the first is the node of rank 0.

        Args:
            disk: the size of its local disk.
            clock: seconds that its clock is ahead; what runs there is started from scratch, so it is slow.
        """
        number = len(self.nodes) + 1
        hosts = self._files / "hosts"
        with open(hosts, "a") as file:
            file.write(
                f"10.77.0.{number} {name}\n" if number > 1 else f"127.0.0.1 localhost\n10.77.0.1 {name}\n"
            )
        holder = _Holder(
            *("unshare", *NAMESPACES, "--propagation", "private"),
            script=f"hostname {name} && mount --bind {hosts} /etc/hosts && ip link set lo up "
            f"&& mount -t tmpfs -o size={disk} tmpfs {self.local}",
        )
        port = f"port{number}"
        self._hub.run(
            *("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", holder.pid)
        )
        self._hub.run(*("ip", "link", "set", port, "master", "bridge0", "up"))
        holder.run("ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
        holder.run("ip", "link", "set", "eth0", "up")
        environment = {NODE: holder.pid}
        if clock:
            environment |= {"LD_PRELOAD": str(self._clock()), "CLOCK_SHIFT": str(clock)}
        self.nodes[name] = Node(name, holder, environment, lambda *words: self._hub.run(*words), port)
        return self.nodes[name]

    def _clock(self) -> Path:
        library = self._files / "clock.so"
        if not library.exists():
            compiler = ["cc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"]
            subprocess.run(compiler, input=CLOCK.encode(), check=True)
        return library

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for node in self.nodes.values():
            if node.alive:
                node.kill()
        self._hub.end()
        shutil.rmtree(self._files)
        self.local.rmdir()


class Node:
    """One machine of a `Cluster`."""

    def __init__(
        self,
        name: str,
        holder: _Holder,
        environment: Mapping[str, str],
        hub: Callable[..., object],
        port: str,
    ) -> None:
        self.name, self.alive = name, True
        self.environment = environment
        """What a process needs in its environment to be started here; `start` gives it."""
        self._holder, self._hub, self._port = holder, hub, port

    def start(
        self, *words: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on the node; `options` are those of `subprocess.Popen`."""
        environment = {**(os.environ if env is None else env), **self.environment}
        return subprocess.Popen(list(words), env=environment, **options)

    def run(self, *words: str) -> str:
        """Run a command, for instance a `mount`, and return its output."""
        return self._holder.run(*words)

    def processes(self) -> list[int]:
        """Return the process ids of all that runs on the node."""
        return _members(self._holder.namespace)

    def kill(self) -> None:
        """Take its power: its peers hear nothing more of it, and no process gets to do anything."""
        self.unplug()
        self.freeze()  # or one might see the others end
        while there := self.processes():
            for process in there:
                _signal(process, signal.SIGKILL)
            time.sleep(0.01)
        self._holder.end()
        self.alive = False

    def freeze(self) -> None:
        """Stop all that runs on it, until `thaw`; its network stays up."""
        before: list[int] = []
        while (there := self.processes()) != before:  # one may have been forking
            for process in there:
                _signal(process, signal.SIGSTOP)
            before = there

    def thaw(self) -> None:
        for process in self.processes():
            _signal(process, signal.SIGCONT)

    def unplug(self) -> None:
        """Cut it off from all others, until `plug`."""
        self._hub("ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        self._hub("ip", "link", "set", self._port, "up")


class _Holder:
    """A process in new namespaces, which exist as long as it does; it ends with this one."""

    def __init__(self, *unshare: str, script: str) -> None:
        command = [*unshare, "sh", "-c", f"{script} && echo ready && exec cat"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise OSError(f"no node: {' '.join(command)} failed")
        self.pid = str(self._process.pid)
        self.namespace = os.readlink(f"/proc/{self.pid}/ns/net")

    def run(self, *words: str) -> str:
        command = ["nsenter", "--target", self.pid, *NAMESPACES]
        return subprocess.run([*command, *words], check=True, text=True, stdout=subprocess.PIPE).stdout

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def _members(namespace: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.readlink(entry / "ns/net") == namespace:
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile
                continue
    return sorted(found)


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return  # it has ended meanwhile
