"""`[profiling]` and `titan profile`: traces of steps, on a schedule or when asked."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.conftest import Finished
from titancli.cli import main
from titancli.errors import EnvironmentProblem
from titancli.loops.hooks import RunHooks
from titancli.observe import profiler as module
from titancli.observe.profile_request import Requests, Wish, answer_to, ask, withdraw
from titancli.observe.profiler import Profiler
from titancli.recipe.schema import Profiling
from titancli.runs import RunFolder

CPU = torch.device("cpu")
SLOW = ("loss=faulty", "loss.fault=slow", "loss.rank=0", "loss.sleep=0.1", "checkpoint.enable=false")
TRACED = ("profiling.enable_profiling=true", "profiling.profile_freq=4", "profiling.profiler_warmup=1")


def trace(file: Path) -> dict[str, int]:
    """How often each thing that has a name happened in a trace."""
    found: dict[str, int] = {}
    for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]:
        if event.get("cat") == "user_annotation":
            found[event["name"]] = found.get(event["name"], 0) + 1
    return found


def weights(run: Path, step: int) -> dict[str, bytes]:
    folder = run / "checkpoints" / f"step-{step}"
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def test_a_schedule_writes_traces_with_the_phases_and_changes_nothing(
    train: Callable[..., Finished], here: Path
) -> None:
    done = train("tiny.toml", "--run-dir", "traced", *TRACED, "profiling.profiler_active=2")
    assert done.code == 0, done.err
    assert train("tiny.toml", "--run-dir", "plain").code == 0
    assert weights(here / "traced", 6) == weights(here / "plain", 6) != {}
    [folder] = (here / "traced/profile_traces").iterdir()
    assert [file.name for file in folder.iterdir()] == ["rank-0.json.gz"] and folder.name == "step-4"
    found = trace(folder / "rank-0.json.gz")
    assert {name: found.get(name) for name in ("data", "forward", "backward", "clip", "optimizer")} == {
        **dict.fromkeys(("data", "forward", "backward", "clip", "optimizer"), 2)
    }
    assert f"traces of steps 3 to 4 are in {folder}: open them in https://ui.perfetto.dev" in done.err


def test_a_trace_that_cannot_be_written_ends_no_run(train: Callable[..., Finished], here: Path) -> None:
    Path("r").mkdir()
    (here / "r/logs").mkdir()

    def in_the_way() -> None:
        while not (here / "r/events.jsonl").exists():
            time.sleep(0.01)
        (here / "r/profile_traces").write_text("a file")

    thread = threading.Thread(target=in_the_way)
    thread.start()
    done = train("tiny.toml", "--run-dir", "r", *TRACED, "training.steps=8")
    thread.join()
    assert done.code == 0
    assert done.err.count("warning: no trace of steps 4 to 4: ") == 1  # and no second one is tried
    assert "the run continues" in done.err


def test_on_a_cpu_there_are_no_memory_snapshots_which_is_said(
    train: Callable[..., Finished], here: Path
) -> None:
    done = train("tiny.toml", "--run-dir", "r", "profiling.enable_memory_snapshot=true", "training.steps=1")
    assert done.code == 0
    assert "there are no memory snapshots on a CPU" in done.err
    assert not (here / "r/memory_snapshot").exists()


@pytest.mark.ranks
def test_ranks_start_a_trace_that_was_asked_for_at_the_same_step(
    train_on: Callable[..., Finished], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second request meanwhile is refused."""
    run, answers = RunFolder(here / "r"), []

    def asker() -> None:
        while not run.events.exists():
            time.sleep(0.02)
        name = ask(run.path, Wish(2))
        with pytest.raises(EnvironmentProblem, match="another `titan profile` is waiting"):
            ask(run.path, Wish(2))
        while (found := answer_to(run.path, name)) is None or found["state"] == "running":
            time.sleep(0.02)
        answers.append(found)

    thread = threading.Thread(target=asker)
    thread.start()
    done = train_on(
        2, "tiny.toml", "--run-dir", "r", "training.steps=30", "profiling.profiler_warmup=1", *SLOW
    )
    thread.join()
    assert done.code == 0, done.err
    [answer] = answers
    assert answer["state"] == "done" and answer["ranks"] == [0, 1]
    assert answer["last_step"] == answer["first_step"] + 1
    for rank in (0, 1):
        assert trace(Path(answer["traces"], f"rank-{rank}.json.gz"))["forward"] == 2


def test_the_command_prints_the_files(
    train: Callable[..., Finished], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the run is under way, in this process as well."""
    codes: list[int] = []

    def profile() -> None:
        while not RunFolder(here / "r").events.exists():
            time.sleep(0.02)
        codes.append(main(["profile", "r", "--steps", "2", "--memory", "--json"]))

    thread = threading.Thread(target=profile)
    thread.start()
    plugin = ("-p", "./faulty.py", "--run-dir", "r", "training.steps=30")
    done = train("tiny.toml", *plugin, "profiling.profiler_warmup=0", *SLOW)
    thread.join()
    document = json.loads(done.out)
    assert codes == [0] and done.code == 0
    assert trace(Path(document["traces"][0]))["backward"] == 2
    assert document["snapshots"] == [] and document["last_step"] == document["first_step"] + 1
    assert "no memory snapshot" in done.err + capfd.readouterr().err


# ---------------------------------------------------------------------------------------- without a run


@pytest.fixture
def finished(train: Callable[..., Finished], here: Path) -> Path:
    assert train("tiny.toml", "--run-dir", "r", "training.steps=1", "checkpoint.enable=false").code == 0
    return here / "r"


def test_a_run_that_cannot_be_asked_is_refused_by_name(
    finished: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile() -> tuple[int, str]:
        return main(["profile", str(finished)]), capfd.readouterr().err

    code, words = profile()
    assert code == 5 and "is not running: its state is finished" in words
    assert main(["profile", str(finished / "logs")]) == 5
    assert "is not a run folder" in capfd.readouterr().err
    record = json.loads((finished / "run.json").read_text())
    record["attempts"][-1] |= {"outcome": None, "host": "elsewhere"}
    (finished / "run.json").write_text(json.dumps(record))
    code, words = profile()
    assert code == 5 and "was started on elsewhere" in words and "run this command on that machine" in words

    hold = RunFolder(finished).hold()
    monkeypatch.setattr(os, "link", refused)
    code, words = profile()
    assert code == 5 and "profile.request: Permission denied" in words
    hold.release()
    assert main(["profile", str(finished), "--steps", "0"]) == 2


def refused(*arguments: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_run_that_ends_before_is_said_and_the_request_is_gone(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    RunFolder(finished).update_attempt(outcome=None)
    hold = RunFolder(finished).hold()

    def end() -> None:
        while not (finished / "profile.request").exists():
            time.sleep(0.02)
        hold.release()

    threading.Thread(target=end).start()
    assert main(["profile", str(finished)]) == 1
    assert "ended before the trace was recorded" in capfd.readouterr().err
    assert not (finished / "profile.request").exists()


def test_a_request_is_done_once_and_one_that_nobody_waits_for_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("titancli.observe.profile_request.EVERY", 0.0)
    requests = Requests(tmp_path)
    assert requests.wish() is None
    name = ask(tmp_path, Wish(3, memory=True))
    assert requests.wish() == Wish.of(int(Wish(3, memory=True))) == Wish(3, True)
    monkeypatch.setattr(requests, "_remove", lambda: None)  # a folder that lets nothing be removed
    requests.take(first_step=1, last_step=3)
    assert answer_to(tmp_path, name)["state"] == "running"
    assert requests.wish() is None
    withdraw(tmp_path, name)
    ask(tmp_path, Wish(1))
    RunFolder(tmp_path).hold().release()  # the next command that works in the folder
    assert Requests(tmp_path).wish() is None
    (tmp_path / "profile.request").write_text("{")
    assert Requests(tmp_path).wish() is None
    assert "cannot be read and is ignored" in caplog.text


def steps_of(profiler: Profiler, first: int, last: int, asked: dict[int, Wish]) -> list[tuple[int, int]]:
    """The windows that are recorded on the way from one step to another."""
    found = []
    for step in range(first, last):
        profiler.before_step(step, int(asked[step]) if step in asked else 0)
        if profiler._window is not None and (profiler._window.first, profiler._window.last) not in found:
            found.append((profiler._window.first, profiler._window.last))
        profiler.step_done(step + 1)
    return found


def made(tmp_path: Path, rank: int = 1, **section: Any) -> Profiler:
    """Of a rank that records nothing itself."""
    more = {"rank": rank, "world": 2, "device": CPU, "total_steps": 30}
    return Profiler(Profiling(ranks=[0], **section), tmp_path, **more)


@pytest.mark.parametrize("steps", ["1e999", "99999999999999999999", '"many"'])
def test_an_odd_request_ends_no_run(tmp_path: Path, steps: str) -> None:
    (tmp_path / "profile.request").write_text(f'{{"id": "odd", "steps": {steps}}}')
    wish = Requests(tmp_path).wish()
    assert wish is None or int(wish) < 100


def test_windows_end_at_multiples_and_a_request_waits_for_its_warmup(tmp_path: Path) -> None:
    scheduled = made(tmp_path, enable_profiling=True, profiler_active=2)
    assert steps_of(scheduled, 0, 30, {}) == [(9, 10), (19, 20), (29, 30)]
    resumed = made(tmp_path, enable_profiling=True, profiler_active=2)
    assert steps_of(resumed, 9, 15, {}) == [(10, 10)]  # what is left of one
    asked = made(tmp_path)
    assert steps_of(asked, 0, 30, {4: Wish(3), 28: Wish(5)}) == [(8, 10), (29, 30)]


def test_memory_that_runs_out_leaves_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which is pretended."""
    recorded: list[bool] = []
    monkeypatch.setattr(module, "_record_memory", recorded.append)
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).write_bytes(b"a snapshot")
    )
    section = Profiling(enable_memory_snapshot=True, profile_freq=2)
    cuda = torch.device("cuda")
    profiler = Profiler(section, tmp_path, rank=0, world=1, device=cuda, total_steps=9)
    hooks = RunHooks()
    hooks.add(profiler)
    with pytest.raises(RuntimeError), hooks:
        hooks.call("run_start", 0)
        for step in range(3):
            profiler.before_step(step, 0)
            if step == 2:
                raise RuntimeError("around it") from torch.OutOfMemoryError("CUDA out of memory")
            profiler.step_done(step + 1)
    assert recorded == [True, False]
    found = sorted(path.parent.name for path in tmp_path.glob("memory_snapshot/*/rank-0.pickle"))
    assert found == ["step-2", "step-3-out-of-memory"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("profiling.profile_freq=2", "profiler_warmup + profiler_active = 4 steps do not fit into 2"),
        ("profiling.save_traces_folder=../x", "'../x' cannot be the name of a folder in the run folder"),
        ("profiling.save_traces_folder=logs", "'logs' cannot be the name of a folder"),
        ("profiling.save_traces_folder=evaluations", "'evaluations' cannot be the name of a folder"),
        ("profiling.save_traces_folder=sources", "'sources' cannot be the name of a folder"),
        ("profiling.save_traces_folder=memory_snapshot", "this is the folder of the traces"),
        ("profiling.ranks=[0,1]", "there is no rank 1: ranks are numbered from 0 to 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    train: Callable[..., Finished], override: str, words: str
) -> None:
    done = train("tiny.toml", "--dry-run", "profiling.enable_profiling=true", override)
    assert done.code == 3 and words in done.err
