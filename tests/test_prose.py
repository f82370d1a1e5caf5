"""Docstrings and messages are plain English: forbidden phrases, and how docstrings of functions begin."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TURNED_ROUND = {
    r"[Ss]ee to it": "ensure, reserve, check: the verb for what is done",
    r"\b(?:is|are) told\b": "reported, printed, passed",
    r"\bno most\b": "no maximum",
    r"\bnobody can be asked\b": "not a terminal",
    r"\bruns part\b": "runs diverge",
    r"[\"']asked;": "requested",
    r"\bheld against\b": "compared with",
    r"\bthat which\b": "the one that",
    r"\bby what (?:factor|share|number)\b": "the factor by which",
    r"\bas people are told\b": "the name in messages",
    r"\bstands? for nothing\b": "means nothing",
    r"\bwhat there is of\b": "the existing …",
    r"\b[Ww]hat [\w ]{1,30} is none\b": "something that is not …",
    r"\bholds? [\w ]{1,30} against\b": "compares … with",
    r"\bbut for\b": "except, apart from",
    r"\bno sooner\b": "only after",
    r"\bWhether [^.`|]{1,90} says?\b": "… decides whether",
    r"\b(?:What|Which) [^.,;:|`\"]{1,90} says (?:`|a\b|the\b|its\b)": "… decides what, which",
    r"\bbeside arithmetic\b": "overlaps with compute",
}
"""Each with its replacement."""
OF_PAGES = {
    r"(?<![\w.`])beside\b(?!\.py)": "next to, in addition to, compared with",
    r"\bhow far off\b": "the error, the difference",
}
"""The same of pages alone: docstrings still have them."""
PAGES = ("docs/*.md", "*.md", "plugins/*/README.md")


def files(*patterns: str) -> list[Path]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if ".venv" not in path.parts}
    return sorted(found)


def uses(phrase: str, *patterns: str) -> list[str]:
    places = []
    for path in files(*patterns):
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(phrase.replace(" ", r"\s+"), text):
            line = text.count("\n", 0, found.start()) + 1
            places.append(f"{path.relative_to(ROOT)}:{line}: {found.group()!r}")
    return places


@pytest.mark.parametrize("phrase", TURNED_ROUND)
def test_no_turned_round_phrase_is_used(phrase: str) -> None:
    places = uses(phrase, "titancli/**/*.py", "plugins/**/*.py", *PAGES)
    assert not places, f"write instead: {TURNED_ROUND[phrase]}\n" + "\n".join(places)


@pytest.mark.parametrize("phrase", OF_PAGES)
def test_pages_are_plain(phrase: str) -> None:
    places = uses(phrase, *PAGES)
    assert not places, f"write instead: {OF_PAGES[phrase]}\n" + "\n".join(places)


def _is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(one) for one in function.decorator_list)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """A property may be described by a noun, and a test by a sentence."""
    wrong = []
    for path in files("titancli/**/*.py", "plugins/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node) or ""
                noun = "" if _is_property(node) or node.name.startswith("test_") else "|The|A|An|One|No"
                if re.match(rf"(What|Which|Whether|Of{noun})\b", doc):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {doc.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)
