"""What a plugin does beside offering components is seen in a process of its own, and harms no command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.registry.distributions import Site, loss
from titan_testing import recipe
from titancli.registry import isolated_load
from titancli.registry.discover import load_plugins

PATCHES = """
import torch
old = torch.nn.functional.silu
torch.nn.functional.silu = lambda *x, **y: old(*x, **y) * 2
def step(self, *x, **y): return None
torch.optim.Adam.step = step
class Own(torch.nn.Linear): pass
torch.nn.Bilinear = Own
torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
"""
LAZY = """
import importlib.util, sys
spec = importlib.util.find_spec('this')
spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules['this'] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules['this'])
"""
"""A module that prints when it is first asked for something."""
HABITS: dict[str, tuple[str, list[str]]] = {
    "clean": ("import os, json, logging\n", []),
    "folder": ("import os\nos.chdir('/')\n", ["changes the current folder"]),
    "prints": ("import os\nos.write(1, b'banner\\n')\n", ["prints to stdout"]),
    "logs": ("import logging\nlogging.basicConfig(level=0)\n", ["sets up logging"]),
    "environ": ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\n", ["changes environment variables"]),
    "handles": ("import signal\nsignal.signal(signal.SIGTERM, print)\n", ["handles signals"]),
    "imports": ("import torch, torch.nn.attention\n", []),
    "lazy": (LAZY, []),
    "patches": (
        PATCHES,
        [
            "changes settings of torch",
            "changes the state of torch's random numbers",
            "replaces torch.nn.Bilinear, torch.nn.functional.silu, torch.optim.adam.Adam.step",
        ],
    ),
}
ENDS = {
    "exits": ("import os\nos._exit(3)\n", "loading it ends the process (exit code 3)"),
    "aborts": ("import os\nos.abort()\n", "loading it ends the process (signal 6)"),
    "hangs": ("import time\ntime.sleep(3600)\n", isolated_load.SLOW),
}
"""What cannot be loaded in the process of a command."""


def install(site: Site, cases: Mapping[str, tuple[str, object]]) -> None:
    for name, (code, _) in cases.items():
        site.add(name, code + loss(name).replace("nowhere:build", f"{name}_{name}:Config"))


def test_what_a_plugin_does_is_named(site: Site) -> None:
    install(site, HABITS)
    found = {
        name: (habits, why)
        for name, habits, why in isolated_load.habits_of([(name, None) for name in HABITS])
    }
    assert found == {name: (words, None) for name, (_, words) in HABITS.items()}


def test_what_ends_the_process_is_named_and_not_loaded_here(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_load, "LIMIT_SECONDS", 1.0)
    monkeypatch.setenv("TITAN_PLUGINS", "hangs")
    install(site, {"hangs": ENDS["hangs"]})
    registry = load_plugins()
    isolated_load.try_apart(registry)
    (found,) = [plugin for plugin in registry.plugins if plugin.name == "hangs"]
    assert found.state == "slow" and found.error == ENDS["hangs"][1] and not found.components
    monkeypatch.setattr(isolated_load, "LIMIT_SECONDS", 60.0)
    monkeypatch.setenv("TITAN_PLUGINS", "exits,aborts")
    install(site, {name: case for name, case in ENDS.items() if name != "hangs"})
    registry = load_plugins()
    isolated_load.try_apart(registry)
    for found in registry.plugins:
        if found.name in ENDS and found.state != "unlisted":
            assert found.state == "broken" and (found.error or "").startswith(ENDS[found.name][1]), found


def titan(site: Site, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site.folder), **env}
    command = [sys.executable, "-m", "titancli", *map(str, arguments)]
    folder = site.folder.parent
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_a_command_is_not_changed_by_what_a_plugin_does(site: Site, tmp_path: Path) -> None:
    """stdout is one document, paths are relative to the folder, and logging is the command's."""
    install(site, {name: HABITS[name] for name in ("folder", "prints", "logs")})
    recipe(tmp_path)
    done = titan(
        site, "validate", "recipe.toml", "loss=folder", "--format=json", TITAN_PLUGINS="folder,prints,logs"
    )
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stderr
    assert "banner" in done.stderr


def test_what_is_loaded_when_it_is_needed_is_not_loaded_by_looking_at_it(site: Site, tmp_path: Path) -> None:
    install(site, {"lazy": HABITS["lazy"]})
    recipe(tmp_path)
    done = titan(site, "validate", "recipe.toml", "loss=lazy", TITAN_PLUGINS="lazy")
    assert done.returncode == 0 and "Zen" not in done.stdout + done.stderr, done.stderr


def test_what_a_plugin_changes_in_torch_is_told(site: Site, tmp_path: Path) -> None:
    real = loss("patches").replace("nowhere:build", "titancli.losses.cross_entropy:CrossEntropy")
    site.add("patches", HABITS["patches"][0] + real)
    recipe(tmp_path)
    done = titan(site, "train", "recipe.toml", "training.steps=1", "--dry-run", TITAN_PLUGINS="patches")
    assert done.returncode == 0, done.stderr
    assert "note: the plugin patches, which this recipe does not use, imports torch" in done.stderr
    used = titan(site, "train", "recipe.toml", "loss=patches/patches", "--dry-run", TITAN_PLUGINS="patches")
    assert used.returncode == 0 and "which this recipe does not use" not in used.stderr
    told = titan(site, "doctor", TITAN_PLUGINS="patches").stdout
    assert "it imports torch, which slows down every command, changes settings of torch" in told
    assert "replaces torch.nn.Bilinear, torch.nn.functional.silu" in told


def test_a_fork_ends_with_who_tries_it(site: Site, tmp_path: Path) -> None:
    install(site, {"hangs": ENDS["hangs"]})
    (tmp_path / "tried").mkdir()
    command = [sys.executable, "-P", "-c", "from titancli.registry.isolated_load import main; main()"]
    paths = os.pathsep.join([str(site.folder), *filter(None, sys.path)])
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as trying:
        assert trying.stdin is not None
        trying.stdin.write(json.dumps([str(tmp_path / "tried"), 60.0, False, ["hangs"], [None]]).encode())
        trying.stdin.close()
        below = Path(f"/proc/{trying.pid}/task/{trying.pid}/children")
        assert wait_until(lambda: (tmp_path / "tried/0/error").exists())  # its output is in files: it loads
        (fork,) = below.read_text().split()
        trying.kill()
    assert wait_until(lambda: is_gone(fork))


def is_gone(process: str) -> bool:
    """Return whether a process has ended; one that nobody has waited for is still listed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happened()
