"""The plugin that tells how a run of the tests goes: its order, its table of durations, its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proven import Fact, lines_of, tables_of
from tests.summary import FIRST, ROOMS, Durations, room_of

ROOT = Path(__file__).parents[1]


def test_durations_are_recorded_of_whole_files_that_pass(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    known = Durations({"there.py": (1.0, 2), "gone.py": (3.0, 4), "new.py": (9.0, 9)})
    (tmp_path / "new.py").touch()
    known.write({"new.py": (2.26, 3)}, tmp_path, tmp_path / "table.json")
    assert Durations.read(tmp_path / "table.json").known == {"new.py": (2.3, 3), "there.py": (1.0, 2)}


def test_the_longest_come_first_but_for_what_needs_no_torch() -> None:
    known = Durations(
        {
            "tests/a/test_1.py": (5.0, 1),
            "tests/a/test_2.py": (90.0, 9),
            "tests/b/test_3.py": (80.0, 1),
            "tests/cli/test_4.py": (1.0, 1),
            "tests/recipe/test_5.py": (2.0, 1),
            "tests/recipe/test_6.py": (3.0, 1),
        }
    )
    order = known.in_order(f"{file}::test" for file in known.known)
    assert [file.rpartition("_")[2] for file in sorted(order, key=order.__getitem__)] == [
        f"{number}.py" for number in (6, 5, 4, 2, 1, 3)
    ]
    assert known.of_test("tests/a/test_2.py::test") == 10.0
    assert known.of_test("tests/c/test_new.py::test") == pytest.approx(181 / 14)


def test_every_room_has_its_words() -> None:
    files = [
        path.relative_to(ROOT).as_posix()
        for top in ("tests", "plugins")
        for path in ROOT.glob(f"{top}/**/test_*.py")
    ]
    assert {room_of(file) for file in files} == set(ROOMS), "tests/summary.py says what each folder proves"
    assert set(FIRST) <= set(ROOMS)


LAYOUT = {"layout": "FSDP2", "ranks": 2, "optimizer": "sgd", "loss": 0.0, "norm": 1e-6, "gradient": 4e-6}
LAYOUT |= {"weight": 0.0, "worst": "gradient 0 x", "tie": None, "tolerance": 1e-5, "seconds": 1.0}


def test_the_worst_layouts_are_named_and_what_fails_is_counted() -> None:
    facts = [Fact(LAYOUT | {"layout": f"L{n}", "gradient": n * 1e-6}, True) for n in range(1, 6)]
    facts.append(Fact(LAYOUT | {"layout": "bad", "gradient": 1.0}, False))
    (first, wrong), *rest = lines_of({"layout": facts}, {})
    assert "5 of 6 agree with one rank" in first and wrong
    assert [line.split("  ")[-1].split(" ")[0] for line, _ in rest] == ["bad", "L5", "L4"]
    [(_, table)] = tables_of({"layout": facts})
    assert [line.split()[0] for line in table] == ["layout", "L1", "L2", "L3", "L4", "L5", "bad"]


def test_errors_in_verbs_are_counted_by_what_they_leave() -> None:
    rows = [["load", "a file", "refuses"], ["forward", "a layer", "equal"], ["sampling", "body", "-"]]
    facts = {"raised": [Fact({"layout": "one", "rows": rows}, True)]}
    [(line, wrong)] = lines_of(facts, {})
    assert "2 errors in the middle of verbs, on 1 layouts: 1 leave no trace" in line and not wrong
    facts["raised"].append(Fact({"layout": "two", "rows": [["load", "a file", "weights differ"]]}, False))
    [(line, wrong)] = lines_of(facts, {})
    assert "on 1 of 2 layouts" in line and "1 are WRONG" in line and wrong
    [(_, table)] = tables_of(facts)
    assert table[-3].split() == ["load:", "a", "file", "refuses", "WRONG"]


def test_a_fault_is_survived_only_if_all_its_tests_passed() -> None:
    facts = {
        "fault": [
            Fact({"fault": f"F{tests}", "holds": "", "tests": tests}, True)
            for tests in (["a::1"], ["a::1", "b::2"])
        ]
    }
    [(line, wrong)] = lines_of(facts, {"tests/a::1[x]": "passed"})
    assert "1 of 1 survived, by 1 tests; 1 others are not tried" in line and not wrong
    [(line, wrong)] = lines_of(facts, {"tests/a::1[x]": "passed", "tests/b::2": "passed"})
    assert "2 of 2 survived, by 2 tests" in line and not wrong
    [(line, wrong)] = lines_of(
        facts, {"tests/a::1[x]": "passed", "tests/a::1[y]": "failed", "tests/b::2": "passed"}
    )
    assert "0 of 2 survived" in line and line.count("FAILED") == 2 and wrong
