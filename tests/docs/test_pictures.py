"""docs/pictures/packing.py draws from batches what the data page shows; `python docs/pictures/packing.py`."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from types import ModuleType

import pytest

from tests.docs.markdown import ROOT

PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def packing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_packing", PICTURES / "packing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_of_packing_are_current_and_in_the_page(packing: ModuleType) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert {file.name for file in PICTURES.glob("packing-*.svg")} == {
        f"packing-{name}.svg" for name in packing.PICTURES
    }
    for name in packing.PICTURES:
        text = (PICTURES / f"packing-{name}.svg").read_text(encoding="utf-8")
        assert text == packing.drawn(name), "run: python docs/pictures/packing.py"
        ElementTree.fromstring(text)
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert f"(pictures/packing-{name}.svg)" in page


def test_a_picture_shows_documents_targets_and_padding(packing: ModuleType) -> None:
    """Conversations of a row do not see each other, and the user's words are no targets."""
    title, config, rows, count = packing.PICTURES["chat-packed"]
    made = packing.batch(config, rows, count)
    assert packing.documents(made, 0)[0] == 0 and 1 in packing.documents(made, 0)
    assert packing.documents(made, 0)[-1] == -1
    drawn = packing.drawn("chat-packed")
    assert "pack = true" in title and drawn.count("<line") == len(packing.TALKS)
    assert all(drawn.count(f'fill-opacity="{strength}"') for strength in (0.25, 0.35, 1.0))
