"""`titan report`: logs of every kind, read once; the page, the text and the numbers."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Titan, titan  # noqa: F401 - a fixture
from tests.cli.run_folders import LOCK, at, attempt, began, ended, event, make, step
from titan_report import view
from titan_report.history import History, read, seconds_of
from titan_report.times import CAUSES
from titancli.observe.summary import summarize
from titancli.runs import RunFolder

END = ended("finished", 4)


def history(folder: Path, *arguments: Any, **options: Any) -> History:
    run = make(folder, *arguments, **options)
    (found,) = view.open_runs([summarize(run)])
    return found.history


def phases(**seconds: float) -> dict[str, float]:
    return {f"time/{name}": value for name, value in seconds.items()}


def saved(number: int, second: float) -> dict[str, Any]:
    return event("checkpoint", second, step=number, path=f"step-{number}")


def test_phases_of_a_step_and_the_rest_add_up_to_its_time(tmp_path: Path) -> None:
    events = [
        began(3),
        step(1, 5, **phases(data=0.5, forward=0.5, backward=0.5, clip=0.1, optimizer=0.2, other=0.2)),
        step(3, 9, **phases(data=1.0, forward=0.5, backward=0.25, other=0.25)),  # of two steps
        saved(3, 9.5),
        event("run_end", 9.75, why="finished"),
    ]
    times = history(tmp_path / "r", events, [attempt(END, ended=at(10))]).times
    assert dict(times.ordered()) == pytest.approx(
        {
            "start": 3,
            "data": 2.5,
            "forward": 1.5,
            "backward": 1.0,
            "optimizer": 0.3,
            "save": 0.5,
            "other": 0.2 + 0.5 + 0.25 + 0.25,
        }
    )
    assert times.wall == pytest.approx(10)


def test_steps_done_again_are_shown_once_and_lost_once(tmp_path: Path) -> None:
    each = phases(forward=1.0)
    events = [
        *(began(1), step(1, 2, 5.0, **each), step(2, 3, 4.0, **each), saved(2, 3.5)),
        *(step(3, 5, 3.0, **phases(forward=1.0, save=0.5)), step(4, 6, 9.0, **each)),
        *(began(20, step=2, attempt=2), step(3, 21, 3.5, **each), step(4, 22, 2.5, **each)),
        event("run_end", 22, why="finished"),
    ]
    attempts = [attempt(), attempt(END, started=at(18), ended=at(22))]
    found = history(tmp_path / "r", events, attempts)
    assert list(found.step) == [1, 2, 3, 4] and found.series("loss", "step")[1].tolist() == [5, 4, 3.5, 2.5]
    assert (found.repeated, found.resumed) == (2, [2])
    assert dict(found.times.ordered()) == pytest.approx(
        {"start": 1, "forward": 4, "save": 0.5, "restart": 2, "lost": 2.5, "not_running": 12}
    )


def test_a_resume_in_the_middle_of_a_logged_stretch_keeps_its_share(tmp_path: Path) -> None:
    events = [
        began(0),
        step(10, 10, **phases(forward=1.0)),
        began(15, step=4),
        step(10, 21, **phases(forward=1.0)),
    ]
    times = dict(history(tmp_path / "r", events, []).times.ordered())
    assert times == pytest.approx({"forward": 4 + 6, "lost": 6, "restart": 5})


def test_a_stall_is_what_is_in_no_phase_and_far_from_usual(tmp_path: Path) -> None:
    usual = phases(forward=0.9, other=0.1)
    rows = [step(n, n, **usual) for n in range(1, 20)]
    stalled = step(20, 22.0, **phases(forward=0.9, other=2.1))
    times = dict(history(tmp_path / "r", [began(0), *rows, stalled], []).times.ordered())
    assert times == pytest.approx({"forward": 18, "other": 2, "stall": 2.0})


def test_a_log_without_phases_says_what_it_can(tmp_path: Path) -> None:
    rows = [step(n, n, data_wait_share=0.25) for n in (1, 2, 3)]
    evaluated = step(
        4, 9, data_wait_share=0.25, **{"validation/held_out/loss": 2.0}
    )  # its step took one second of six
    times = dict(history(tmp_path / "r", [began(0), *rows, evaluated], []).times.ordered())
    assert times == pytest.approx({"data": 1.0, "training": 3.0, "evaluation": 5.0})


def test_a_failed_start_and_a_failed_step_are_charged_too(tmp_path: Path) -> None:
    failed = attempt(ended("failed", None), ended=at(4))
    events = [
        *(event("run_end", 4, why="failed", step=None), began(12, attempt=2), step(1, 13)),
        event("run_end", 15, why="failed", step=1, error="ValueError"),
    ]
    attempts = [failed, attempt(ended("failed", 1), started=at(10), ended=at(15))]
    times = history(tmp_path / "r", events, attempts).times
    assert dict(times.ordered()) == pytest.approx(
        {"start": 4, "not_running": 6, "restart": 2, "training": 1, "lost": 2}
    )


def test_a_validation_between_two_logged_steps_is_a_point_of_its_own(tmp_path: Path) -> None:
    def validated(number: int, second: float, loss: float) -> dict[str, Any]:
        return event("validation", second, step=number, seconds=2.0, metrics={"validation/books/loss": loss})

    events = [
        *(began(0), validated(0, 2, 4.0), step(4, 6, **phases(forward=1.0, evaluation=0.5))),
        *(validated(6, 10, 3.0), step(8, 12, **phases(forward=1.0, evaluation=0.5)), validated(8, 14, 2.0)),
        *(saved(8, 15), event("run_end", 15, why="finished")),
    ]
    found = history(tmp_path / "r", events, [])
    assert [list(one) for one in found.series("validation/books/loss", "step")] == [[0, 6, 8], [4, 3, 2]]
    assert [list(one) for one in found.series("loss", "step")] == [[4, 8], [2, 2]]
    assert dict(found.times.ordered()) == pytest.approx({"forward": 8, "evaluation": 6, "save": 1})


def test_tokens_count_whatever_is_evaluated_between_logged_steps(tmp_path: Path) -> None:
    def rated(number: int, second: float) -> dict[str, Any]:
        return step(number, second, tokens_per_second=100.0, step_seconds=1.0)

    between = event("validation", 15, step=15, seconds=1.0, metrics={"validation/books/loss": 3.0})
    found = history(tmp_path / "r", [began(0), rated(10, 10), between, rated(20, 21)], [])
    assert list(found.tokens) == [1000, 1000, 2000]


def test_a_run_that_logged_nothing_is_no_end_of_a_report_of_several(tmp_path: Path) -> None:
    good = make(tmp_path / "good", [began(0), step(1, 1, skipped_steps=0.0)], [])
    failed = make(tmp_path / "failed", [event("run_end", 1, why="failed", error="odd")], [])
    runs = view.open_runs([summarize(run) for run in (good, failed)])
    assert "skipped_steps" not in view.metrics_of(runs)


def test_a_run_that_is_going_on_is_shown_up_to_now(tmp_path: Path) -> None:
    run = make(tmp_path / "r", [began(1), step(1, 2, **phases(forward=1.0))], [attempt()])
    hold = RunFolder(run).hold()
    try:
        (found,) = view.open_runs([summarize(run)])
    finally:
        hold.release()
    assert found.summary.state == "running"
    now = time.time() - seconds_of(at(0))
    assert found.history.times.wall == pytest.approx(now, abs=5)
    assert found.history.times.seconds["other"] == pytest.approx(now - 2, abs=5)


def test_a_damaged_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = [began(1), step(1, 2, "NaN"), step(2, 3, "Infinity"), step(3, 4, 2.0, new=1.0)]
    text = "".join(f"{json.dumps(one)}\n" for one in lines)
    data = ("no json\n[]\n{}\n" + text + '{"version": 1, "event": "st').encode()
    found = history(tmp_path / "r", data)
    assert list(found.step) == [1, 2, 3]
    (run,) = view.open_runs([summarize(tmp_path / "r")])
    one = view.curve(run, 0, "loss", "step")
    assert (one.x, one.y, one.odd) == ([3.0], [2.0], [1.0, 2.0])
    assert view.curve(run, 0, "new", "tokens").x == [30.0]
    assert view.best(found) == {"loss": {"value": 2.0, "step": 3.0}}


@pytest.mark.parametrize("events", [b"", [began(0)]], ids=["no event", "no step"])
def test_a_run_without_a_step_has_a_report(events: Any, tmp_path: Path, titan: Titan) -> None:  # noqa: F811
    make(tmp_path / "r", events, [])
    for how in ("--text", "--json", "--by=tokens"):
        done = titan("report", tmp_path / "r", how)
        assert done.code == 0, done.err
    assert "No step has been logged." in Path("report.html").read_text()


def test_thinning_keeps_every_extreme(tmp_path: Path) -> None:
    found = History()
    losses = np.sin(np.arange(5000) / 300) + 3
    losses[1234], losses[2345] = 50.0, -7.0
    found.columns["loss"] = column = view.History().columns.setdefault("loss", _column(losses))
    assert column.values[1234] == 50.0
    found.step.extend(range(1, 5001))
    one = view.curve(view.Run("r", None, found, None, []), 0, "loss", "step", 100)  # type: ignore[arg-type]
    assert len(one.x) == 100 and max(one.high) == 50.0 and min(one.low) == -7.0
    assert sum(one.y) / 100 == pytest.approx(losses.mean())
    assert all(low <= y <= high for low, y, high in zip(one.low, one.y, one.high, strict=True))


def curve_of(values: list[float], run: int = 0) -> view.Curve:
    return view.Curve(run, [float(n) for n in range(len(values))], values, values, values, [])


@pytest.mark.parametrize(
    ("values", "low", "high", "beyond"),
    [
        ([10.0, 1000.0, 1005.0, 1001.0, 1003.0], 1000.0, 1005.0, [10.0]),  # the first step was slow
        ([900.0, 1.5, 1.4, 1.45, 1.42], 1.4, 1.5, [900.0]),
        ([8.2, 6.0, 4.0, 3.0, 2.5], 2.5, 8.2, []),  # a loss that falls
        ([10.0, 11.0, 999.0, 10.0, 11.0], 10.0, 999.0, []),  # a spike is no first step
        ([10.0, 1000.0, 1005.0], 10.0, 1005.0, []),  # too few to tell
        ([5.0] * 6, 5.0, 5.0, []),
        ([], 0.0, 1.0, []),
    ],
)
def test_a_first_step_far_from_all_others_flattens_no_curve(
    values: list[float], low: float, high: float, beyond: list[float]
) -> None:
    assert view.limits([curve_of(values)]) == (low, high, beyond)


def test_a_first_value_beyond_the_axis_is_named_and_drawn_at_its_edge(
    tmp_path: Path,
    titan: Titan,  # noqa: F811
) -> None:
    rates = [1.0, 100.0, 100.5, 100.1, 100.3, 100.2]
    rows = [step(n, n + 1, 2.0, tokens_per_second=rate) for n, rate in enumerate(rates, 1)]
    run = make(tmp_path / "r", [began(), *rows], [attempt(END)])
    assert titan("report", run).code == 0
    page = Path("report.html").read_text()
    assert "first, beyond the axis: 1<" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])  # type: ignore[index]
    [chart] = [one for one in data.values() if one["name"] == "tokens_per_second"]
    assert 99 < chart["y"][0] < 100 and 100.5 < chart["y"][1] < 101
    assert chart["runs"][0][2][0] == 1  # what the pointer shows is what was logged
    figure = page[page.index("<h3>Tokens per second</h3>") :]
    heights = [float(y) for y in re.findall(r"[ML] [\d.]+ (-?[\d.]+)", figure[: figure.index("</figure>")])]
    assert heights and all(0 <= height <= 190 for height in heights)  # nothing leaves the plot
    assert "Median tokens/s" in page
    text = titan("report", run, "--text").out
    assert "Tokens per second by step (first, beyond the axis: 1)" in text
    assert "100.5 │" in text and "100 │" in text


def _column(values: Any) -> Any:
    from titan_report.history import Column

    column = Column()
    column.rows.extend(range(len(values)))
    column.values.extend(values)
    return column


# -------------------------------------------------------------------------------------------- the page


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs with evil names; one was resumed, the other still has no outcome."""
    events = [
        *(
            began(1),
            *(
                step(n, n + 1, 5 - n, **{"validation/held_out/loss": 1.0}, **phases(forward=0.5))
                for n in range(1, 5)
            ),
        ),
        *(saved(4, 5.5), event("log", 5.6, level="warning", message="<script>alert(1)</script>")),
        event("run_end", 6, why="finished", step=4),
    ]
    a = make(tmp_path / "a<b>&", events, [attempt(END, ended=at(6))])
    other = [began(1), step(1, 2, "NaN"), step(2, 3, 1.0)]
    for name, text in (("books", '{"step": 4, "metrics": {"perplexity": 7.25}}'), ("bad", "{")):
        (a / "evaluations/step-4").mkdir(parents=True, exist_ok=True)
        (a / f"evaluations/step-4/{name}.json").write_text(text)
    b = make(tmp_path / "b", other, [attempt()], lock=LOCK.replace("0.001", "0.5"))
    return a, b


def test_the_page_is_whole_valid_and_loads_nothing(two: tuple[Path, Path], titan: Titan) -> None:  # noqa: F811
    import html5lib

    done = titan("report", *two, "-o", "page.html")
    assert (done.code, done.out) == (0, "page.html\n"), done.err
    text = Path("page.html").read_text()
    assert len(text) < 200_000 and "<script>alert" not in text
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    tree = parser.parse(text)
    for element in tree.iter():
        for name, value in element.attrib.items():
            if str(name).endswith(("href", "src")):
                assert value.startswith(("#", "data:")), (element.tag, name, value)
    assert "url(" not in text and "@import" not in text
    words = " ".join(tree.itertext())
    for expected in (
        "a<b>&",
        "optimizer.lr",
        "0.001",
        "0.5",
        "finished",
        "died",
        "Loss",
        "validation/held_out/loss",
        "removed",
        "perplexity 7.25",
    ):
        assert expected in words
    data = json.loads(tree.find(".//script[@id='data']").text)
    assert data["c0"]["runs"][0][1:] == [[1, 2, 3, 4], [4, 3, 2, 1]]
    for cause in ("forward", "start"):
        assert CAUSES[cause] in words


def test_many_runs_are_rows_of_one_table(tmp_path: Path, titan: Titan) -> None:  # noqa: F811
    for number in range(10):
        lock = LOCK.replace("0.001", f"0.{number + 1:03}")
        make(tmp_path / f"lr-{number}", [began(0), step(1, 1), step(2, 2, 3 - number / 10)], lock=lock)
    done = titan("report", *(tmp_path / f"lr-{number}" for number in range(10)))
    assert done.code == 0, done.err
    text = Path("report.html").read_text()
    row = next(line for line in text.splitlines() if "lr-9</td>" in line)
    assert "<td>0.010</td>" in row or "<td>0.01</td>" in row
    assert "<td>2.1000</td>" in row and "finished" in row
    assert text.count("stroke-dasharray") >= 2  # the ninth and the tenth


def test_a_file_that_is_no_report_is_not_written_over(two: tuple[Path, Path], titan: Titan) -> None:  # noqa: F811
    Path("page.html").write_text("<p>mine</p>")
    done = titan("report", two[0], "-o", "page.html")
    assert done.code == 5 and "is not a report of titan" in done.err
    assert Path("page.html").read_text() == "<p>mine</p>"
    assert titan("report", two[0]).code == titan("report", two[0]).code == 0
    assert titan("report", two[0], "-o", "none/page.html").code == 5
    assert titan("report", two[0], "--text", "--json").code == 2
    assert titan("report", "nothing").code == 5


def test_text_draws_the_curves_of_all_runs(two: tuple[Path, Path], titan: Titan) -> None:  # noqa: F811
    done = titan("report", *two, "--text")
    lines = done.out.splitlines()
    assert lines[0].startswith("A a<b>&  finished, step 4/") and "Loss by step" in lines
    assert lines[1].startswith("B b  ")
    assert any(line.startswith("4 │") and "A" in line for line in lines)  # the legend's letter
    assert "across: step; a curve of many points spans their minimum and maximum" in lines
    assert "forward" in done.out and "\x1b" not in done.out


def test_the_numbers_add_up(two: tuple[Path, Path], titan: Titan) -> None:  # noqa: F811
    found = json.loads(titan("report", *two, "--json").out)
    for run in found["runs"]:
        assert math.fsum(one["seconds"] for one in run["times"]) == pytest.approx(run["wall_seconds"])
    assert found["runs"][0]["evaluations"] == [{"step": 4, "name": "books", "metrics": {"perplexity": 7.25}}]
    assert "step-4/bad.json cannot be read" in found["runs"][0]["problems"][0]
    assert found["recipe"] == [{"key": "optimizer.lr", "values": [0.001, 0.5]}]
    assert found["runs"][0]["warnings"][0]["message"] == "<script>alert(1)</script>"
    assert [one["run"] for one in found["curves"] if one["metric"] == "loss"] == [0, 1]


def test_a_file_that_is_not_there_is_an_empty_history(tmp_path: Path) -> None:
    assert list(read(tmp_path / "events.jsonl").step) == []
