"""docs/plan.md shows what the command prints."""

from __future__ import annotations

import shlex

import pytest

from tests.docs.markdown import ROOT, blocks
from titancli.cli import main

SHOWN = [
    block
    for block in blocks(ROOT / "docs" / "plan.md")
    if block.language == "console" and block.mark != "not run"
]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.text.split()[3])
def test_the_page_shows_what_is_printed(block, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, output = block.text.partition("\n")
    assert main([*shlex.split(command)[2:], "-p", "no:titan-offload"]) == 0  # whose callback may be cheaper
    assert capsys.readouterr().out == output


def test_the_table_of_published_runs_has_the_estimates_above_it() -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    table = text[text.index("### Estimates and measurements") :]
    assert len(SHOWN) == 4
    for block, (memory, rate) in zip(
        SHOWN[1:], [("63.4", "15,078"), ("32.3", "537"), ("67.6", "116")], strict=True
    ):
        shown = float(block.text.split("memory")[1].split()[0])
        assert f"{shown:.1f}" == memory and memory in table
        assert f"at most {rate} tokens/s" in block.text and rate in table
