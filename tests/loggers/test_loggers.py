"""The loggers of the core: one table, also after a resume, a crash, and on a full disk."""

from __future__ import annotations

import csv
import math
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished, here, train  # noqa: F401 - fixtures
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.loggers import CSV, TensorBoard
from titancli.loggers.csv import build
from titancli.observe.events import read_events
from titancli.recipe import load_recipe


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def logged(folder: Path, step: int, rows: dict[int, dict[str, float]]) -> Any:
    """A logger that was told of a start at a step, and of these steps."""
    logger = build(CSV(), run_folder=folder, is_main=True)
    logger.run_start({"step": step})
    for number, metrics in rows.items():
        logger.step_end(number, metrics)
    return logger


def test_a_column_that_comes_later_is_empty_before(tmp_path: Path) -> None:
    logged(tmp_path, 0, {1: {"loss": 2.5}, 2: {"loss": math.nan, "val_loss": math.inf}, 3: {"val_loss": 0.1}})
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,time,loss,val_loss"
    rows = table(tmp_path / "metrics.csv")
    assert [(row["step"], row["loss"], row["val_loss"]) for row in rows] == [
        *(("1", "2.5", ""), ("2", "nan", "inf"), ("3", "", "0.1"))
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


def test_what_is_evaluated_after_a_step_stands_in_its_row(tmp_path: Path) -> None:
    logger = logged(tmp_path, 0, {1: {"loss": 2.0}})
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.125)):
        logger.step_end(step, {"validation/a/loss": loss})
        logger.step_end(step + 1, {"loss": 1.0})
    found = [(row["step"], row["loss"], row["validation/a/loss"]) for row in table(tmp_path / "metrics.csv")]
    assert found == [("1", "2.0", "0.5"), ("2", "1.0", "0.25"), ("3", "1.0", "0.125"), ("4", "1.0", "")]


def test_a_resume_goes_on_in_the_same_table_after_its_step(tmp_path: Path) -> None:
    logged(tmp_path, 0, {step: {"loss": 1.0, "old": 2.0} for step in range(1, 5)})
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("5,2026-01-01T00:")  # the process was killed while it wrote
    logged(tmp_path, 2, {3: {"loss": 3.0}, 4: {"loss": 4.0, "new": 1.0}})
    rows = table(tmp_path / "metrics.csv")
    assert [(row["step"], row["loss"], row["old"], row["new"]) for row in rows] == [
        *(("1", "1.0", "2.0", ""), ("2", "1.0", "2.0", "")),
        *(("3", "3.0", "", ""), ("4", "4.0", "", "1.0")),
    ]
    assert (tmp_path / "metrics.csv").read_text().count("step,time") == 1
    logged(tmp_path, 0, {1: {"loss": 9.0}})
    assert [row["loss"] for row in table(tmp_path / "metrics.csv")] == ["9.0"]


@contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    """A disk that is full from there on: a write is cut short, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    ("metrics", "room"),
    [({"loss": 1.0}, 5), ({"loss": 1.0, "new": 2.0}, 2), ({"loss": 1.0, "new": 2.0}, 12)],
    ids=["append", "new column", "new column and append"],
)
def test_a_full_disk_leaves_whole_rows(tmp_path: Path, metrics: dict[str, float], room: int) -> None:
    logger = logged(tmp_path, 0, {1: {"loss": 0.5}})
    text = (tmp_path / "metrics.csv").read_text()
    with no_file_grows_beyond(len(text) + room), pytest.raises(OSError):
        logger.step_end(2, metrics)
    rows = table(tmp_path / "metrics.csv")
    assert [(row["step"], row["loss"]) for row in rows] == [("1", "0.5")]
    assert (tmp_path / "metrics.csv").read_text().endswith("\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_file_of_somebody_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("name,age\nada,36\n")
    with pytest.raises(EnvironmentProblem, match="not a table of metrics"):
        build(CSV(), run_folder=tmp_path, is_main=True).run_start({"step": 0})
    assert (tmp_path / "metrics.csv").read_text() == "name,age\nada,36\n"


@pytest.mark.parametrize("config", [CSV(), TensorBoard()], ids=lambda config: type(config).__name__)
def test_only_rank_0_writes(config: Any, tmp_path: Path) -> None:
    from titancli.registry.component import build

    logger = build(config, run_folder=tmp_path, is_main=False)
    assert not any(hasattr(logger, name) for name in ("run_start", "step_end", "checkpoint_saved", "run_end"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("loggers", "error"),
    [
        ('[{type="csv"}, {type="csv"}]', "two csv loggers would write metrics.csv"),
        ('[{type="csv", file="../metrics.csv"}]', "is not the name of a CSV file"),
        ('[{type="csv", file="events.jsonl"}]', "is not the name of a CSV file"),
        ('[{type="csv", file=".csv"}]', "is not the name of a CSV file"),
        ('[{type="tensorboard"}, {type="tensorboard"}]', "two tensorboard loggers would write"),
    ],
)
def test_what_two_loggers_would_both_write_is_refused(loggers: str, error: str) -> None:
    with pytest.raises(RecipeError, match=error):
        load_recipe("llama3_debug", [f"loggers={loggers}"])


def test_csv_and_tensorboard_hold_the_rows_of_the_event_log_once(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = 'loggers=[{type="csv"}, {type="csv", file="b.csv"}, {type="tensorboard"}]'
    assert train("tiny.toml", "--run-dir", "r", loggers, "training.steps=4").code == 0
    done = train("r", "--resume", "--step", "2", "training.steps=5", "training.max_norm=0.01")
    assert done.code == 0, done.err
    events = [event for event in read_events(here / "r/events.jsonl") if event["event"] == "step"]
    assert [event["step"] for event in events] == [1, 2, 3, 4, 3, 4, 5]
    expected = {event["step"]: event["metrics"]["loss"] for event in events}
    assert expected[4] != events[3]["metrics"]["loss"]
    rows = table(here / "r/metrics.csv")
    assert {int(row["step"]): float(row["loss"]) for row in rows} == expected and len(rows) == 5
    assert len(table(here / "r/b.csv")) == 5
    board = EventAccumulator(str(here / "r/tb"))
    board.Reload()
    points = [(point.step, point.value) for point in board.Scalars("loss")]
    assert points == [(step, pytest.approx(value)) for step, value in sorted(expected.items())]
    texts = {
        name: board.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()
        for name in ("recipe", "environment")
    }
    assert "max_norm = 0.01" in texts["recipe"] and '"torch"' in texts["environment"]
