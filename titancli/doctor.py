"""The checks of `titan doctor`: the installation, the machine, and the plugins. Torch-free.

torch is queried in a process of its own: a torch that cannot be imported, or that crashes, is a finding.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titancli.errors import ExitCode
from titancli.launchers.devices import visible_gpus
from titancli.parallel.programs import HOW_TO_GET, missing_programs
from titancli.provenance import versions
from titancli.registry import current
from titancli.registry.isolated_load import try_apart
from titancli.registry.kinds import BUILTIN
from titancli.runs import runs_root
from titancli.tested_systems import GPU, LAYOUTS, PYTHON, TORCH
from titancli.torch_version import LACKS, NEWEST, OLDEST, lacks, older_than, torch_version, untested

State = Literal["ok", "warning", "error"]
ENOUGH_DISK = 10 << 30
VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "OMP_", "MASTER_", "TITAN_", "HF_H", "PYTORCH_")
"""Prefixes of environment variables that affect a run. Tokens are not among them."""
ASK_TORCH = """
import json, torch, torch.distributed as dist
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda or torch.version.hip,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "backends": [name for name in ("nccl", "gloo") if getattr(dist, f"is_{name}_available")()],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
    "threads": torch.get_num_threads(),
}))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    found: str
    hint: str | None = None
    """What to do."""
    exit_code: ExitCode = ExitCode.OK
    """The exit code that it causes."""


def findings() -> Iterator[Finding]:
    """Yield all findings, in the order in which they are printed."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _command,
        _packages,
        _torch_and_gpus,
        _compiling,
        _tested,
        _environment,
        _memory,
        _disk,
        _plugins,
    )
    for check in checks:
        yield from check()


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()}, {sys.executable}, {platform.platform()}")


def _command() -> Iterator[Finding]:
    """Report the `titan` that a shell finds: often that of another environment."""
    found, ours = shutil.which("titan"), Path(sys.executable).parent / "titan"
    if found is None:
        hint = f"add {ours.parent} to PATH, or use {sys.executable} -m titancli"
        yield Finding("titan", "warning", "titan is not on the PATH", hint)
    elif ours.exists() and not os.path.samefile(found, ours):
        hint = f"this titan is in {ours.parent}; activate that environment, or put it first on the PATH"
        yield Finding("titan", "warning", f"the PATH has another titan first: {found}", hint)
    else:
        yield Finding("titan", "ok", found)


def _packages() -> Iterator[Finding]:
    yield Finding("packages", "ok", ", ".join(f"{name} {v}" for name, v in versions().items()))


def _torch_and_gpus() -> Iterator[Finding]:
    gpus = visible_gpus()
    torch, why = _ask_torch()
    if torch is None:
        hint = "reinstall torch for this machine"
        yield Finding("torch", "error", f"cannot be imported: {why}", hint, ExitCode.ENVIRONMENT)
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU only"
    nccl = f", NCCL {torch['nccl']}" if torch["nccl"] else ""
    if older_than(OLDEST):
        hint = f"pip install 'torch>={OLDEST}'"
        yield Finding(
            "torch",
            "error",
            f"{torch['version']} is too old: titan runs on {OLDEST} to {NEWEST}",
            hint,
            ExitCode.ENVIRONMENT,
        )
        return
    yield Finding(
        "torch",
        "ok",
        f"{torch['version']} ({build}{nccl}), backends {', '.join(torch['backends']) or 'none'}, "
        f"{torch['threads']} CPU threads",
    )
    for lack in filter(lacks, LACKS):
        hint = f"install torch {lack.since} or newer"
        yield Finding("torch lacks", "warning", f"{lack.what}: {lack.why} in {torch_version()}", hint)
    if gpus and not torch["devices"]:
        hint = "install a CUDA build of torch, or check the driver with nvidia-smi"
        yield Finding("gpus", "warning", f"{gpus} installed, but torch cannot use any", hint)
    elif torch["devices"]:
        yield Finding("gpus", "ok", f"{len(torch['devices'])}: {', '.join(sorted(set(torch['devices'])))}")
    else:
        yield Finding("gpus", "ok", "none; runs use the CPU")


def _compiling() -> Iterator[Finding]:
    """Report whether `compile.enable` works here. A GPU's kernels need none of these programs."""
    if visible_gpus():
        return
    if missing := missing_programs():
        words = f"compile.enable needs {' and '.join(missing)} on a CPU, not found on PATH"
        yield Finding("compile", "warning", words, HOW_TO_GET)
    else:
        yield Finding("compile", "ok", "compile.enable works on this CPU")


def _tested() -> Iterator[Finding]:
    """Report the rows of README's table of tested systems that match this machine."""
    here = platform.python_version_tuple()
    python = f"{here[0]}.{here[1]}"
    if python in PYTHON:
        yield Finding("python tested", "ok", PYTHON[python].summary_line())
    else:
        *_, newest = PYTHON
        hint = f"if something fails, try Python {newest}, and report it"
        yield Finding("python tested", "warning", f"titan has never been run on Python {python}", hint)
    installed = torch_version()
    if newer := untested():
        hint = f"if something fails, try torch {NEWEST}, and report it"
        yield Finding("torch tested", "warning", newer, hint)
    elif installed is not None and (row := TORCH.get(f"{installed.major}.{installed.minor}")):
        yield Finding("torch tested", "ok", row.summary_line())
    if visible_gpus():
        hint = f"`{GPU.command}` of a checkout runs the tests that need one; please report what they say"
        yield Finding("gpus tested", "warning", "titan has not been run on a GPU yet", hint)
    else:
        yield Finding("gpus tested", "ok", f"none here; {LAYOUTS.summary_line()}")


def _ask_torch() -> tuple[dict[str, Any] | None, str]:
    command = [sys.executable, "-P", "-c", ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return None, "no response within two minutes"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return None, last
    return json.loads(done.stdout.splitlines()[-1]), ""


def _environment() -> Iterator[Finding]:
    kept = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    text = ", ".join(f"{name}={value}" for name, value in kept.items())
    yield Finding("environment", "ok", text or "no variables that affect a run are set")


def _memory() -> Iterator[Finding]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # not every system tells
        return
    yield Finding("memory", "ok", f"{_gib(total)}, {os.cpu_count()} CPUs")


def _disk() -> Iterator[Finding]:
    """Report whether the folder of runs can be written, and its free space."""
    runs = runs_root()
    folder = next(path for path in (runs, *runs.parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        hint = "run in another folder, or set TITAN_RUNS"
        words = f"{folder} cannot be written: {error.strerror}"
        yield Finding("runs", "error", words, hint, ExitCode.ENVIRONMENT)
        return
    if free < ENOUGH_DISK:
        hint = (
            "set TITAN_RUNS to a folder on a larger disk, or keep fewer checkpoints "
            "(checkpoint.keep_latest_k)"
        )
        yield Finding("runs", "warning", f"{runs}: {_gib(free)} free", hint)
    else:
        yield Finding("runs", "ok", f"{runs}: {_gib(free)} free")


def _plugins() -> Iterator[Finding]:
    registry = current()
    try_apart(registry)
    registry.check_targets()
    for plugin in registry.plugins:
        name = f"plugin {plugin.name}"
        loaded = f"{plugin.version or plugin.file or '-'}, {1000 * plugin.seconds:.0f} ms"
        if plugin.state == "broken":
            cause = (plugin.error or "").strip().splitlines()[-1]
            hint = f"titan plugin show {plugin.name} shows the error; -p no:{plugin.name} disables the plugin"
            yield Finding(name, "error", f"broken: {cause}", hint, ExitCode.PLUGIN)
        elif plugin.state == "missing":
            yield Finding(name, "warning", plugin.error or "missing", "install it, or change TITAN_PLUGINS")
        elif plugin.state == "slow":
            hint = f"try again; -p no:{plugin.name} disables the plugin"
            yield Finding(name, "warning", plugin.error or "slow", hint)
        elif plugin.torch or plugin.habits:
            habits = ["imports torch, which slows down every command"] * plugin.torch + list(plugin.habits)
            hint = "report this to its author: a plugin only offers components as it is loaded"
            yield Finding(name, "warning", f"{loaded}; it {', '.join(habits)}", hint)
        elif plugin.clashes and plugin.name != BUILTIN:
            hint = f"a recipe that means one of them must write its full name, e.g. {plugin.name}/…"
            yield Finding(name, "warning", f"{loaded}; others have its {', '.join(plugin.clashes)} too", hint)
        else:
            yield Finding(name, "ok", loaded if plugin.state == "ok" else plugin.error or plugin.state)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
