"""The scanner finds exactly what tomli reads."""

from __future__ import annotations

import datetime
import math
import tomllib
from collections.abc import Iterable
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.yardstick import cpu_seconds
from titancli.recipe.toml import KeyPath, dotted, match_key, scan, toml_blocks

# ------------------------------------------------------------------------ strategies: TOML as text

BLANK = st.sampled_from(["", " ", "\t", "  "])
COMMENT = st.sampled_from(["", " # a 'comment' = \"x\"", "#[x]", " # ]}"])
BREAK = st.sampled_from(["", "\n", " \n\n", " # c ] }\n", "\n\t"])
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


LITERAL = TEXT.filter(lambda text: "'" not in text)
STRINGS = st.one_of(
    TEXT.map(lambda text: f'"{_escaped(text)}"'),
    LITERAL.map(lambda text: f"'{text}'"),
    st.tuples(TEXT, TEXT).map(lambda pair: f'"""{_escaped(pair[0])}""\n#[x]={_escaped(pair[1])}"""'),
    st.tuples(LITERAL, LITERAL).map(lambda pair: f"'''{pair[0]}''\n]{pair[1]}'''"),
    st.sampled_from(
        ['""', "''", '""""""', "''''''", '"""x"""""', "'''x'''''", '"\\"#"', '"""\\\n  x"""', '"\\e"']
    ),
)
SCALARS = st.one_of(
    STRINGS,
    st.sampled_from(
        ["0", "-17", "1_000", "0xfF", "0o7", "0b1", "3.5", "-1e-9", "6.0E+2", "inf", "-nan", "true"]
    ),
    st.sampled_from(["1979-05-27", "07:32:00.5", "1979-05-27 07:32:00", "1979-05-27T00:32:00.999-07:00"]),
    st.sampled_from(["1979-05-27 07:32:00Z", "07:32", "1979-05-27t07:32"]),
)
KEYS = st.one_of(
    st.from_regex(r"[A-Za-z0-9_-]{1,4}", fullmatch=True),
    TEXT.map(lambda text: f'"{_escaped(text)}"'),
    LITERAL.map(lambda text: f"'{text}'"),
)
DOTTED = st.lists(KEYS, min_size=1, max_size=3).flatmap(
    lambda parts: st.sampled_from([".", " . ", "\t."]).map(lambda dot: dot.join(parts))
)


@st.composite
def arrays(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    parts = [f"{draw(BREAK)}{value}{draw(BREAK)}" for value in draw(st.lists(values, max_size=3))]
    comma = "," if parts and draw(st.booleans()) else ""
    return f"[{','.join(parts)}{comma}{draw(BREAK)}]"


@st.composite
def inline_tables(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    pairs = draw(st.lists(st.tuples(DOTTED, values), max_size=3))
    parts = [f"{draw(BREAK)}{key}{draw(BLANK)}={draw(BLANK)}{value}{draw(BREAK)}" for key, value in pairs]
    comma = "," if parts and draw(st.booleans()) else ""
    return f"{{{','.join(parts)}{comma}{draw(BREAK)}}}"


VALUES = st.recursive(SCALARS, lambda below: st.one_of(arrays(below), inline_tables(below)), max_leaves=6)


@st.composite
def lines(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(["pair", "pair", "pair", "table", "array", "empty"]))
    indent, comment = draw(BLANK), draw(COMMENT)
    if kind == "empty":
        return f"{indent}{comment}"
    key = draw(DOTTED)
    if kind == "pair":
        return f"{indent}{key}{draw(BLANK)}={draw(BLANK)}{draw(VALUES)}{comment}"
    opening, closing = ("[", "]") if kind == "table" else ("[[", "]]")
    return f"{indent}{opening}{draw(BLANK)}{key}{draw(BLANK)}{closing}{comment}"


def document(lines: Iterable[str]) -> str:
    """A valid TOML document: lines that would make it invalid are left out."""
    text = ""
    for line in lines:
        longer = f"{text}{line}\n"
        try:
            tomli.loads(longer)
        except tomli.TOMLDecodeError:
            continue
        text = longer
    return text


@st.composite
def documents(draw: st.DrawFn) -> str:
    text = document(draw(st.lists(lines(), max_size=12)))
    return text if draw(st.booleans()) else text.removesuffix("\n")


@st.composite
def four_documents(draw: st.DrawFn) -> list[str]:
    """The same lines in four orders, each of which leaves out others; drawing lines is what takes time."""
    drawn = draw(st.lists(lines(), max_size=12))
    half = len(drawn) // 2
    orders = [drawn, drawn[::-1], drawn[half:] + drawn[:half], drawn[1::2] + drawn[::2]]
    return [document(order) for order in orders[:2]] + [document(order)[:-1] for order in orders[2:]]


# ----------------------------------------------------------------------------------------- the tests


def paths_of(value: Any, at: KeyPath = ()) -> dict[KeyPath, Any]:
    found = {at: value}
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in below:
        found |= paths_of(item, (*at, key))
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@settings(max_examples=150)
@given(four_documents())
def test_every_key_and_value_of_600_documents_is_found_where_it_stands(texts: list[str]) -> None:
    for text in texts:
        agree(text)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=5_000)
@given(four_documents())
def test_every_key_and_value_of_20000_documents_is_found_where_it_stands(texts: list[str]) -> None:
    for text in texts:
        agree(text)


def agree(text: str) -> None:
    """The scanner finds every key and value that tomli reads, and nothing else."""
    found = scan(text)
    expected = paths_of(tomli.loads(text))
    assert set(found.keys) | set(found.values) <= set(expected)
    for path, value in expected.items():
        if path and isinstance(path[-1], str):
            start, end = found.keys[path]
            assert list(tomli.loads(f"{text[start:end]} = 0")) == [path[-1]]
        if path and not isinstance(value, dict) and not _of_headers(path, found.values):
            start, end = found.values[path]
            assert same(tomli.loads(f"x = {text[start:end]}")["x"], value)


def _of_headers(path: KeyPath, values: dict[KeyPath, tuple[int, int]]) -> bool:
    """An array of `[[headers]]` has no text of its own."""
    return path not in values and (*path, 0) in values


def test_a_table_lies_at_its_header_and_an_array_of_tables_at_each_of_its() -> None:
    text = "[a.b]\n[[c]]\nx = 1\n[[c]]\n[c.d]\nx = 2\n[[c.e]]\n"
    found = scan(text)
    written = {path: text[start:end] for path, (start, end) in found.values.items()}
    assert written == {
        ("a", "b"): "[a.b]",
        ("c", 0): "[[c]]",
        ("c", 0, "x"): "1",
        ("c", 1): "[[c]]",
        ("c", 1, "d"): "[c.d]",
        ("c", 1, "d", "x"): "2",
        ("c", 1, "e", 0): "[[c.e]]",
    }
    assert found.values["c", 0] < found.values["c", 1]
    assert text[slice(*found.keys["a",])] == "a"


def test_inline_tables_of_toml_1_1_are_read() -> None:
    text = "a = {\n  b = 1, # one\n  c = [2,],\n}\n"
    found = scan(text)
    assert text[slice(*found.values["a", "c", 0])] == "2"
    assert text[slice(*found.keys["a", "b"])] == "b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1", (["a", "b"], 3)),
        ("converters.0.recipe=x", (["converters", "0", "recipe"], 19)),
        ("\"a b\" . 'c=d' = 1", (["a b", "c=d"], 13)),
        ("=1", None),
        (".a=1", None),
        ('"\\q"=1', None),
        ("", None),
    ],
)
def test_a_key_is_read_off_the_front_of_a_text(text: str, expected: object) -> None:
    assert match_key(text) == expected


@given(st.lists(st.one_of(TEXT, st.just("a\nb\x7f"), st.just("\x00")), min_size=1, max_size=3))
def test_a_dotted_path_reads_back_as_the_same_keys(parts: list[str]) -> None:
    written = dotted(parts)
    assert match_key(written) == (parts, len(written))


@settings(max_examples=40)
@given(documents(), st.lists(documents(), max_size=2))
def test_blocks_read_back_as_written(text: str, elements: list[str]) -> None:
    """Keys of a table inside an array of tables stay in their element."""
    data = tomli.loads(text) | {"a b": [tomli.loads(element) for element in elements]}
    assert same(tomli.loads(toml_blocks(data)), data)


def test_scanning_is_no_slower_than_parsing() -> None:
    sections = "\n".join(
        f"[section{i}]\n" + "\n".join(f'key_{j} = "value {j}"  # why' for j in range(20)) for i in range(20)
    )
    parsing = cpu_seconds(lambda: tomllib.loads(sections), times=20)
    assert cpu_seconds(lambda: scan(sections), times=20) < parsing


def test_dates_are_values_too() -> None:
    text = "when = 1979-05-27 07:32:00 # then\n"
    start, end = scan(text).values[("when",)]
    assert tomli.loads(f"x = {text[start:end]}")["x"] == datetime.datetime(1979, 5, 27, 7, 32)
