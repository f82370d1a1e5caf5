"""Everything that docs/architecture.md and CONTRIBUTING.md name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.docs.test_maintenance import TARGETS
from tests.test_architecture import FLOORS

PAGES = {page.name: page for page in (ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md")}
FILE = re.compile(r"(\.?\w[\w./-]*/[\w.-]*|\w+\.(?:py|toml|md|txt))(?::([\w.]+))?")
"""A file or a folder, and maybe a name within it."""
OF_RUNS = {"events.jsonl", "run.json", "manifest.json", "metadata.json", "config.json"}
each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def named(text: str) -> Iterator[tuple[str, str | None]]:
    """Return what is between backticks and looks like a file, with the name behind its colon."""
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        found = FILE.fullmatch(code)
        if found and found[1] not in OF_RUNS:
            yield found[1], found[2]


def place(name: str) -> Path | None:
    places = (ROOT / name, ROOT / "titancli" / name)
    return next((path for path in places if path.exists()), None)


def missing(file: str, name: str | None) -> str | None:
    path = place(file)
    if path is None:
        return f"there is no {file}"
    body: list[ast.stmt] = ast.parse(path.read_text()).body if name else []
    for part in name.split(".") if name else ():
        inside = [node for node in body if part in _defined(node)]
        if not inside:
            return f"{file} has no {name}"
        body = getattr(inside[0], "body", [])
    return None


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@each_page
def test_every_path_and_name_exists(page: Path) -> None:
    found = list(named(page.read_text(encoding="utf-8")))
    assert len(found) > 10
    assert [wrong for file, name in found if (wrong := missing(file, name))] == []


@pytest.mark.parametrize(
    "text",
    ["`engine/nowhere.py`", "`engine/build.py:nothing`", "`engine/engine.py:Engine.nothing`", "`nowhere/`"],
)
def test_the_search_finds_what_is_missing(text: str) -> None:
    ((file, name),) = named(text)
    assert missing(file, name)


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert links and all((page.parent / link).exists() for link in links)


def test_the_floors_are_those_of_the_test() -> None:
    text = PAGES["architecture.md"].read_text(encoding="utf-8")
    table = text.partition("<!-- floors, from the top -->\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert [set(re.findall(r"`([\w.]+)`", row)) for row in rows] == FLOORS[::-1]


def test_the_commands_of_the_guide_are_targets() -> None:
    text = PAGES["CONTRIBUTING.md"].read_text(encoding="utf-8")
    called = set(re.findall(r"`?make ([a-z][a-z-]+)", text))
    assert {"lint", "quick", "test", "test-all", "test-versions"} <= called <= TARGETS, called - TARGETS
