"""The set-up of a process for a run: libraries' output, environment, logs, the parent's death.

Nothing at the top imports torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from titancli.errors import EXIT_STOPPED, EnvironmentProblem
from titancli.files import regular
from titancli.runs import timestamp
from titancli.signals import drop, say


@dataclass(frozen=True)
class Place:
    """The position of this rank."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    restart: int = 0
    """Number of restarts of the ranks by the launcher."""

    @classmethod
    def from_environment(cls) -> Place:
        """Return the values that torchrun set."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
        return cls(*(int(os.environ.get(name, default)) for name, default in zip(names, "0100", strict=True)))


def quiet() -> None:
    """Suppress output of libraries that would hide a run's own; set before they are imported."""
    for name, value in {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "KINETO_LOG_LEVEL": "99",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(torch|transformers|datasets)\b")


def torch_without_gpus() -> None:
    """Have torch, if it is not imported yet, see no GPU: a plugin that asks what the GPU can do would take
    memory of one that others train on."""
    quiet()
    if "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, and so of all that it starts, whatever launcher does."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def own_folder() -> Iterator[Path]:
    """Make a folder on this machine's own disk, for as long as the command runs; only its user can read it.

    systemd-tmpfiles, which removes what nobody has touched for ten days, leaves alone what is locked.

    Raises:
        EnvironmentProblem: none can be made.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="titan-")
    except OSError as error:
        raise no_room(Path(tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")), error) from error
    with made as own:
        held = os.open(own, os.O_RDONLY)
        try:
            with suppress(OSError):  # a network disk may have no locks
                fcntl.flock(held, fcntl.LOCK_SH)
            yield Path(own)
        finally:
            os.close(held)


def require_locks(folder: Path) -> None:
    """Make sure that ranks can meet in a folder: torch's store locks its file at each request.

    Raises:
        EnvironmentProblem: files on its disk cannot be locked, as on Lustre unless it is mounted so.
    """
    try:
        with open(folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise EnvironmentProblem(
            f"ranks cannot meet in {folder}: no file there can be locked ({error.strerror})",
            hint="set TMPDIR to a folder on a disk of this machine, such as /tmp or /dev/shm",
        ) from error


def refusal_below(path: Path) -> tuple[Path, OSError] | None:
    """Return the nearest existing folder of a path and why nothing can be made in it; None: it can. Nothing
    is left there."""
    above = next(place for place in (path, *path.parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=above):
            return None
    except OSError as error:
        return above, error


def no_room(folder: Path, error: OSError) -> EnvironmentProblem:
    """Return the hint for a folder that cannot be written."""
    hint = "free some space there, or set TMPDIR to a folder on another disk"
    return EnvironmentProblem(f"cannot write {folder}: {error.strerror}", hint=hint)


def loopback_only() -> dict[str, str]:
    """Return the variables that keep gloo and NCCL from listening to other machines, where all ranks are on
    one; an interface that was chosen stays."""
    present = {name for _, name in socket.if_nameindex()}
    name = next((name for name in ("lo", "lo0") if name in present), None)
    wanted = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {variable: value for variable, value in wanted.items() if not os.environ.get(variable)}


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Make torch deterministic, if requested; restore all settings at the end."""
    if wanted:
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if wanted:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark


def rank_log(logs: Path, rank: int) -> Path:
    """Return the file that has the output of a rank."""
    return logs / f"rank-{rank}.log"


def log_into(path: Path, who: str) -> None:
    """Send stdout and stderr of this process, and of the libraries in it, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _appending(path)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()  # where a crash in native code came from
    print(_first_line(who), flush=True)


@contextmanager
def copy_into(path: Path, who: str) -> Iterator[OutputLog]:
    """Copy what this process prints through `sys.stdout` and `sys.stderr` to a file as well.

    What native code writes to file descriptors 1 and 2 is not copied. At the end the streams are put back.
    """
    log = OutputLog(path)
    log.write(f"{_first_line(who)}\n")
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    tees = {name: Tee(stream, log) for name, stream in before.items() if stream is not None}
    for name, tee in tees.items():
        setattr(sys, name, tee)
    try:
        yield log
    finally:
        log.close()
        for name, tee in tees.items():
            if getattr(sys, name) is tee:  # else another stands there, and writes through this one
                setattr(sys, name, tee.below())


class OutputLog:
    """A file that output is appended to, unbuffered, from any thread.

    One that cannot be written (a full disk) is reported once, and the run continues.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._mutex = threading.Lock()
        self._healthy = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = _appending(path)
        except OSError as error:
            self._report(error)

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        try:
            with self._mutex:
                while data and self._descriptor is not None:
                    data = data[os.write(self._descriptor, data) :]
        except OSError as error:  # reported without the mutex: the report is written here as well
            self._report(error)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        return False

    @property
    def closed(self) -> bool:
        return self._descriptor is None

    def close(self) -> None:
        """Write no more; a `Tee` that somebody still holds prints on."""
        with self._mutex:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _report(self, error: OSError) -> None:
        if self._healthy:
            self._healthy = False
            say(f"warning: cannot write {self._path} ({error.strerror}); the run continues without it")


class Tee:
    """Stands for `sys.stdout` or `sys.stderr` and copies what is written to a log.

    A terminal that has gone away, or a reader that has, does not end what prints: the log has it all.
    """

    def __init__(self, stream: TextIO, log: OutputLog) -> None:
        self.stream = stream
        self.log = log

    def write(self, text: str) -> int:
        self.log.write(text)
        try:
            self.stream.write(text)
        except OSError:
            drop(self.stream)
        return len(text)

    def below(self) -> TextIO:
        """Return the stream that it stands for; not one whose run has ended."""
        stream = self.stream
        while isinstance(stream, Tee) and stream.log.closed:
            stream = stream.stream
        return stream

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            drop(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _appending(path: Path) -> int:
    return regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _first_line(who: str) -> str:
    return f"--- {timestamp()} {who} on {socket.gethostname()}"


def tell_where_stopped() -> None:
    """Print the stacks of all threads when SIGTERM comes, even in the middle of a collective that hangs.

    Whoever handles the signal already does so afterwards.
    """
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)


PARENT = "TITAN_PARENT"
"""The environment variable that tells a process which one started it, until it has read it."""
LOOK_SECONDS = 0.5
"""Between two looks whether the parent is there."""
_parent: int | None = None
"""The process that this one does not outlive."""


def as_child() -> dict[str, str]:
    """Return the environment variables that a process needs to call `die_with_parent`."""
    return {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """Get SIGTERM when the parent process dies, so that nothing is orphaned; end at once if it is gone, which
    it may be before this process could ask for the signal. Linux only."""
    global _parent
    given = os.environ.pop(PARENT, None)
    if sys.platform != "linux":
        return
    _parent = os.getppid() if given is None else int(given)
    signal_at_parents_death(signal.SIGTERM)
    if _is_orphaned(_parent):
        os._exit(EXIT_STOPPED)


def signal_at_parents_death(number: int) -> None:
    """Get a signal when the parent process ends. Linux only."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)


@contextmanager
def leaving_if_orphaned() -> Iterator[None]:
    """End this process without a word if its parent dies meanwhile: those that it waits for leave too, and
    the signal is heeded only once they have come."""
    done = threading.Event()

    def look(parent: int) -> None:
        while not done.wait(LOOK_SECONDS):
            if _is_orphaned(parent):
                os._exit(EXIT_STOPPED)

    if _parent is not None:
        # A file store whose folder went with the parent is waited for without letting other threads run.
        if _is_orphaned(_parent):
            os._exit(EXIT_STOPPED)
        threading.Thread(target=look, args=(_parent,), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _is_orphaned(parent: int) -> bool:
    """Return whether a process is no longer an ancestor of this one: there may be a shell script between
    them."""
    process = os.getppid()  # mostly it, and then nothing is asked of /proc, which may be another namespace's
    while process not in (0, parent):
        try:
            process = parent_of(process)
        except OSError:  # it has ended meanwhile, and what it started has another parent by now
            return os.getppid() != parent
    return process != parent


def parent_of(process: int) -> int:
    """Return the process id of a process's parent; a zombie's is 0.

    Raises:
        OSError: it is gone.
    """
    # pid (command) state parent …; the command may hold spaces and brackets
    state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    return 0 if state == "Z" else int(parent)


def leave_process_group(error_type: Any, error: Any, trace: Any) -> None:
    """Other ranks may be stuck in a collective after an error, and destroying would wait for them."""
    import torch.distributed as dist

    if dist.is_initialized() and (error is None or dist.get_world_size() == 1):
        dist.destroy_process_group()
