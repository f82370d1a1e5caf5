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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from titancli.registry.plugins import names_in

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

LIMIT_SECONDS = 60.0
"""Time after which a plugin is given up; a busy machine may take seconds for torch."""
SLOW = "it was not loaded in time: the machine may be busy, or the plugin waits for something"
SLOW_SECONDS = 5.0
AT_ONCE = 4


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
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield from threads.map(_tried, plugins)


def _tried(plugin: tuple[str, Path | None]) -> tuple[str, list[str], str | None]:
    name, file = plugin
    found, why = _in_process(name, file, with_torch=False)
    if found and found["torch"]:  # what it changes there is seen only if torch was there before it
        found, why = _in_process(name, file, with_torch=True)
    return name, found["habits"] if found else [], why


def _in_process(
    name: str, file: Path | None, *, with_torch: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """Return a process's report on a plugin, or None and the reason for its absence."""
    with tempfile.TemporaryDirectory(prefix="titan-plugin-") as folder:
        report = Path(folder) / "report.json"
        given = json.dumps([name, str(file) if file else None, with_torch, str(report)])
        command = [
            sys.executable,
            "-P",
            "-c",
            "from titancli.registry.isolated_load import main; main()",
            given,
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # Files, not pipes: what the plugin has started may live on, and would hold them.
        with open(Path(folder) / "out", "w+b") as out, open(Path(folder) / "error", "w+b") as error:
            try:
                code = subprocess.run(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=error,
                    timeout=LIMIT_SECONDS,
                ).returncode
            except subprocess.TimeoutExpired:
                return None, SLOW
            said = [_text(out), _text(error)]
        if not report.is_file():
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return None, ": ".join([f"loading it ends the process ({how})", *said[1].splitlines()[-1:]])
        found = json.loads(report.read_text(encoding="utf-8"))
    printed = ["prints to stdout"] if said[0] else []
    slow = [f"takes {found['seconds']:.0f} s to load"] if found["seconds"] >= SLOW_SECONDS else []
    return {**found, "habits": [*printed, *slow, *found["habits"]]}, None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


# ------------------------------------------------------------------------------------------- in that process


def main() -> None:
    """Load one plugin and write what it did to a file."""
    from titancli.registry.discover import load_plugins

    name, file, with_torch, report = json.loads(sys.argv[1])
    registry = load_plugins(files=[Path(file)] if file else [])
    if with_torch:
        import torch  # noqa: F401 - what it has now is compared with what it has then
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
    found = {"habits": habits, "seconds": seconds, "torch": "torch" in sys.modules}
    Path(report).write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # what a plugin has registered for the end is not to be waited for


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
