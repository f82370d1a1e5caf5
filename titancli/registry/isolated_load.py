"""Loading of each plugin in a process of its own, to see its side effects.

In a command's process a plugin could end, change or stop it. `titan plugin list` and `titan doctor` try
plugins here first; no other command does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titancli.errors import EnvironmentProblem
from titancli.process import signal_at_parents_death
from titancli.registry.plugins import names_in

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

LIMIT_SECONDS = 60.0
"""Time after which a plugin is given up; a busy machine may take seconds for torch."""
SLOW = "it was not loaded in time: the machine may be busy, or the plugin waits for something"
SLOW_SECONDS = 5.0
AT_ONCE = 4
TOO_SLOW = 256
"""What stands for the exit code of a process that was ended because it took too long."""


def try_apart(registry: Registry) -> None:
    """Try each plugin except titan; one that ends its process is broken, one that does not load in time is
    slow, and neither is loaded here."""
    plugins = registry.guests
    tried = habits_of([(plugin.name, plugin.file) for plugin in plugins])
    for plugin, (_, habits, why) in zip(plugins, tried, strict=True):
        plugin.habits = tuple(habits)
        if why == SLOW:
            plugin.leave_out("slow", why)
        elif why is not None:
            plugin.fail(why)


def habits_of(plugins: Sequence[tuple[str, Path | None]]) -> Iterator[tuple[str, list[str], str | None]]:
    """Yield for each plugin its name, its side effects when loaded, and the reason not to load it here, or
    None.

    Args:
        plugins: names, each with the file of one that `-p` added.
    """
    found = _in_processes(plugins, with_torch=False)
    # What a plugin changes in torch is seen only if torch was there before it.
    again = [number for number, (report, _) in enumerate(found) if report and report["torch"]]
    for number, second in zip(
        again, _in_processes([plugins[number] for number in again], with_torch=True), strict=True
    ):
        found[number] = second
    for (name, _), (report, why) in zip(plugins, found, strict=True):
        yield name, report["habits"] if report else [], why


def _in_processes(
    plugins: Sequence[tuple[str, Path | None]], *, with_torch: bool
) -> list[tuple[dict[str, Any] | None, str | None]]:
    """Load each plugin in a process of its own; return what is reported of each, or None and the reason for
    its absence."""
    if not plugins:
        return []
    files = [str(file) if file else None for _, file in plugins]
    with tempfile.TemporaryDirectory(prefix="titan-plugin-") as folder:
        given = [folder, LIMIT_SECONDS, with_torch, [name for name, _ in plugins], files]
        done = subprocess.run(
            [sys.executable, "-P", "-c", "from titancli.registry.isolated_load import main; main()"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            input=json.dumps(given),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise EnvironmentProblem(
                f"plugins cannot be tried in a process of their own: {last}",
                hint="free memory and processes (`ulimit -u`), then try again",
            )
        return [_outcome(Path(folder) / str(number)) for number in range(len(plugins))]


def _outcome(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Return what the process of a plugin left: its report, or None and why there is none."""
    code = int((folder / "code").read_text(encoding="utf-8"))
    said = [(folder / name).read_bytes().decode(errors="replace").strip() for name in ("out", "error")]
    if code == TOO_SLOW:
        return None, SLOW
    if not (folder / "report").is_file():
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return None, ": ".join([f"loading it ends the process ({how})", *said[1].splitlines()[-1:]])
    found = json.loads((folder / "report").read_text(encoding="utf-8"))
    printed = ["prints to stdout"] if said[0] else []
    slow = [f"takes {found['seconds']:.0f} s to load"] if found["seconds"] >= SLOW_SECONDS else []
    return {**found, "habits": [*printed, *slow, *found["habits"]]}, None


# ------------------------------------------------------------------------------------- in another process


def main() -> None:
    """Load plugins, each in a fork of this process, which has loaded titan and nothing else."""
    from titancli.registry.discover import load_plugins

    folder, seconds, with_torch, names, files = json.load(sys.stdin)
    registry = load_plugins(files=[Path(file) for file in files if file])
    if with_torch:
        import torch  # noqa: F401 - what it has now is compared with what it has then
    running: dict[int, tuple[Path, float]] = {}
    for number, name in enumerate(names):
        own = Path(folder) / str(number)
        own.mkdir()
        while len(running) >= AT_ONCE:
            _reap(running)
        if (child := os.fork()) == 0:
            _load(registry, name, own)
        running[child] = own, time.monotonic() + seconds
    while running:
        _reap(running)


def _reap(running: dict[int, tuple[Path, float]]) -> None:
    """Wait a moment for processes, end those that take too long, and write down how each has ended."""
    for child, (folder, deadline) in list(running.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        if code is None and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = TOO_SLOW
        if code is not None:
            (folder / "code").write_text(str(code), encoding="utf-8")
            del running[child]
    time.sleep(0.005)


def _load(registry: Registry, name: str, folder: Path) -> NoReturn:
    """Load a plugin in this fork and write what it did to a file; what it has registered for the end is not
    waited for."""
    signal_at_parents_death(signal.SIGKILL)
    code = 1
    try:
        # Files, not pipes: what the plugin has started may live on, and would hold them.
        for file, number in (("out", 1), ("error", 2)):
            os.dup2(os.open(folder / file, os.O_RDWR | os.O_CREAT, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        found = _did(registry, name)
        (folder / "report").write_text(json.dumps(found), encoding="utf-8")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if error.code is not None and code == 1:
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _did(registry: Registry, name: str) -> dict[str, Any]:
    """Load a plugin and return what it did."""
    before, functions = _state(), _functions()
    began = time.perf_counter()
    registry.load_unguarded(name)
    seconds = time.perf_counter() - began
    habits = [what for key, what in HABITS.items() if before[key] != _state()[key]]
    replaced = [
        key
        for key, value in _functions().items()
        # With the default dtype torch itself puts another of its classes at `torch.Storage`.
        if functions.get(key, value) is not value
        and not (isinstance(value, type) and value.__module__.startswith("torch"))
    ]
    habits += [f"replaces {', '.join(sorted(replaced))}"] if replaced else []
    return {"habits": habits, "seconds": seconds, "torch": "torch" in sys.modules}


HABITS = {
    "folder": "changes the current folder",
    "logging": "sets up logging",
    "environment": "changes environment variables",
    "signals": "handles signals",
    "settings": "changes settings of torch",
    "random": "changes the state of torch's random numbers",
}


def _state() -> dict[str, Any]:
    """Return the state that belongs to the whole process."""
    root = logging.getLogger()
    found: dict[str, Any] = {
        "folder": os.getcwd(),
        "logging": (list(root.handlers), root.level),
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "settings": None,
        "random": None,
    }
    if (torch := sys.modules.get("torch")) is not None:
        found["settings"] = (
            *(torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
            *(torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.get_num_threads()),
            torch.backends.cudnn.benchmark,
        )
        found["random"] = torch.get_rng_state().tolist()
    return found


def _functions() -> dict[str, Any]:
    """Return the functions and classes in torch's modules, and the methods of those classes, by name."""
    found = {}
    for name in list(sys.modules):
        if name != "torch" and not name.startswith("torch."):
            continue
        for attribute, value in names_in(name).items():
            if callable(value):
                found[f"{name}.{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for method, function in list(vars(value).items()):
                    if callable(function) or isinstance(function, (property, staticmethod, classmethod)):
                        found[f"{name}.{attribute}.{method}"] = function
    return found
