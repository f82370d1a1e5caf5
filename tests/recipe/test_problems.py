"""How problems are shown."""

from __future__ import annotations

import json
import pickle

import pytest

from titancli.errors import Location, Problem, RecipeError
from titancli.recipe import render_problems
from titancli.recipe.problems import Problems
from titancli.recipe.toml import Source

STEPS = Problem(
    "unknown-key",
    "unknown key 'stpes' in training",
    Location("exp.toml", 12, 1, 5, "stpes = 100"),
    "did you mean 'steps'?",
)
OVERRIDE = Problem("syntax", "no: key", Location("override", 1, 3, 4, "a.b%=c,d\x1b[31m"), None)
NOWHERE = Problem("unreadable", "cannot read x.toml: gone", None, "look")


def test_text_looks_like_the_compilers_of_the_field() -> None:
    assert render_problems([STEPS]) == (
        "error[unknown-key]: unknown key 'stpes' in training\n"
        " --> exp.toml:12:1\n"
        " 12 | stpes = 100\n"
        "    | ^^^^^ did you mean 'steps'?"
    )


def test_several_problems_have_an_empty_line_between_them() -> None:
    shown = render_problems([NOWHERE, STEPS])
    assert shown.startswith("error[unreadable]: cannot read x.toml: gone\n look\n\nerror[unknown-key]")


def test_color_only_adds_escapes() -> None:
    import re

    colored = render_problems([STEPS], color=True)
    assert colored != render_problems([STEPS])
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == render_problems([STEPS])


@pytest.mark.parametrize(
    ("source", "column", "carets"),
    [
        ("\tx = 1", 2, "    | \t^"),
        ("名 = 'x'", 5, "    |      ^"),
        ("e\u0301 = 1", 6, "    |     ^"),
    ],
)
def test_the_underline_stands_under_the_text(source: str, column: int, carets: str) -> None:
    problem = Problem("x", "x", Location("f", 10, column, 1, source))
    assert render_problems([problem]).splitlines()[-1] == carets


def test_a_long_line_is_shown_in_part() -> None:
    source = "x = [" + "1, " * 500 + "]"
    at = 1200
    *_, line, under = render_problems([Problem("x", "x", Location("f", 1, at + 1, 1, source))]).splitlines()
    assert len(line) < 200
    assert line[under.index("^")] == source[at]


def test_what_steers_a_terminal_is_not_printed() -> None:
    assert "\x1b" not in render_problems([OVERRIDE])
    assert "\x1b" not in render_problems([Problem("x", "a\x1b[2Jb", None, "\x07")])


def test_json_is_one_versioned_document() -> None:
    document = json.loads(render_problems([STEPS, NOWHERE], format="json"))
    assert document["version"] == 1
    assert document["problems"][0] == {
        "code": "unknown-key",
        "message": "unknown key 'stpes' in training",
        "hint": "did you mean 'steps'?",
        "path": "exp.toml",
        "line": 12,
        "column": 1,
        "length": 5,
        "source": "stpes = 100",
    }
    assert document["problems"][1]["path"] is None


def test_github_annotations_are_escaped() -> None:
    first, second, third = render_problems([STEPS, OVERRIDE, NOWHERE], format="github").splitlines()
    assert first == (
        "::error file=exp.toml,line=12,col=1,endColumn=6,title=unknown-key"
        "::unknown key 'stpes' in training: did you mean 'steps'?"
    )
    assert second == "::error title=syntax::no: key (in override a.b%25=c,d\x1b[31m)"
    assert third == "::error title=unreadable::cannot read x.toml: gone: look"


def test_problems_are_in_order_of_place() -> None:
    problems = Problems()
    problems.file("exp.toml")
    problems.file("base.toml")
    places = [
        ("override", 1, 1),
        ("base.toml", 2, 1),
        ("exp.toml", 9, 1),
        ("exp.toml", 2, 5),
        ("exp.toml", 2, 1),
    ]
    problems.add("x", "nowhere")
    for path, line, column in places:
        problems.add("x", "somewhere", Location(path, line, column, 1, ""))
    shown = [p.location and (p.location.path, p.location.line, p.location.column) for p in problems.sorted()]
    assert shown == [*reversed(places[2:]), places[1], places[0], None]


def test_the_same_problem_is_told_once() -> None:
    problems = Problems()
    problems.add("x", "same")
    problems.add("x", "same")
    assert len(problems.sorted()) == 1


@pytest.mark.parametrize(
    ("span", "line", "column", "length"),
    [((0, 3), 1, 1, 3), ((2, 9), 1, 3, 1), ((4, 7), 2, 1, 3), ((7, 7), 2, 4, 1), ((8, 8), 3, 1, 1)],
)
def test_a_span_becomes_a_place_in_its_first_line(span, line: int, column: int, length: int) -> None:
    at = Source("f", "abc\ndef\n").location(span)
    assert (at.line, at.column, at.length) == (line, column, length)


def test_a_recipe_error_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(RecipeError([STEPS, NOWHERE])))
    assert error.problems == [STEPS, NOWHERE] and error.exit_code == 3
