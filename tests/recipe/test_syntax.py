"""What is not TOML: the line where the mistake begins, and a fix that works."""

from __future__ import annotations

import pytest
import tomli

from titancli.errors import Problem, RecipeError
from titancli.recipe.read import parse
from titancli.recipe.toml import Source


def problem(text: str) -> Problem:
    with pytest.raises(tomli.TOMLDecodeError):
        tomli.loads(text)
    with pytest.raises(RecipeError) as caught:
        parse(Source("exp.toml", text), "file")
    (found,) = caught.value.problems
    assert found.code == "syntax" and found.location is not None
    return found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a = 1\n[training]\nsteps = 1\nx = 2\nsteps = 3\n",
            "training.steps is declared twice: line 3 and 5",
        ),
        ("[a]\nx=1\n[b]\ny=1\n[a]\nz=1\n", "[a] is declared twice: line 1 and 5"),
        ("[a.b]\nx=1\n[a]\ny=1\n[a]\nz=1\n", "[a] is declared twice: line 3 and 5"),
        ("a = 1\n[a]\nx=1\n", "[a] is declared twice: line 1 and 2"),
        ("[a]\nx=1\n[[a]]\ny=1\n", "[a] is declared twice: line 1 and 3"),
        ("[[a]]\nx=1\n[a]\ny=1\n", "[a] is declared twice: line 1 and 3"),
        ("[[a]]\nx=1\n[[a]]\nx=1\nx=2\n", "a.1.x is declared twice: line 4 and 5"),
        ("a = {x = 1, x = 2}\n", "a.x is declared twice: both in line 1"),
        ("a.b = 1\na = 2\n", "a is declared twice: line 1 and 2"),
        ("[t]\na.b = 1\n[t.a]\nc = 1\n", "[t.a] is declared twice: line 2 and 3"),
        ("a = {x = 1}\n[a]\ny=2\n", "[a] is declared twice: line 1 and 2"),
        ("a = {x = 1}\n[a.b]\ny=2\n", "[a.b] is declared twice: line 1 and 2"),
        ("a = [\n1,\n2]\nb = [7]\na = [\n1,\n2,\n]\n", "a is declared twice: line 1 and 5"),
        ("a = 1\na = 2", "a is declared twice: line 1 and 2"),
    ],
)
def test_what_is_declared_twice_is_told_with_both_lines(text: str, message: str) -> None:
    found = problem(text)
    assert found.message == message
    assert found.location.line == int(message.split()[-1])
    assert found.hint.startswith("keep one" if message[0] == "[" else "remove one")


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        ("a = [1, 2\nb = 3\n", 1, "unclosed array: it begins in line 1", "close it with ]"),
        (
            "x = 1\na = [\n  1,\n\n[next]\ny = 1\n",
            2,
            "unclosed array: it begins in line 2",
            "close it with ]",
        ),
        ("a = [", 1, "unclosed array: it begins in line 1", "close it with ]"),
        ("a = [\n 'x'\n 'y'\n]\n", 3, "a comma is missing in an array", "elements are separated by commas"),
        ("a = {x = 1\n", 1, "unclosed inline table: it begins in line 1", "close it with }"),
        ('a = """x\nb = 1\n', 1, "unclosed string: it begins in line 1", 'close it with """'),
        ("b = 1\na = '''x\n\n", 2, "unclosed string: it begins in line 2", "close it with '''"),
        ("a = \"it's\nb = 1\n", 1, "unterminated string", 'close it with "'),
        ("a = ['x', 'y]\n", 1, "unterminated string", "close it with '"),
        ("[a\nx = 1\n", 1, "expected ']' at the end of a table declaration", "close it with ]"),
        ("[[a]\nx = 1\n", 1, "expected ']]' at the end of an array declaration", "close it with ]]"),
    ],
)
def test_what_is_not_closed_is_told_where_it_begins(text: str, line: int, message: str, hint: str) -> None:
    found = problem(text)
    assert (found.location.line, found.message, found.hint) == (line, message, hint)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("True", "true"),
        ("Off", "false"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("5.", "5.0"),
        ("007", "7"),
        ("llama3", '"llama3"'),
        ("my run  # it", '"my run"'),
        ("./x", '"./x"'),
        ("10k", '"10k"'),
        ("“x”", '"x"'),
    ],
)
def test_the_value_that_is_proposed_is_one(value: str, written: str) -> None:
    found = problem(f"a = {value}\nb = 1\n")
    assert found.location.line == 1 and found.hint.endswith(written)
    tomli.loads(f"a = {written}\nb = 1\n")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a =\nb = 1\n", "a value follows the ="),
        ("a =", "a value follows the ="),
        ("a = # none\n", "a value follows the ="),
        ("a = None\n", "TOML has no null: for the default, remove the key"),
        ("a: 1\n", "write a = 1"),
        ("training:\n  steps: 5\n", "a section is written [training]"),
        ("a = {x: 1}\n", "write x = 1"),
        ("train for 100 steps\n", "a line is KEY = VALUE"),
        ('{"a": 1}\n', "this is JSON"),
        ("@a = 1\n", "a line is KEY = VALUE"),
        ('a = "C:\\dir"\n', "write \\\\ for a backslash"),
        ("a = 1 b = 2\n", "each key has its own line"),
        ("a = 1,\n", "remove the ,"),
        ("a = 1; b = 2\n", "remove the ;"),
        ("a = 1 // one\n", "a comment begins with #"),
        ("a = 'it's'\n", "inside '…' there can be no '"),
    ],
)
def test_the_fix_of_other_mistakes(text: str, hint: str) -> None:
    assert problem(text).hint.startswith(hint)


@pytest.mark.parametrize(
    "text", ['a = "\x01"\n', "a = 1\r", "\x00", "=", "[", '"', "a.", "[]", "a = 1 \x7f", "[a]\n[a"]
)
def test_odd_texts_are_told_in_words_too(text: str) -> None:
    assert problem(text).message


def test_any_cut_of_a_recipe_is_told_in_words() -> None:
    text = 'a = 1\n[t]\nx = [1, "y", {z = \'w\'}]\n[[u]]\nv = """m\nn"""\n"k l".m = 1e-4 # c\n'
    for cut in range(len(text)):
        for wrong in (
            text[:cut],
            text[:cut] + text[cut + 1 :],
            text + text[:cut],
            text[:cut] + "\"'" + text[cut:],
        ):
            try:
                parse(Source("exp.toml", wrong), "file")
            except RecipeError as error:
                assert error.problems[0].code == "syntax"
