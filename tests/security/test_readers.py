"""Each reader of a stranger's file, within bounds of time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security import readers
from tests.security.doors import DOORS
from tests.security.readers import ELSEWHERE, OWN, READERS, ROOT, require_bounds

READ_WHOLE = {
    "model of a checkpoint": readers.HARMS,
    "recipe": ("expands",),
    "rows": ("nested",),
    "table": ("nested",),
    "tokenizer of an export": ("nested",),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", READERS)
def test_small_files_cost_little(tmp_path: Path, name: str) -> None:
    require_bounds(readers.__file__, name, tmp_path, READ_WHOLE.get(name, ()))


def test_every_door_has_a_reader() -> None:
    read = {row.door for row in READERS.values()}
    assert {door.name for door in DOORS} == read | ELSEWHERE.keys() | OWN.keys()
    assert not read & OWN.keys() and not ELSEWHERE.keys() & OWN.keys()


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_other_tests_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    first, plugin, *_ = Path(file).parts
    if first == "plugins" and not (ROOT / first / plugin).is_dir():
        pytest.skip(f"{plugin} is not here")
    assert f"def {name}(" in (ROOT / file).read_text()
