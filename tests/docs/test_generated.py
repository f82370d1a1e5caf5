"""What docs/generate.py writes is current; `python docs/generate.py` makes it so."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from titancli import builtin, tested_systems
from titancli.registry.fields import summary

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_component_reference_is_current(generate: ModuleType) -> None:
    assert (DOCS / "components.md").read_text(encoding="utf-8") == generate.components_page(), (
        "run: python docs/generate.py"
    )


def test_the_command_reference_is_current(generate: ModuleType) -> None:
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == generate.commands_page(), (
        "run: python docs/generate.py"
    )


def test_the_torchtitan_table_is_current(generate: ModuleType) -> None:
    text = (DOCS / "coming-from-torchtitan.md").read_text(encoding="utf-8")
    assert text == generate.torchtitan_page(text), "run: python docs/generate.py"
    assert text.count("\n| `") >= 149


def test_the_tables_of_other_tools_are_current(generate: ModuleType) -> None:
    text = (DOCS / "coming-from-other-tools.md").read_text(encoding="utf-8")
    assert text == generate.tools_page(text), "run: python docs/generate.py"
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    assert len(rows) > 600
    for row in rows:
        told = row.rstrip("| ").rpartition("|")[2].strip()
        assert told and not told.endswith(": ") and told not in ("none:", "not needed:"), row


def test_the_page_has_what_titan_was_run_on(generate: ModuleType) -> None:
    text = (DOCS / "tested.md").read_text(encoding="utf-8")
    assert text == generate.tested_page(text), "run: python docs/generate.py"
    script = (DOCS.parent / "tests" / "versions.sh").read_text(encoding="utf-8")
    pinned = (DOCS.parent / "constraints.txt").read_text(encoding="utf-8")
    for minor, row in tested_systems.TORCH.items():
        version = row.what.removeprefix("torch ")
        assert version.startswith(f"{minor}.") and version in script + pinned
    for row in tested_systems.ROWS:  # their tests are there
        for file in re.findall(r"tests/[\w/.]+", row.command):
            assert (DOCS.parent / file).exists(), file


def test_every_field_of_torchtitan_has_a_place_or_a_reason(generate: ModuleType) -> None:
    rows = [row for row in generate.torchtitan_table().splitlines() if row.startswith("| `")]
    assert len(rows) > 100
    for row in rows:
        told = row.rstrip("| ").rpartition("|")[2].strip()
        assert told and told != "none:", row


@pytest.mark.parametrize("config", builtin.titan_components(), ids=lambda config: config.__qualname__)
def test_a_summary_is_one_whole_sentence(config: type) -> None:
    assert summary(config).endswith(".")
