"""`titan runs compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Titan
from tests.cli.run_folders import LOCK, attempt, began, ended, make, step
from titancli.observe.curves import Point, at, curve, equal_places


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two runs: the second has another rate and torch, logged less often, and ran at half the speed."""
    fast = [began(), *(step(n, n, 10 - n / 10) for n in range(1, 41))]
    slow = [
        began(),
        *(
            step(n, 2 * n, 10 - n / 5, step_seconds=2.0, **{"validation/held_out/loss": n})
            for n in range(5, 31, 5)
        ),
    ]
    make(tmp_path / "a", fast)
    other = attempt(ended("finished"), versions={"python": "3.11.7", "torch": "2.12.0"}, host="far")
    make(tmp_path / "b", slow, [other], lock=LOCK.replace("0.001", "0.002"))
    return tmp_path


def equal(titan: Titan, *arguments: str) -> dict[str, list[tuple[float, list[float]]]]:
    found = json.loads(titan("runs", "compare", "a", "b", *arguments, "--json").out)["equal"]
    return {axis: [(one["at"], one["metrics"]["loss"]) for one in places] for axis, places in found.items()}


def test_metrics_stand_at_equal_steps_tokens_and_seconds(titan: Titan, two: Path) -> None:
    found = equal(titan, "-n", "3")
    assert found["step"] == [(10, [9.0, 8.0]), (20, [8.0, 6.0]), (30, [7.0, 4.0])]
    # Ten tokens a second each: a has 400, b 600; 400 tokens are b's step 20.
    assert [place for place, _ in found["tokens"]] == pytest.approx([400 / 3, 800 / 3, 400])
    assert found["tokens"][-1][1] == [6.0, 6.0]
    assert found["seconds"][-1] == (40.0, [6.0, 6.0])


def test_what_differs_is_printed_with_the_value_of_each_run(titan: Titan, two: Path) -> None:
    done = titan("runs", "compare", "a", "b", "-n", "2")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert (done.code, done.err) == (0, "")
    assert lines[:3] == [
        "run state step tokens time",
        "A a finished 100 400 0:40",
        "B b finished 100 600 1:00",
    ]
    assert "optimizer.lr 0.001 0.002" in lines and "torch 2.13.0 2.12.0" in lines
    assert not any(line.startswith(("training.steps", "python")) for line in lines)
    assert lines[-3:] == [
        "step loss A loss B validation/held_out/loss A validation/held_out/loss B",
        "15 8.5000 7.0000 — 15.0000",
        "30 7.0000 4.0000 — 30.0000",
    ]


def test_three_runs_and_a_metric_by_name(titan: Titan, two: Path) -> None:
    make(two / "c", [began(), step(30, 30, "NaN")], lock=LOCK.replace("steps = 100", "steps = 50"))
    lines = titan("runs", "compare", "a", "b", "c", "--metric", "loss", "--metric", "lr").out.splitlines()
    assert lines[-1].split() == ["30", "7.0000", "4.0000", "nan", *["1.00e-03"] * 3]
    found = json.loads(titan("runs", "compare", "a", "b", "c", "--json").out)
    assert {"key": "training.steps", "values": [100, 100, 50]} in found["recipe"]
    assert {"key": "optimizer.lr", "values": [0.001, 0.002, 0.001]} in found["recipe"]
    assert found["equal"]["step"][0]["metrics"]["loss"] == [7.0, 4.0, "NaN"]


def test_runs_without_a_common_place_are_said_to_have_none(titan: Titan, two: Path) -> None:
    make(two / "none", b"")
    for by in ("step", "tokens", "seconds"):
        done = titan("runs", "compare", "a", "none", "--by", by)
        assert done.code == 0 and f"no {by} in common" in done.err
    same = titan("runs", "compare", "a", "a")
    assert "nothing in the recipe differs" in same.err and "nothing in the environment differs" in same.err


def test_what_cannot_be_compared_is_refused(titan: Titan, two: Path) -> None:
    assert titan("runs", "compare", "a").code == 2
    done = titan("runs", "compare", "a", "b", "--metric", "los")
    assert done.code == 2 and "did you mean 'loss'?" in done.err
    (two / "b" / "recipe.lock.toml").write_text("[half")
    done = titan("runs", "compare", "a", "b")
    assert done.code == 3 and "is not TOML" in done.err
    (two / "a" / "run.json").write_text("{")
    make(two / "d", [began(), step(5, 5)])
    done = titan("runs", "compare", "a", "d")
    assert done.code == 0 and "A: cannot read" in done.err


def test_a_resume_from_an_earlier_checkpoint_takes_back_what_came_after_it(tmp_path: Path) -> None:
    events = [began(), *(step(n, n, n) for n in range(1, 21))]
    events += [began(50, step=10, attempt=2), *(step(n, 40 + n, -n) for n in range(11, 31))]
    points = curve(make(tmp_path / "r", events) / "events.jsonl")
    assert [point.step for point in points] == list(range(1, 31))
    assert [point.metrics["loss"] for point in points] == [*range(1, 11), *range(-11, -31, -1)]
    assert (points[-1].tokens, points[-1].seconds) == (pytest.approx(300), pytest.approx(30))


def test_a_log_without_its_beginning_and_without_speeds(tmp_path: Path) -> None:
    bare = step(7, 7) | {"metrics": {"loss": 1.0}}
    points = curve(make(tmp_path / "r", [bare, step(8, 8)]) / "events.jsonl")
    assert [(point.step, point.tokens, point.seconds) for point in points] == [(7, None, 0.0), (8, None, 1.0)]
    assert equal_places([points], "tokens", 3) == []


def test_places_are_spread_over_what_is_common() -> None:
    points = [Point(n, n, n, {"loss": n}) for n in range(1, 8)]
    assert equal_places([points, points[1:]], "step", 3) == [3, 5, 7]
    assert equal_places([points, points[:2]], "step", 9) == [1, 2]
    assert at(points, "seconds", 2.5, ["loss", "lr"]) == {"loss": 2, "lr": None}
    assert at(points, "seconds", 0.5, ["loss"]) == {"loss": None}
