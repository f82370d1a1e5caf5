"""From the command line to the model, the call stack is as short as the page on architecture says."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import titancli
from tests.run.conftest import Finished
from titancli.models.blocks.decoder import Decoder

PACKAGE = Path(titancli.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/architecture.md"


def test_the_first_forward_is_reached_through_the_files_that_the_page_names(
    train: Callable[..., Finished], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, files = Decoder.forward, dict[str, None]()

    def seen(self: Decoder, *given: Any, **named: Any) -> Any:
        if not files:
            paths = [Path(frame.filename) for frame in traceback.extract_stack()]
            own = [path for path in paths if path.is_relative_to(PACKAGE)]
            files.update(dict.fromkeys(str(path.relative_to(PACKAGE)) for path in own))
        return forward(self, *given, **named)

    monkeypatch.setattr(Decoder, "forward", seen)
    assert train("tiny.toml", "training.steps=1").code == 0
    paragraph = PAGE.read_text(encoding="utf-8").partition("goes through nine files:")[2].partition("\n\n")[0]
    assert [*files, "models/blocks/decoder.py"] == re.findall(r"`([\w/.]+\.py)`", paragraph)
