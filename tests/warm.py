"""Start processes without the cost of importing torch: what tests start is forked from a server that has
imported it.

`Warm().install()` makes `subprocess` hand over every command that starts this interpreter with `titan`, `-m
MODULE` or a script: a server that has imported torch and titan forks, and the child continues exactly as the
command would, with its own arguments, environment, folder, files, session and signals. A child does the same
for the processes that it starts, such as torchrun and its ranks, so a run on four ranks costs no import at
all.

Everything that the interpreter determines before the first line of a program (its flags, `PYTHON*`,
variables that libraries read at import) cannot be changed afterwards: such a command is started normally,
and so is everything that a test marked `cold` starts.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import io
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from tests import choice

LIBRARIES = (
    "torch",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.fx.experimental.symbolic_shapes",
    "torch.profiler",
    "torch.testing._internal.distributed.fake_pg",
    "torch.utils.checkpoint",
    "transformers.generation",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "pydantic",
    "pytest",
    "rich.console",
    "tomli_w",
    "encodings.idna",
    "encodings.utf_8_sig",
)
AT_IMPORT = ("PYTHON", "OMP_", "MKL_", "KMP_", "LD_", "HF_", "TRANSFORMERS_", "TORCH_LOGS", "TORCHINDUCTOR_")
"""Prefixes of variables that are read before the first line of a program, or when a library is imported."""
HEEDED = {"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
"""The variables among them that also take effect in a forked process."""
USUAL = {
    **dict.fromkeys(("executable", "preexec_fn", "startupinfo", "gid", "gids", "uid"), None),
    **dict.fromkeys(("umask", "process_group"), -1),
    "close_fds": True,
    "creationflags": 0,
    "shell": False,
    "restore_signals": True,
}
"""With any other option, an interpreter is started normally."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
EXECUTABLE = sys.executable  # which a test may replace
NODE = "TITAN_TEST_NODE"
"""The environment variable with a process of the node (`tests/nodes.py`) on which a program is to run."""
NAMESPACES = 0x40000000 | 0x00020000 | 0x04000000  # CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS of setns(2)
_ENTER = ("nsenter", "--net", "--mount", "--uts")
ROOM = " " * 8192
"""Space reserved on the server's command line and in its environment, for those of the programs it forks."""


@dataclass(frozen=True)
class Start:
    """A program to run."""

    words: list[str]
    """The arguments after the name of the interpreter."""
    folder: str
    environment: dict[str, str]
    session: bool
    fds: list[tuple[int, int]]
    """Pairs of file descriptors: the number in the child, and the current number."""


def as_start(options: Mapping[str, Any]) -> Start | None:
    """The program that `subprocess` was asked to start, or None if it needs its own interpreter."""
    args = options["args"]
    words = [args] if isinstance(args, (str, bytes, os.PathLike)) else [os.fspath(word) for word in args]
    if sys.platform != "linux" or not all(isinstance(word, str) for word in words):
        return None
    if any(options[name] != usual for name, usual in USUAL.items()):
        return None
    environment = dict(os.environ if options["env"] is None else options["env"])
    names = {name for name in {*environment, *os.environ} if name.startswith(AT_IMPORT)}
    if any(environment.get(name) != os.environ.get(name) for name in names - HEEDED):
        return None
    here = Path(EXECUTABLE)
    if words[0] == EXECUTABLE:
        rest = [word for word in words[1:2] if word != "-u"] + words[2:]
    elif Path(words[0]) == here.with_name("titan") or (
        words[0] == "titan" and environment.get("PATH", "").split(os.pathsep)[0] == str(here.parent)
    ):
        rest = [str(here.with_name("titan")), *words[1:]]
    else:
        return None
    if not rest or (rest[0].startswith("-") and rest[0] != "-m") or rest[1:2] == ["pytest"]:
        return None
    std = [
        (number, given if given != -1 else number)
        for number, given in enumerate((options["p2cread"], options["c2pwrite"], options["errwrite"]))
    ]
    return Start(
        rest,
        os.path.abspath(os.fspath(options["cwd"] or os.getcwd())),
        environment,
        bool(options["start_new_session"]),
        std + [(fd, fd) for fd in options["pass_fds"]],
    )


def become(start: Start) -> None:
    """Continue as another program; called in a forked child, and never returns."""
    gc.freeze()  # what the parent has, and its files, must outlive this process: their numbers are taken anew
    code = 1
    _forget_the_end_of_the_parent()
    try:
        if start.session:
            os.setsid()
        if NODE in start.environment:
            _move_to(int(start.environment[NODE]))
        _take_files(start.fds)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(start.folder)
        _take_path(start.environment.get("PYTHONPATH", ""))
        os.environ.clear()
        os.environ.update(start.environment)
        choice.begin()
        _be_known_as([EXECUTABLE, *start.words], start.environment)
        Forks(_fork_here).install()
        code = _run(start.words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


_registered: list[Callable[..., Any]] = []
"""What this program has registered with atexit."""
_register = atexit.register


def _forget_the_end_of_the_parent() -> None:
    """Leave to the parent what it does when it ends: its temporary folders are still in use. Nor are its
    libraries' objects finalized: those of every `torch.library.Library` would take a tenth of a second."""
    for function in _registered:
        atexit.unregister(function)
        if function == weakref.finalize._exitfunc:  # type: ignore[attr-defined]
            weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    _registered.clear()

    def register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        _registered.append(function)
        return _register(function, *args, **kwargs)

    atexit.register = register  # type: ignore[assignment]


def _move_to(process: int) -> None:
    """Enter the network, the mounts and the host name of another process."""
    descriptor = os.pidfd_open(process)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


_before: list[Any] = []
"""The parent's streams, kept until this process ends: what they still hold is the parent's to write."""


def _take_files(fds: Sequence[tuple[int, int]]) -> None:
    _before.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    high = {to: os.dup(fd) for to, fd in fds}
    taken = max([*high, *high.values(), 2]) + 1
    high = {to: _above(fd, taken) for to, fd in high.items()}
    for to, fd in high.items():
        os.dup2(fd, to, inheritable=True)
    previous = -1
    for to in [*sorted(high), os.sysconf("SC_OPEN_MAX")]:
        if previous + 1 < to:  # close_range(2) takes the end of an empty range at 0 for the last of all
            os.closerange(previous + 1, to)
        previous = to
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        lines = number == 2 or os.isatty(number)
        errors = "backslashreplace" if number == 2 else None
        setattr(
            sys, name, io.TextIOWrapper(raw, "utf-8", errors, line_buffering=lines, write_through=unbuffered)
        )
        setattr(sys, f"__{name}__", getattr(sys, name))


def _be_known_as(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make the process appear in /proc with its own command line and environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # arg_start, arg_end, env_start and env_end: fields 48 to 51 of proc(5), the first two of which are gone
    places = [int(field) for field in fields[45:49]]
    texts = (words, [f"{name}={value}" for name, value in environment.items()])
    for text, begin, end in zip(texts, places[::2], places[1::2], strict=True):
        line = b"".join(os.fsencode(word) + b"\0" for word in text)
        ctypes.memmove(begin, line[: end - begin].ljust(end - begin, b"\0"), end - begin)


def _take_path(path: str) -> None:
    """Search the folders of PYTHONPATH that the parent did not have, before the installed ones."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    given = [os.path.abspath(folder) for folder in path.split(os.pathsep) if folder]
    sys.path[1:] = given + [folder for folder in sys.path[1:] if folder not in {*before, *given}]


def _look_first_in(folder: str) -> None:
    """Replace the parent's first search path by the program's folder, or remove it under PYTHONSAFEPATH."""
    sys.path[:1] = [] if os.environ.get("PYTHONSAFEPATH") else [folder]


def _above(fd: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, least)


def _run(words: list[str]) -> int:
    """Run a program as the interpreter does, and return its exit code."""
    try:
        try:
            if words[0] == "-m":
                sys.argv = ["-m", *words[2:]]
                _look_first_in(os.getcwd())
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                _look_first_in(os.path.dirname(os.path.abspath(words[0])))
                runpy.run_path(words[0], run_name="__main__")
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _fork_here(start: Start) -> int | None:
    if threading.current_thread() is not threading.main_thread():
        return None  # it would be the child's main thread, which others wait for as for one of a pool
    pid = os.fork()
    if pid == 0:
        become(start)
    return pid


class Forks:
    """Replace `subprocess` so that it forks where possible."""

    _in_earnest = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    _names = tuple(signature(_in_earnest).parameters)

    def __init__(self, fork: Callable[[Start], int | None]) -> None:
        self.fork = fork
        self.cold = False

    def install(self) -> None:
        forks = self

        def execute(popen: Any, *given: Any) -> None:
            options = dict(zip(Forks._names[1:], given, strict=True))
            if options["env"] is not None:
                options["env"] = choice.environment() | dict(options["env"])
                given = tuple(options.values())
            start = None if forks.cold else as_start(options)
            pid = None if start is None else forks.fork(start)
            if pid is None:
                node = (options["env"] or {}).get(NODE)
                if node and NODE not in os.environ:  # else this process is there already
                    enter = (*_ENTER, f"--target={node}", f"--wdns={os.path.abspath(options['cwd'] or '.')}")
                    given = ([*enter, *options["args"]], *given[1:])
                Forks._in_earnest(popen, *given)
                return
            popen.pid = pid
            popen._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            popen._close_pipe_fds(*(options[name] for name in pipes))

        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


class Warm(Forks):
    """The client of the server in the test process: what the server forks becomes a child of this
    process."""

    def __init__(self) -> None:
        super().__init__(self._ask)
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def _begin(self) -> socket.socket:
        if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        ours, theirs = socket.socketpair()
        command = [EXECUTABLE, "-c", "import sys; from tests.warm import serve; serve(int(sys.argv[1]))"]
        self.cold = True
        try:
            self._server = subprocess.Popen(
                [*command, str(theirs.fileno()), ROOM],
                cwd=Path(__file__).parent.parent,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "ROOM": ROOM, choice.START: ""},
            )
        finally:
            self.cold = False
        theirs.close()
        return ours

    def _ask(self, start: Start) -> int:
        with self._lock:
            if self._socket is None:
                self._socket = self._begin()
            try:
                return self._asked(self._socket, start)
            except (
                BaseException
            ):  # a test's time limit, for one: the answer would be taken for the next one's
                self.close()
                raise

    @staticmethod
    def _asked(server: socket.socket, start: Start) -> int:
        have = [fd for _, fd in start.fds]
        text = pickle.dumps(start)
        server.sendall(len(text).to_bytes(8, "little"))
        server.sendmsg([text[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", have))])
        server.sendall(text[1:])
        answer = server.recv(8, socket.MSG_WAITALL)
        if len(answer) < 8:
            raise RuntimeError("the server of warm processes has ended")
        return int.from_bytes(answer, "little")

    def close(self) -> None:
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._server.wait()
            self._socket = self._server = None


def serve(number: int) -> None:
    """Fork requested programs until the test process closes its end of the socket."""
    import importlib

    gc.disable()  # what is imported stays: to look through it over and over finds no garbage
    import titancli

    for name in LIBRARIES:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(titancli.__path__, "titancli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    _bind_one_recipe()
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)  # of nothing, to a debug log
    gc.enable()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=number) as asked:
        while head := asked.recv(8, socket.MSG_WAITALL):
            size = int.from_bytes(head, "little")
            first, rights, _, _ = asked.recvmsg(1, socket.CMSG_SPACE(64 * 4))
            text = first + asked.recv(size - 1, socket.MSG_WAITALL)
            fds = array.array("i")
            for _, _, data in rights:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            start: Start = pickle.loads(text)
            here = [(to, fd) for (to, _), fd in zip(start.fds, fds, strict=True)]
            pid = _fork_away(replace(start, fds=here))
            for fd in fds:
                os.close(fd)
            asked.sendall(pid.to_bytes(8, "little"))


def _bind_one_recipe() -> None:
    """Have a fork find what its process would make once and keep: the plugins that are installed, and what
    pydantic knows of their configs."""
    from titancli import cli, registry

    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(["recipe", "show", "llama3_debug"])
    if code != 0:
        raise RuntimeError(f"`titan recipe show llama3_debug` ended with {code}")
    registry.configure()


def _fork_away(start: Start) -> int:
    """Fork a program whose parent is not this process: the test process, as the nearest subreaper, adopts
    it and waits for it as for any child."""
    ours, theirs = os.pipe()
    middle = os.fork()
    if middle == 0:
        middle, pid = os.getpid(), os.fork()
        if pid == 0:
            while os.getppid() == middle:
                time.sleep(0.0005)
            become(start)
        os.write(theirs, pid.to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(middle, 0)
    os.close(theirs)
    pid = int.from_bytes(os.read(ours, 8), "little")
    os.close(ours)
    return pid
