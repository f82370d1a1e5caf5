"""A tiny recipe, and ways to train it: inside this process (torch is imported once), or by the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import Cluster, Node
from tests.ranks import Ranks
from tests.run import pool
from titancli.observe.events import read_events

RECIPE = """\
extends = "titan:llama3_debug"
name = "tiny"
[model]
dim = 32
n_layers = 2
[dataset]
type = "text_files"
paths = ["text.txt"]
[lr_scheduler]
warmup_steps = 1
[training]
steps = 6
seq_len = 32
local_batch_size = 2
[metrics]
log_freq = 1
[checkpoint]
interval = 2
"""


@dataclass
class Finished:
    """A command's end."""

    code: int
    out: str
    err: str


def furnish(folder: Path) -> Path:
    """Put the recipe `tiny.toml`, its text, and the plugin `faulty.py` into a folder."""
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "text.txt").write_text("".join(f"line {n} of a text that is not long\n" for n in range(4000)))
    shutil.copy(Path(__file__).with_name("faulty.py"), folder / "faulty.py")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder, furnished. Modules that a test loads from it are forgotten: the next has its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITAN_RUNS", raising=False)
    before = set(sys.modules)
    yield furnish(tmp_path)
    for name in sys.modules.keys() - before:
        if tmp_path in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


def in_this_process(capfd: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """`titan …` inside this process, in the folder that it is in."""
    from titancli.cli import main

    def call(*arguments: Any) -> Finished:
        capfd.readouterr()
        sys.modules.pop("faulty", None)  # each folder has a copy of its own
        return Finished(main([str(argument) for argument in arguments]), *capfd.readouterr())

    return call


def train_here(*arguments: str) -> int:
    """`titan train …` inside this process."""
    from titancli import registry
    from titancli.cli import main

    sys.modules.pop("faulty", None)  # each folder has a copy of its own
    try:
        return main(["train", *arguments])
    finally:
        registry.configure()


def trained(folder: Path, *arguments: str) -> None:
    """Train `tiny.toml` in a new folder, and come back; for fixtures that several tests take copies of."""
    before = Path.cwd()
    os.chdir(furnish(folder))
    try:
        assert train_here("tiny.toml", *arguments) == 0
    finally:
        os.chdir(before)


def on_pool(ranks: Ranks, count: int) -> tuple[str, ...]:
    """What makes a run take ranks that stand already."""
    pool.pool = ranks
    return ("-p", "./faulty.py", "launcher=on_pool", "--nproc", str(count))


@pytest.fixture
def train(here: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """`titan train …` inside this process."""
    return lambda *arguments: Finished(train_here(*arguments), *capfd.readouterr())


@pytest.fixture
def train_on(train: Callable[..., Finished], ranks: Ranks) -> Callable[..., Finished]:
    """`train_on(n, …)`: `titan train … --nproc n`, on ranks that stand already."""
    return lambda count, *arguments: train(*arguments, *on_pool(ranks, count))


@pytest.fixture(scope="session")
def reference(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[dict[int, float], Path]]:
    """`reference(n, …)`: losses and folder of a run of `tiny.toml` on n ranks, made once for all tests."""
    done: dict[tuple[int, tuple[str, ...]], Path] = {}

    def run(count: int, *arguments: str) -> tuple[dict[int, float], Path]:
        key = (count, arguments)
        if key not in done:
            folder, before = furnish(tmp_path_factory.mktemp("reference")), Path.cwd()
            os.chdir(folder)
            try:
                code = train_here("tiny.toml", "--run-dir", "r", *arguments, *on_pool(ranks, count))
            finally:
                os.chdir(before)
            assert code == 0
            done[key] = folder / "r"
        return losses(done[key]), done[key]

    return run


class Command:
    """`titan train …` as a process of its own; `on` a node, or else on this machine."""

    def __init__(self, here: Path, *arguments: str, on: Node | None = None, **options: Any) -> None:
        titan = Path(sys.executable).with_name("titan")
        if on is not None:
            options["env"] = {**options.get("env", os.environ), **on.environment}
        self._files = [tempfile.TemporaryFile("w+") for _ in ("out", "err")]  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(titan), "train", *arguments],
            cwd=here,
            stdout=self._files[0],
            stderr=self._files[1],
            **options,
        )

    def until_step(self, events: Path, step: int, seconds: float = 90.0) -> None:
        """Wait until a step is done."""
        deadline = time.monotonic() + seconds
        while not any(e["event"] == "step" and e["step"] >= step for e in read_events(events)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"step {step} was never done: {self.wait()}")
            time.sleep(0.05)

    def until_said(self, text: str, seconds: float = 90.0) -> None:
        """Wait until a text is on stderr."""
        deadline = time.monotonic() + seconds
        said = Path(f"/proc/self/fd/{self._files[1].fileno()}")
        while text not in said.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{text} was never said: {self.wait()}")
            time.sleep(0.02)

    def wait(self, seconds: float = 200.0) -> Finished:
        try:
            code = self.process.wait(seconds)
        finally:
            self.process.kill()
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return Finished(code, *texts)


@pytest.fixture
def command(here: Path) -> Callable[..., Command]:
    return lambda *arguments, **options: Command(here, *arguments, **options)


@pytest.fixture
def start(cluster: Cluster, here: Path) -> Callable[..., Command]:
    """`start(node, …)`: `titan train tiny.toml … --nnodes 2` on a node."""
    from tests.run.on_nodes import FAULTY, PATIENT

    line = ("tiny.toml", "--run-dir", "r", "--nnodes", "2", "--nproc", "1", "--resume", *FAULTY, *PATIENT)
    return lambda node, *arguments, **options: Command(here, *line, *arguments, on=node, **options)


def losses(run: Path) -> dict[int, float]:
    """The loss of each step in a run's event log."""
    return {
        e["step"]: e["metrics"]["loss"] for e in read_events(run / "events.jsonl") if e["event"] == "step"
    }


def workers_of(run: Path, seconds: float = 5.0) -> list[str]:
    """Command lines of processes that work for a run and, given so much time, do not come to their end."""
    deadline = time.monotonic() + seconds
    while (found := _workers(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _workers(run: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "titancli.worker.rank" in line and str(run) in line:
                found.append(line)
    return found
