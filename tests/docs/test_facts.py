"""Facts that several places state: each says the same."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest

from tests.docs.markdown import ROOT, blocks
from titancli.data import fitting, row_check, rows
from titancli.loops import pretrain
from titancli.protocols import samples

FACTS: dict[str, list[tuple[str, str]]] = {
    "tokens/s of 8B on one H200": [
        ("README.md", r"trains at ([\d,]+) tokens/s on one H200"),
        ("benchmarks/README.md", r"\| 8B \| titan \| 1 \| ([\d,]+) \|"),
    ],
    "oldest torch": [
        ("README.md", r"titan takes torch ([\d.]+) to"),
        ("pyproject.toml", r'"torch>=([\d.]+)"'),
    ],
    "conversations that may share rows": [("docs/post-training.md", r"in groups of (\d+), by best fit")],
    "documents that are packed together": [("docs/data.md", r"up to ([\d,]+) of them, one after another")],
    "multiple of a padded row": [
        ("docs/post-training.md", r"as the longest of its batch, in multiples of (\d+)"),
        ("docs/post-training.md", r"without padding but up to a multiple of (\d+)"),
    ],
    "rows that are checked at the start": [
        ("docs/post-training.md", r"reads the first (\d+) rows"),
    ],
    "temperature of sampled log-probabilities": [
        ("docs/engine.md", r"`logprobs` are those of the model (at the sampling temperature, [^.]+)\.")
    ],
}
"""Where a fact is stated: a file, and a pattern with what is stated in brackets."""
CODE = {
    "conversations that may share rows": rows.GROUP,
    "documents that are packed together": fitting.PIECES,
    "multiple of a padded row": rows.STEP,
    "rows that are checked at the start": row_check.FIRST,
}
"""The same of the code."""


@pytest.mark.parametrize("fact", FACTS)
def test_fact_is_stated_alike(fact: str) -> None:
    stated = {}
    for file, pattern in FACTS[fact]:
        text = " ".join((ROOT / file).read_text(encoding="utf-8").split())
        found = re.findall(pattern, text)
        assert found, f"{file} no longer states it: {pattern}"
        stated |= {f"{file}: {pattern}": one.replace(",", "") for one in found}
    stated |= {"the code": str(CODE[fact])} if fact in CODE else {}
    assert len(set(stated.values())) == 1, stated


def test_docstring_of_logprobs() -> None:
    [(file, pattern)] = FACTS["temperature of sampled log-probabilities"]
    [said] = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"))
    assert said in " ".join(inspect.getsource(samples).split())


def test_the_readme_has_the_loop() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = (block.text for block in blocks(ROOT / "README.md") if block.text.startswith("while "))
    assert textwrap.indent(shown, "    ") in inspect.getsource(pretrain.pretrain)
    assert len(text.split()) <= 700
