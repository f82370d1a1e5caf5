"""titan-rl: samples are read as they were written, whatever a model and a dataset wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.security.writers import HOSTILE, Writer, check_comments, check_rows
from titan_rl.recorded import Recorder, read

WRITERS = [Writer("rollouts", "titan_rl.recorded:Recorder", "titan_rl.recorded")]


def test_what_writes_has_a_row() -> None:
    check_rows("titan_rl", WRITERS)
    check_comments("titan_rl", {})


@pytest.mark.parametrize("text", HOSTILE)
def test_rollouts_are_read_as_written(text: str, tmp_path: Path) -> None:
    row = {"prompt": text, "answer": text, "samples": [{"text": text, text: [text]}]}
    Recorder(tmp_path).write(1, [row, row])
    file = tmp_path / "rollouts" / "step-1.jsonl"
    lines = file.read_bytes().decode().removesuffix("\n").split("\n")
    assert [json.loads(line) for line in lines] == read(file) == [row, row]
