"""Best-fit packing of text: documents are whole and apart, and every token is predicted once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.helpers import global_rows, make
from titancli.cli import main
from titancli.data import HFDataset, JsonLines, Parquet, TextFiles
from titancli.data.batch import IGNORE
from titancli.errors import EnvironmentProblem
from titancli.observe.metrics import collector

TEXTS = [chr(97 + number % 26) * (number * 7 % 40) for number in range(200)]
S = 16


@pytest.fixture(autouse=True)
def nothing_reported() -> Iterator[None]:
    collector.drain()
    yield
    collector.drain()


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, Any]:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS if text))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=30)
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number:03}.txt").write_text(text)
    fields: dict[str, Any] = {"packing": "best_fit", "document_mask": True, "shuffle": False, "repeat": False}
    return {
        "jsonl": JsonLines(paths=[lines], **fields),
        "parquet": Parquet(paths=[tmp_path / "a.parquet"], **fields),
        "text_files": TextFiles(paths=[tmp_path / "text"], **fields),
        "hf": HFDataset(path=str(lines), **fields),
    }


def predictions(texts: list[str], longest: int) -> Counter[tuple[int, int, int]]:
    """Place in its piece, input and target of every token that is predicted."""
    found: Counter[tuple[int, int, int]] = Counter()
    for text in filter(None, texts):
        ids = [*text.encode(), 256]
        found.update((at % longest, ids[at], ids[at + 1]) for at in range(len(ids) - 1))
    return found


@pytest.mark.parametrize("name", ["jsonl", "parquet", "text_files", "hf"])
@pytest.mark.parametrize("longest", [None, 5])
def test_every_token_is_predicted_once_within_its_document(
    configs: Any, name: str, longest: int | None
) -> None:
    config = type(configs[name])(**{**vars(configs[name]), "max_document_length": longest})
    found: Counter[tuple[int, int, int]] = Counter()
    places = 0
    for batch in make(config, seq_len=S, rows=2):
        rows = zip(
            *(batch[n].tolist() for n in ("tokens", "targets", "positions", "document_ids")), strict=True
        )
        for tokens, targets, positions, ids in rows:
            places += S * (set(targets) != {IGNORE})
            assert [p == 0 for p in positions] == [at == 0 or ids[at] != ids[at - 1] for at in range(S)]
            found.update(
                (position, token, target)
                for token, target, position in zip(tokens, targets, positions, strict=True)
                if target != IGNORE
            )
    assert found == predictions(TEXTS, longest or S)
    waste = 1 - found.total() / places
    assert collector.drain()["wasted_tokens"].value == pytest.approx(waste, abs=1e-6)
    assert waste < (0.02 if longest is None else 0.07), "three pieces of 5 in a row of 16"


def test_ranks_and_stops_change_nothing(configs: Any) -> None:
    config = JsonLines(**{**vars(configs["jsonl"]), "repeat": True, "shuffle": True})
    whole, _ = global_rows(config, 600, dp_size=1, rows=1)
    got: list[Any] = []
    state = None
    while len(got) < 580:
        for dp_size, rows, batches in [(1, 3, 5), (3, 1, 3), (2, 2, 5), (4, 2, 1)]:
            part, state = global_rows(config, batches, dp_size=dp_size, rows=rows, state=state)
            state = json.loads(json.dumps(state))
            got += part
    assert got[:580] == whole[:580] and state is not None and state["epoch"] > 0
    with pytest.raises(EnvironmentProblem, match="longest was 16 and is 5"):
        make(JsonLines(**{**vars(config), "max_document_length": 5})).load_state_dict(state)


def test_settings_that_do_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["validate", "llama3_debug", "dataset.packing=best_fit", "dataset.max_document_length=5"]) == 3
    )
    assert "set document_mask = true" in "".join(capsys.readouterr())
    assert main(["validate", "llama3_debug", "dataset.max_document_length=5"]) == 3
    assert 'with packing = "best_fit" only' in "".join(capsys.readouterr())
    chosen = ["dataset.packing=best_fit", "dataset.document_mask=true", "dataset.max_document_length=5"]
    assert main(["validate", "llama3_debug", *chosen]) == 0
