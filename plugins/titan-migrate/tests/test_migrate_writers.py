"""titan-migrate: a converted recipe says the same, whatever the other trainer's file says."""

from __future__ import annotations

import pytest
import tomli

from tests.security.writers import UTF8, Writer, check_comments, check_rows
from titan_migrate import account

WRITERS = [
    Writer("a converted recipe", "titan_migrate.account:as_text", "titan_migrate.account"),
    Writer("recipe file", "titan_migrate.command:write_new", "titan_migrate.command"),
]


def test_what_writes_has_a_row() -> None:
    check_rows("titan_migrate", WRITERS)
    check_comments("titan_migrate", {})


@pytest.mark.parametrize("text", UTF8)
def test_a_recipe_says_the_same(text: str) -> None:
    below = {"type": text, "options": {"x": text}, "parts": [{"y": {"z": [text]}}, {}]}
    recipe = {"name": text, "training": {"steps": 1}, "loggers": [below, {"type": text}], "callbacks": []}
    remarks = [account.Remark(text, line, text, text) for line in (None, 3)]
    found = account.Translation("", [text], remarks, remarks, remarks, remarks)
    made = account.as_text(text, recipe, found, text or "x")
    assert tomli.loads(made) == recipe
    assert all(line.isprintable() for line in made.split("\n"))
