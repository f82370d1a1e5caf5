"""A pytest plugin: instead of dots, print a line for each test package when its last test has ended,
failures immediately, and at the end what the run has verified (`tests/proven.py`).

With `-v` and `-q` the output is that of pytest. The table `tests/durations.json`, seconds and number of
tests by file, tells how long a run takes and determines its order: first the tests without torch, then the
packages with the longest files, so that workers end together. `pytest --record-durations` updates it with
the tests that it runs.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.proven import Fact, lines_of, tables_of

DURATIONS = Path(__file__).with_name("durations.json")
FIRST = ("tests", "tests/recipe", "tests/registry", "tests/cli")
"""The packages that reveal most mistakes and need no torch."""
ROOMS = {
    "tests": "architecture: imports run downward, configs import no torch",
    "tests/recipe": "TOML in; every error is reported with line, column and a fix",
    "tests/registry": "components and plugins: found, distinguished, and isolated from each other",
    "tests/cli": "the command line: output, JSON, exit codes, start-up time",
    "tests/security": "doors from outside: hostile and damaged input is refused, and starts nothing",
    "tests/run": "whole runs: signals, kills, restarts, resumes, ranks that die or hang",
    "tests/ranks": "every layout gives the result of one rank; errors leave no trace",
    "tests/engine": "the verbs compared to a plain torch loop, and everything that is rejected",
    "tests/parallel": "tensor, context, expert and pipeline parallelism, compile, offload",
    "tests/checkpoint": "saved on one layout, loaded on any other; damage is detected and named",
    "tests/faults": "the fault matrix names the tests for each fault",
    "tests/converters": "LoRA: the base unchanged, the same adapters on every layout",
    "tests/data": "each row once, from any position, on any number of ranks",
    "tests/distributed": "collectives, and their errors if a rank is late or gone",
    "tests/docs": "every command and snippet of README and docs is run",
    "tests/generate": "sampling, caches and chat compared to transformers",
    "tests/benchmarks": "variants of a benchmark compute the same; a cut-off benchmark goes on",
    "tests/gpu": "one GPU: nothing waits, memory as planned, kernels compared to dense attention",
    "tests/launchers": "nodes find each other, on any network; manifests of Kubernetes",
    "tests/loops": "SFT and DPO as whole runs, evaluation between steps",
    "tests/loggers": "tables and TensorBoard: each step once, also after a resume",
    "tests/losses": "losses compared to NumPy and finite differences",
    "tests/models": "model families compared to transformers and their published sizes",
    "tests/observe": "metrics, the event log, the live panel",
    "tests/null_gpu": "whole runs on a GPU whose kernels do nothing: waits, launches, memory as planned",
    "tests/optimizers": "AdamW compared to torch's, rounding, the schedule",
    "tests/packaging": "wheels, editable installs, and third-party plugins",
    "tests/planning": "computed memory, traffic and arithmetic match those of a run",
    "tests/real": "a real pretrained model, imported and exported",
    "tests/rl": "the generator compared to the trainer, and text as it comes",
    "plugins/titan-deepep": "DeepEP's documented calls, answered by a stand-in: the all-to-all's gradients",
    "plugins/titan-distil": "distillation compared to torch and TRL, on layouts; a student gains over SFT",
    "plugins/titan-eval": "lm-evaluation-harness: each answer is that on the exported checkpoint",
    "plugins/titan-families": "DeepSeek-V3 and Llama 4: latent attention, groups, iRoPE, as transformers",
    "plugins/titan-float8": "float8: the same result on any layout, plain checkpoints",
    "plugins/titan-flux": "Flux: images, on every supported layout",
    "plugins/titan-ft": "replicas that are killed and come back: the others train on, weights stay equal",
    "plugins/titan-gguf": "GGUF files compared with the checkpoint, by transformers and by llama.cpp",
    "plugins/titan-grain": "Grain: each record once an epoch, on any ranks and from any place",
    "plugins/titan-heads": "rewards, classes and embeddings compared to NumPy, TRL and transformers",
    "plugins/titan-hub": "models pushed to a server on this machine, whole or not, and nothing private",
    "plugins/titan-migrate": "configs of axolotl, LLaMA-Factory, torchtune: each key converted, or reported",
    "plugins/titan-muon": "Muon: equal to torch's on one device, the same on many",
    "plugins/titan-offload": "activations in host memory: the same bits, nothing left on the device",
    "plugins/titan-optimizers": "optimizers compared to torch's and torchao's, on shards as on whole weights",
    "plugins/titan-peers": "copies in memory: nodes that are lost, damaged and full, bit for bit",
    "plugins/titan-ppo": "PPO compared to NumPy and TRL's lines; a run that learns, and resumes bit for bit",
    "plugins/titan-preference": "losses of pairs and of labelled answers compared to NumPy and TRL",
    "plugins/titan-proof": "proofs and bisections name seeded faults, and nothing in what is right",
    "plugins/titan-qlora": "QLoRA: the bits of bitsandbytes, the gradients of a dense model, on every layout",
    "plugins/titan-qwen3-next": "gated DeltaNet compared to its recurrence in NumPy and to transformers",
    "plugins/titan-report": "reports of runs: where each second went, in a browser, in a terminal",
    "plugins/titan-rl": "GRPO as whole runs; its losses and gradients on layouts; rewards that fail",
    "plugins/titan-slurm": "jobs of Slurm: submitted once, requeued, resumed, cancelled",
    "plugins/titan-sweep": "sweeps: each combination once, also after a kill; GPUs and cores shared out",
    "plugins/titan-testing": "the test kit for plugin authors finds all faults, and nothing else",
    "plugins/titan-torchtitan": "torchtitan's job configs: each field converted, or reported",
    "plugins/titan-trackio": "Trackio: its database holds each row once, also after a resume",
    "plugins/titan-transformers": "transformers' modules in titan's engine, compared to transformers",
    "plugins/titan-wandb": "Weights & Biases, offline: each row once, also after a resume",
}
"""What each package verifies."""
QUIET_FOR = 30.0
"""Seconds after which a progress line is printed if no package has ended."""


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def room_of(nodeid: str) -> str:
    return "/".join(file_of(nodeid).split("/")[:-1][:2]) or "."


class Durations:
    """Seconds and tests of each file, as they were recorded."""

    def __init__(self, known: dict[str, tuple[float, int]]) -> None:
        self.known = known
        tests = sum(count for _, count in known.values())
        self.average = sum(seconds for seconds, _ in known.values()) / tests if tests else 0.1

    @classmethod
    def read(cls, path: Path = DURATIONS) -> Durations:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return cls({file: (seconds, count) for file, (seconds, count) in found.items()})

    def of_test(self, nodeid: str) -> float:
        seconds, count = self.known.get(file_of(nodeid), (self.average, 1))
        return max(seconds / count, 0.001)

    def of_file(self, file: str) -> float:
        return self.known.get(file, (self.average, 1))[0]

    def in_order(self, nodeids: Iterable[str]) -> dict[str, int]:
        """The place of each file: rooms together, so that they end one after another."""
        files = {file_of(nodeid) for nodeid in nodeids}
        longest: dict[str, float] = {}
        for file in files:
            room = room_of(file)
            longest[room] = max(longest.get(room, 0.0), self.of_file(file))

        def place(file: str) -> tuple[Any, ...]:
            room = room_of(file)
            first = FIRST.index(room) if room in FIRST else len(FIRST)
            return first, 0.0 if room in FIRST else -longest[room], room, -self.of_file(file), file

        return {file: number for number, file in enumerate(sorted(files, key=place))}

    def write(self, measured: dict[str, tuple[float, int]], root: Path, path: Path = DURATIONS) -> None:
        """Put what was measured in; files that are no longer there go."""
        rounded = {file: (round(seconds, 1), count) for file, (seconds, count) in measured.items()}
        kept = {file: row for file, row in (self.known | rounded).items() if (root / file).exists()}
        rows = (f"  {json.dumps(file)}: {json.dumps(kept[file])}" for file in sorted(kept))
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def spoken(seconds: float) -> str:
    """About how long."""
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Run:
    """What has been reported so far; it prints only where `shown`."""

    def __init__(self, config: pytest.Config, shown: bool) -> None:
        self.config, self.shown = config, shown
        self.durations = Durations.read()
        self.workers: set[str] = set()
        self.waiting: dict[str, float] = {}
        """Tests that have not ended, and the seconds that each is thought to take."""
        self.whole = 0.0
        self.count = 0
        self.left: Counter[str] = Counter()
        """Tests that have not ended, by room."""
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        """By test."""
        self.facts: dict[str, list[Fact]] = {}
        self.began: float | None = None
        self.spoke = 0.0

    @property
    def reporter(self) -> pytest.TerminalReporter:
        found = self.config.pluginmanager.getplugin("terminalreporter")
        assert found is not None
        return found

    # ------------------------------------------------------------------------------------- what is to be run

    def pytest_sessionstart(self) -> None:
        if self.shown:
            self.reporter.showfspath = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self.workers.add(node.gateway.id)
        if not self.count:
            self.expect(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:  # another takes its place
            self.workers.discard(node.gateway.id)

    def expect(self, nodeids: Sequence[str]) -> None:
        self.waiting = {nodeid: self.durations.of_test(nodeid) for nodeid in nodeids}
        self.count, self.whole = len(self.waiting), sum(self.waiting.values())
        self.left = Counter(map(room_of, self.waiting))

    def pytest_runtest_logstart(self) -> None:
        if self.began is None:
            self.began = self.spoke = time.monotonic()
            workers = max(len(self.workers), 1)
            self.say(
                f"{self.count:,} tests in {len(self.left)} {'room' if len(self.left) == 1 else 'rooms'}, "
                f"{workers} {'worker' if workers == 1 else 'workers'}: about {spoken(self.whole / workers)}"
            )

    # ---------------------------------------------------------------------------------------- what has ended

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, Any, Any]:
        """Count the test, and print nothing for it."""
        status = yield
        return (status[0], "", "") if self.shown and status else status

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        nodeid = report.nodeid
        self.seconds[nodeid] += report.duration
        if report.failed:
            self.fail(report)
        elif self.outcomes.get(nodeid) != "failed" and (report.skipped or report.when == "call"):
            self.outcomes[nodeid] = report.outcome
        if report.when == "call":
            for name, value in report.user_properties:
                self.facts.setdefault(name, []).append(Fact(value, report.passed))
        if nodeid in self.waiting and report.when not in ("setup", "call"):  # a worker that dies has no phase
            del self.waiting[nodeid]
            room = room_of(nodeid)
            self.left[room] -= 1
            if not self.left[room]:
                self.tell(room)
            elif time.monotonic() - self.spoke > QUIET_FOR:
                done = self.count - len(self.waiting)
                self.say(f"... {done:,} of {self.count:,} tests, {self.share}, {self.remaining}")

    def fail(self, report: pytest.TestReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(crash.message).strip().partition("\n")[0] if crash else ""
        phase = f" in {report.when}" if report.when in ("setup", "teardown") else ""
        self.say(f"FAILED{phase} {report.nodeid}" + (f": {why}" if why else ""), red=True)
        self.outcomes[report.nodeid] = "failed"

    # --------------------------------------------------------------------------------------------- the lines

    @property
    def share(self) -> str:
        return f"{100 * (1 - sum(self.waiting.values()) / self.whole):3.0f} %" if self.whole else "100 %"

    @property
    def remaining(self) -> str:
        """How long is left, by the table and by how much faster or slower this run is than it."""
        assert self.began is not None
        if not self.waiting:
            return "done"
        workers, left, grace = max(len(self.workers), 1), sum(self.waiting.values()), 20.0
        pace = (time.monotonic() - self.began + grace) / ((self.whole - left) / workers + grace)
        return f"about {spoken(left / workers * pace)} left"

    def tell(self, room: str) -> None:
        found = [nodeid for nodeid in self.outcomes if room_of(nodeid) == room]
        counts = Counter(self.outcomes[nodeid] for nodeid in found)
        shown = ", ".join(
            f"{counts[name]:,} {name}" for name in ("failed", "passed", "skipped") if counts[name]
        )
        seconds = f"{sum(self.seconds[nodeid] for nodeid in found):.0f} s"
        unfinished = f", {self.left[room]:,} not run" if self.left[room] else ""
        self.say(
            f"{room:<20} {shown + unfinished:<24} {seconds:>6} {self.share}  {self.remaining:<17}  "
            + ROOMS.get(room, ""),
            red=bool(counts["failed"]),
        )

    def say(self, text: str, red: bool = False) -> None:
        if not self.shown:
            return
        self.spoke = time.monotonic()
        reporter = self.reporter
        if reporter.isatty and not text.startswith("FAILED"):
            text = text[: shutil.get_terminal_size((110, 24)).columns - 1]
        reporter.ensure_newline()
        reporter.write_line(text.rstrip(), **({"red": True} if red else {}))
        reporter.flush()

    # ------------------------------------------------------------------------------------------------ the end

    def pytest_sessionfinish(self) -> None:
        if self.began is not None:
            for room in sorted(room for room, left in self.left.items() if left and self.tried(room)):
                self.tell(room)
        if self.config.option.record_durations:
            self.record()

    def tried(self, room: str) -> bool:
        return any(room_of(nodeid) == room for nodeid in self.outcomes)

    def record(self) -> None:
        unfit = {file_of(nodeid) for nodeid in self.waiting}
        unfit |= {file_of(nodeid) for nodeid, outcome in self.outcomes.items() if outcome == "failed"}
        measured: dict[str, tuple[float, int]] = {}
        for nodeid in self.outcomes:
            if (file := file_of(nodeid)) not in unfit:
                seconds, count = measured.get(file, (0.0, 0))
                measured[file] = (seconds + self.seconds[nodeid], count + 1)
        self.durations.write(measured, self.config.rootpath)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        verbosity = self.config.get_verbosity()
        if verbosity < 0 or not self.facts:
            return
        if self.config.option.tables or verbosity > 0:
            for title, table in tables_of(self.facts):
                terminalreporter.section(title)
                for line in table:
                    terminalreporter.write_line(line)
        terminalreporter.section("what was proven")
        for line, wrong in lines_of(self.facts, self.outcomes):
            terminalreporter.write_line(line, **({"red": True} if wrong else {}))


# ---------------------------------------------------------------------------------------------- of the plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("summary of the tests")
    group.addoption("--tables", action="store_true", help="print the tables behind the summary, row by row")
    group.addoption(
        "--record-durations",
        action="store_true",
        help="write how long each file took into tests/durations.json",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    in_part = config.option.keyword or any("::" in word for word in config.args)
    if config.option.record_durations and in_part:
        raise pytest.UsageError("--record-durations needs whole files")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would hand out the files with most tests first
    terminal = config.pluginmanager.hasplugin("terminalreporter")
    shown = terminal and config.get_verbosity(pytest.Config.VERBOSITY_TEST_CASES) == 0
    config.pluginmanager.register(Run(config, shown), "titan-summary")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Also on each worker of xdist, which hands files out in this order."""
    place = Durations.read().in_order(item.nodeid for item in items)
    items.sort(key=lambda item: place[file_of(item.nodeid)])
