"""titan-torchtitan: a translated recipe says the same, whatever the job config says."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli

from tests.security.writers import UTF8, Writer, check_comments, check_rows
from titan_torchtitan import job, translate

WRITERS = [
    Writer("a translated recipe", "titan_torchtitan.translate:_text", "titan_torchtitan.translate"),
    Writer("recipe file", "titan_torchtitan.command:write_new", "titan_torchtitan.command"),
]


def test_what_writes_has_a_row() -> None:
    check_rows("titan_torchtitan", WRITERS)
    check_comments("titan_torchtitan", {})


@pytest.mark.parametrize("text", UTF8)
def test_a_recipe_says_the_same(text: str) -> None:
    below = {"type": text, "options": {"x": text}, "parts": [{"y": {"z": [text]}}, {}]}
    recipe = {"name": text, "training": {"steps": 1}, "loggers": [below, {"type": text}], "callbacks": []}
    remarks = [job.Remark(text, line, text, text) for line in (None, 3)]
    told = translate.Translation("", [text], remarks, remarks, remarks)
    made = translate._text(recipe, Path(text.replace("\0", "") or "x"), told)
    assert tomli.loads(made) == recipe
    assert all(line.isprintable() for line in made.split("\n"))
