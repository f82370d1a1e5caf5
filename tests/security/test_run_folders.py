"""A run folder that somebody else has made: what `titan runs` and a start do with it."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cli import run_folders
from tests.cli.run_folders import attempt, began, ended, event, step
from tests.run.conftest import Finished
from titancli.checkpoint.format.metadata import open_metadata
from titancli.checkpoint.format.tensorfile import read_header
from titancli.cli import main
from titancli.errors import EnvironmentProblem
from titancli.files import NotRegular, regular
from titancli.observe.digests import path_of
from titancli.observe.events import EventLog
from titancli.observe.summary import runs_in, summarize
from titancli.process import OutputLog
from titancli.runs import RunFolder
from titancli.terminal import printable

Train = Callable[..., Finished]
TRAP = "\x1b]0;owned\x07\x1b[2J\x1b[31mtrap\x9b5m\x7f\u202e\r\b"
"""A title, a clear screen, a colour, a control sequence in one character, a delete, a direction, a return."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`good` and `bad`, side by side."""
    monkeypatch.setenv("TITAN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    for name in ("good", "bad"):
        run_folders.make(tmp_path / "runs" / name, [began(), step(1, 1.0), step(2, 2.0)])
    return tmp_path / "runs"


# ---------------------------------------------------------------------------------------- what ends the list


def deep(path: Path) -> None:
    path.write_text('{"event": ' + "[" * 200_000 + "\n")


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def endless(path: Path) -> None:
    """A terabyte, of which nothing lies on the disk."""
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def server(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(path))


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 9)


HARM = [deep, fifo, device, folder, endless, server, garbage]
FILES = ["run.json", "events.jsonl", "run.lock", "ranks.lock", "checkpoints", "logs", "logs/rank-0.log"]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("name", FILES)
def test_one_folder_neither_ends_nor_holds_up_the_list_of_all(
    runs: Path, name: str, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    if (path := runs / "bad" / name).is_dir():
        shutil.rmtree(path)
    harm(path)
    before = [(entry, entry.lstat().st_mtime_ns) for entry in sorted(runs.rglob("*"))]
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + (2 << 30), limit[1]))
    try:
        assert main(["runs", "list", "--json"]) == 0
        found = json.loads(capfd.readouterr().out)["runs"]
        assert [Path(run["path"]).name for run in found] == ["bad", "good"]
        assert found[1]["state"] == "finished"
        for line in (["show"], ["logs"], ["compare", "runs/good"], ["watch"]):
            if line == ["watch"] and found[0]["state"] in ("running", "unknown"):
                continue  # it would wait for its end
            if line == ["logs"] and harm is endless and name == "logs/rank-0.log":
                continue  # who asks for a terabyte gets it
            assert main(["runs", line[0], "runs/bad", *line[1:]]) in (0, 5)
            assert "Traceback" not in capfd.readouterr().err
        assert main(["report", "runs/bad", "--text"]) in (0, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert [(entry, entry.lstat().st_mtime_ns) for entry in sorted(runs.rglob("*"))] == before


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([10**400, "", "x", TRAP]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMES = [*attempt(), "token", "serial", "step", "ended"]
OUTCOME = ["why", "signal", "step", "checkpoint", "metrics", "error"]


@settings(max_examples=60)
@example({"git": {"": None}}, {}, {}, {})
@given(
    st.dictionaries(st.sampled_from(NAMES), JSON, min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(OUTCOME), JSON, max_size=2),
    st.dictionaries(st.sampled_from(["run_id", "name", "created", "format", "attempts"]), JSON, max_size=1),
    st.dictionaries(
        st.sampled_from(["event", "time", "step", "steps", "metrics", "version"]), JSON, max_size=2
    ),
)
def test_a_record_of_anything_is_summed_up(
    tmp_path_factory: pytest.TempPathFactory,
    values: dict[str, Any],
    outcome: dict[str, Any],
    top: dict[str, Any],
    last: dict[str, Any],
) -> None:
    path = tmp_path_factory.mktemp("runs") / "r"
    run_folders.make(
        path, [began(), {**step(1, 1.0), **last}], [{**attempt({**ended("failed"), **outcome}), **values}]
    )
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**record, **top}))
    found, unreadable = runs_in(path.parent)
    assert [run.path for run in found] == [path] and unreadable == []
    for line in (["list", str(path.parent)], ["show", str(path)]):
        assert main(["runs", *line]) == 0, (values, outcome, top, last)


# ------------------------------------------------------------------------------------------ what is followed


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine\n")
    return path


def test_runs_rm_touches_nothing_before_it_asks_nor_through_a_link(
    runs: Path, victim: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("run.lock", "ranks.lock"):
        (runs / "bad" / name).symlink_to(victim)
        assert main(["runs", "rm", "runs/bad", "--yes"]) == 5
        assert f"{name}: it is a link, and no link is written through" in capfd.readouterr().err
        (runs / "bad" / name).unlink()
    assert victim.read_text() == "mine\n"
    before = {path: path.lstat() for path in runs.rglob("*")}
    assert main(["runs", "rm", "runs/bad"]) == 2  # not a terminal
    assert {path: path.lstat() for path in runs.rglob("*")} == before
    assert main(["runs", "rm", "runs/bad", "--yes"]) == 0
    assert sorted(path.name for path in runs.iterdir()) == ["good"]


def test_runs_rm_names_who_is_at_work(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hold = RunFolder(runs / "bad").hold()
    assert main(["runs", "rm", "runs/bad"]) == 5
    assert f"is in use by process {os.getpid()} on host" in capfd.readouterr().err
    hold.release()


@pytest.mark.parametrize(
    "name",
    ["run.lock", "ranks.lock", "events.jsonl", "logs/rank-0.log", "metrics.csv", "digests/1.0/rank-0.bin"],
)
def test_a_start_writes_through_no_link(train: Train, here: Path, victim: Path, name: str) -> None:
    """Nor does it need to: a folder that holds only logs and locks is taken for a start that failed."""
    made = here / "r" / name
    made.parent.mkdir(parents=True)
    made.symlink_to(victim)
    if name.split("/")[0] not in ("run.lock", "ranks.lock", "logs"):
        assert train("tiny.toml", "--run-dir", "r").code == 5  # in use for something else
        shutil.rmtree(here / "r")
        assert train("tiny.toml", "--run-dir", "r", "training.steps=1").code == 0
        made.parent.mkdir(parents=True, exist_ok=True)
        made.unlink(missing_ok=True)
        if name.startswith("digests"):  # those of the second attempt
            made = path_of(here / "r", 2, 0, 0)
            made.parent.mkdir()
        made.symlink_to(victim)
    done = train("tiny.toml", "--run-dir", "r", "--resume", "training.steps=2", 'loggers=["csv"]')
    assert "it is a link, and no link is written through" in done.err
    assert done.code == (5 if name in ("run.lock", "ranks.lock", "events.jsonl") else 0), done.err
    assert victim.read_text() == "mine\n"


def test_a_run_folder_that_is_itself_reached_through_a_link_is_fine(train: Train, here: Path) -> None:
    (here / "big").mkdir()
    (here / "r").symlink_to(here / "big")
    assert train("tiny.toml", "--run-dir", "r", "training.steps=1").code == 0
    shutil.move(here / "big/checkpoints", here / "elsewhere")  # a disk of its own
    (here / "big/checkpoints").symlink_to(here / "elsewhere")
    assert train("r", "--resume", "training.steps=2").code == 0


def test_logs_events_and_what_opens_them(tmp_path: Path, victim: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).symlink_to(victim)
    OutputLog(tmp_path / "a").write("x")
    with pytest.raises(EnvironmentProblem, match="it is a link"):
        EventLog(tmp_path / "b")
    with pytest.raises(NotRegular):
        open(tmp_path / "c", "w", opener=regular).close()
    with open(tmp_path / "c", opener=regular) as file:  # to read one is no harm
        assert file.read() == victim.read_text() == "mine\n"
    with pytest.raises(FileNotFoundError):
        open(tmp_path / "none", opener=regular).close()


# ------------------------------------------------------------------------------------------- what is printed


def test_what_a_terminal_would_obey_is_left_out() -> None:
    assert printable(TRAP) == "trap?5m????"
    assert printable("loss äöü 日本 \x1b[1;31mred\x1b[0m") == "loss äöü 日本 red"
    assert printable("a\nb\tc\rd", "\n\t") == "a\nb\tc?d"
    assert printable("\x1b[9") == "?[9"  # cut off


def trapped(value: Any) -> Any:
    """The same with the trap in each text of it, but for what is a time or a word that titan looks at."""
    if isinstance(value, str):
        return f"{value}{TRAP}"
    if isinstance(value, dict):
        return {key: trapped(item) for key, item in value.items()}
    return [trapped(item) for item in value] if isinstance(value, list) else value


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose every text steers the terminal, its own name included."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TITAN_RUNS", str(tmp_path))
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    outcome = {**ended("failed", 2, error=f"it fell{TRAP}", signal=TRAP), "metrics": {f"m{TRAP}": 1.0}}
    told = trapped(attempt(git={"commit": "c", "branch": "b"}, drift=["a"], checkpoint="step-1")) | {
        "mesh": run_folders.MESH, "outcome": outcome, "world": 1
    }  # fmt: skip
    lines = [
        {**began(), "device": f"CPU{TRAP}", "mesh": {f"dp{TRAP}": 2}, "checkpoint": f"/x/step{TRAP}"},
        {**began(), "epochs": f"1{TRAP}"},
        step(1, 1.0, **{f"val{TRAP}/loss": 1.0, "loss": 2.0}),
        event("validation", 1.0, step=1, seconds=1.0, metrics={f"validation/set{TRAP}/loss": 1.0}),
        event("checkpoint", 1.0, step=1, path=f"/x/step-1{TRAP}"),
        event("log", 1.0, level="info", message=f"said{TRAP}\nand{TRAP}"),
        event("log", 1.0, level=f"error{TRAP}", message=TRAP),
        step(2, 2.0),
        event("run_end", 3.0, **outcome),
    ]
    path = run_folders.make(
        tmp_path / f"r{TRAP}", lines, [told], lock=f'recipe = 1\nname = "x"\n[a"]\n{TRAP}'
    )
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**record, "name": f"name{TRAP}"}))
    (path / "logs/rank-0.log").write_bytes(f"line{TRAP}\nnext{TRAP}".encode())
    (path / f"logs/other{TRAP}.log").write_text(TRAP)
    (path / "rollouts").mkdir()
    sample = {
        "reward": 1.0, "advantage": 1.0, "rewards": {TRAP: 1.0, "b": 2.0}, "failed": {TRAP: TRAP},
        "counted": False, "finish": TRAP, "text": TRAP,
    }  # fmt: skip
    row = {"prompt": TRAP, "answer": TRAP, "samples": [sample]}
    (path / "rollouts/step-1.jsonl").write_text(json.dumps(row) + "\n")
    (path / "note.json").write_text(json.dumps({"format": 1, "text": f"note{TRAP}"}))
    (path / "slurm").mkdir()
    (path / "logs/rank-0.error.json").write_text(json.dumps({"rank": 0, "message": TRAP}))
    return path


COMMANDS = [
    ["runs", "list"],
    ["runs", "show", "RUN"],
    ["runs", "logs", "RUN"],
    ["runs", "logs", "RUN", "--all"],
    ["runs", "logs", "RUN", "-f"],
    ["runs", "watch", "RUN"],
    ["runs", "watch", "RUN", "--json"],
    ["runs", "compare", "RUN", "OTHER"],
    ["runs", "note", "RUN"],
    ["runs", "rm", "RUN"],
    ["report", "RUN", "--text"],
    ["report", "RUN", "--json"],
    ["rollouts", "RUN"],
    ["train", "RUN", "--resume"],
    ["validate", "RUN"],
    ["recipe", "show", "RUN"],
    ["checkpoint", "list", "RUN"],
    ["checkpoint", "verify", "RUN"],
    ["generate", "RUN", "x"],
    ["replay", "RUN", "--step", "1"],
    ["reproduce", "RUN"],
    ["profile", "RUN"],
    ["launch", "status", "RUN"],
    ["launch", "logs", "RUN"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_hands_a_run_folders_text_to_the_terminal(
    trap: Path, command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    other = run_folders.make(trap.parent / "other", [began(), step(1, 1.0)])
    places = {"RUN": str(trap), "OTHER": str(other)}
    main([places.get(word, word) for word in command])
    shown = "".join(capfd.readouterr())
    assert shown and not {char for char in shown if not char.isprintable()} - {"\n", "\t"}, repr(shown)


# ----------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("harm", [fifo, device, folder, server])
def test_a_weights_file_that_is_none_is_neither_waited_for_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    harm(tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentProblem, match=r"model.safetensors cannot be read"):
        read_header(tmp_path / "model.safetensors")


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    text = b"[" * 200_000
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(EnvironmentProblem, match="its header is not JSON"):
        read_header(tmp_path / "a.safetensors")


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"ab",', b'{"ab":0},', b"1234,"])
def test_metadata_of_a_few_bytes_take_little_memory(tmp_path: Path, unit: bytes) -> None:
    """128 kB of gzip held 30 MB of JSON, and these a gigabyte of lists."""
    import tracemalloc

    from titancli.checkpoint.format.hashed import Digest, checksum

    group = {"dtype": "F32", "shape": [1], "tensors": ["a"], "ranks": [[0, 1]]}
    index = {"format": 2, "groups": [{**group, "offsets": [[[0, 1]]], "sizes": [[[1, 1]]]}]}
    body = b'{"format": 2, "piece": 1048576, "headers": {}, "tensors": {"a": [' + unit * 12_000_000
    parts = {
        "metadata.json": json.dumps(index).encode(),
        "metadata-00000.json.gz": gzip.compress(body + os.urandom(120_000).hex().encode(), 6),
    }
    for name, data in parts.items():
        (tmp_path / name).write_bytes(data)
    files = {name: Digest(len(data), checksum(data)) for name, data in parts.items()}
    assert files["metadata-00000.json.gz"].size < 400_000
    tracemalloc.start()
    try:
        with pytest.raises(EnvironmentProblem, match=r"metadata-00000.json.gz is malformed"):
            open_metadata(tmp_path, files).everything()
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()


def test_a_summary_says_what_is_wrong_with_a_record(runs: Path) -> None:
    for values, words in (
        ({"host": 3}, "run.json has an invalid host (attempt)"),
        ({"outcome": ["failed"]}, "run.json has an invalid outcome (attempt)"),
        ({"git": {"commit": []}}, "run.json has an invalid commit (git)"),
        ({"plugin_files": ["x"]}, "run.json has an invalid plugin file"),
    ):
        record = json.loads((runs / "bad/run.json").read_text())
        (runs / "bad/run.json").write_text(json.dumps({**record, "attempts": [attempt(**values)]}))
        assert [words in problem for problem in summarize(runs / "bad").problems] == [True]
