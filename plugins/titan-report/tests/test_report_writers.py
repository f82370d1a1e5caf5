"""titan-report: a page has the same tags, whatever the run's texts are."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

import pytest

from tests.cli.run_folders import began, event, make, step
from tests.security.writers import HOSTILE, UTF8, Writer, check_comments, check_rows
from titan_report.page import _script
from titancli.cli import main
from titancli.recipe import inline

WRITERS = [
    Writer("HTML", "titan_report.page:html", "titan_report.page titan_report.command"),
    Writer("JSON in HTML", "titan_report.page:_script", "titan_report.page"),
]


def test_what_writes_has_a_row() -> None:
    check_rows("titan_report", WRITERS)
    check_comments("titan_report", {})


class Page(html.parser.HTMLParser):
    """The tags of a page, in order, with the names of their attributes; and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_has_the_same_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def page(name: str, text: str) -> Page:
        messages = [event("log", 5, level="warning", message=text)]
        lock = f"name = {inline(text)}\n[model]\ntype = {inline(text)}\n"
        run = make(tmp_path / name, [began(), step(1, 5), *messages], lock=lock)
        assert main(["report", str(run), "-o", str(tmp_path / f"{name}.html")]) == 0, capsys.readouterr().err
        return Page((tmp_path / f"{name}.html").read_bytes().decode())

    plain = page("plain", "plain")
    for number, text in enumerate(UTF8[1:-1]):
        made = page(str(number), text)
        assert made.found == plain.found
        assert any(f"type = {inline(text)}" in shown for shown in made.texts)  # the recipe, as it is


@pytest.mark.parametrize("text", HOSTILE)
def test_json_ends_no_script(text: str) -> None:
    made = _script({text: [text]})
    assert json.loads(made) == {text: [text]}
    assert "<" not in made and made.isascii()
