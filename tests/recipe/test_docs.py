"""docs/recipes.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli

import titancli.recipe
from titancli.recipe import load_recipe
from titancli.recipe.schema import Recipe, recipe_slots
from titancli.registry.fields import fields_of
from titancli.registry.kinds import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)


def test_the_first_sample_is_a_recipe_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "sample.toml"
    path.write_text(BLOCKS[0], encoding="utf-8")
    assert load_recipe(path).recipe.name == "stdlib_small"


@pytest.mark.parametrize("block", BLOCKS)
def test_each_line_of_the_samples_is_toml(block: str) -> None:
    for line in block.splitlines():
        tomli.loads(line)


def test_every_section_stands_in_the_table_and_no_other() -> None:
    listed = re.findall(r"^\| `(\[+)(\w+)\]+` ", TEXT, re.MULTILINE)
    top = {"recipe", "name", "description", "weights", "weights_vocab", "assets"}
    assert {name for _, name in listed} == set(fields_of(Recipe)) - top
    for brackets, name in listed:
        is_array = name in recipe_slots() and not fields_of(Recipe)[name].type.slot
        assert brackets == ("[[" if is_array else "[")


def test_the_default_types_are_those_of_the_kinds() -> None:
    listed = dict(re.findall(r"^\| `\[(\w+)\]` \| component[^|]*\(`(\w+)`\)", TEXT, re.MULTILINE))
    kinds = {name: slot.kind for name, slot in recipe_slots().items()}
    assert {kinds[name]: default for name, default in listed.items()} == {
        kind.name: kind.default for kind in KINDS.values() if kind.default and kind.name in kinds.values()
    }


def test_every_code_is_explained() -> None:
    package = Path(titancli.recipe.__file__).parents[1]
    files = (file for room in ("recipe", "run") for file in (package / room).glob("*.py"))
    source = "".join(file.read_text() for file in files)
    used = set(re.findall(r'(?:\badd\(\s*|Problem\(|cls\(|code = |return )"([a-z0-9-]+)",\s', source))
    used |= set(re.findall(r'code = "([a-z-]+)" if .* else "([a-z-]+)"', source).pop())
    used |= set(re.findall(r'= "([a-z-]+)"\n"""Code of the problem', source))
    rows = [line.split("|")[1] for line in TEXT.split("| code |")[1].splitlines()[1:]]
    explained = set(re.findall(r"`([a-z0-9-]+)`", "".join(rows)))
    assert used | {"recipe"} == explained
