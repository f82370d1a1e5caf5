"""Prompts from an argument, standard input, and files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from titancli.errors import EnvironmentProblem, UsageError
from titancli.generate.prompts import read_prompts


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("data", "prompt"),
    [(b"once\n", "once"), (b"once\n\n", "once\n"), (b"a\r\n", "a"), (b"", ""), (b" x", " x")],
)
@pytest.mark.parametrize("argument", [None, "-"])
def test_standard_input_is_one_prompt(
    monkeypatch: pytest.MonkeyPatch, data: bytes, prompt: str, argument: str | None
) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(data))
    assert read_prompts(argument, None) == [prompt]


def test_an_argument_leaves_standard_input_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(b"unread"))
    assert read_prompts("once ", None) == ["once "]


def test_without_a_prompt_at_a_terminal_the_usage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(b"", terminal=True))
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts(None, None)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts(None, None)


def test_a_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone \r\n\n  two\u2028lines\n".encode())
    assert read_prompts(None, file) == ["one ", "  two\u2028lines"]


def test_a_jsonl_file_has_prompts_of_any_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts.JSONL"
    file.write_text('{"prompt": "a\\nb", "id": 3}\n\n{"prompt": ""}\n')
    assert read_prompts(None, file) == ["a\nb", ""]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("p.txt", b"", "contains no prompts"),
        ("p.txt", b" \n\n", "contains no prompts"),
        ("p.txt", b"a\xff\n", "not UTF-8: byte 2"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 1}\n', "p.jsonl:2 has no string"),
        ("p.jsonl", b'"a"\n', "p.jsonl:1 has no string"),
        ("p.jsonl", b"once\n", "p.jsonl:1 is not JSON"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "p.jsonl:1 is not valid Unicode"),
    ],
)
def test_a_file_that_is_not_as_it_should_be(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        read_prompts(None, file)


def test_other_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        read_prompts(None, tmp_path / "none.txt")
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        read_prompts(None, tmp_path)
    with pytest.raises(UsageError, match="only one of them"):
        read_prompts("a", tmp_path / "p.txt")
    with pytest.raises(UsageError, match="not valid Unicode"):
        read_prompts("\udcff", None)
    monkeypatch.setattr("sys.stdin", Stdin(b"\xe6\x97"))
    with pytest.raises(UsageError, match="standard input is not UTF-8"):
        read_prompts("-", None)
