"""An error in the code of a plugin names its component, its file and its line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from titancli.observe import failures
from titancli.runs import RunFolder

PLUGIN = """\
from titancli import component, hookimpl

@component("loss", "typo", target="blamed:Typo")
class TypoConfig:
    "A loss."

@component("dataset", "bad_rows", target="blamed:build_rows")
class RowsConfig:
    "A dataset."

class Typo:
    def __init__(self, config): pass
    def __call__(self, logits, batch): return batch["tragets"].sum()

def build_rows(config, **runtime): return Rows()

class Rows:
    def __iter__(self): yield {}["column"]
    def skip(self, rows): return rows
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

@hookimpl
def titan_components(): return [TypoConfig, RowsConfig]
"""


@pytest.fixture
def plugin(here: Path) -> Iterator[str]:
    (here / "blamed.py").write_text(PLUGIN)
    yield "./blamed.py"
    sys.modules.pop("blamed", None)


def line(words: str) -> int:
    (found,) = [number for number, text in enumerate(PLUGIN.splitlines(), 1) if words in text]
    return found


def recorded(folder: str) -> str:
    return json.dumps(RunFolder.open(Path(folder).absolute()).outcome())


def test_a_misspelt_tensor_of_a_batch(train, plugin: str) -> None:
    done = train("tiny.toml", "-p", plugin, "loss=typo", "--run-dir", "r")
    place = f"in the loss blamed/typo, blamed.py:{line('tragets')}"
    assert done.code == 1 and "the batch has no 'tragets'" in done.err
    assert f"\n {place}\n did you mean 'targets'?" in done.err
    assert place in recorded("r")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_dataset_also_in_a_process_of_its_own(train, plugin: str, workers: int) -> None:
    data = ("dataset={type='bad_rows'}", f"training.dataloader.num_workers={workers}")
    done = train("tiny.toml", "-p", plugin, *data, "--run-dir", "r")
    place = f"in the dataset blamed/bad_rows, blamed.py:{line('column')}"
    assert done.code == 1 and f"KeyError: 'column'\n {place}\n" in done.err
    assert place in recorded("r")


def test_an_error_on_one_of_two_ranks(train_on, plugin: str) -> None:
    train_on(2, "tiny.toml", "-p", plugin, "loss=typo", "--run-dir", "r")
    found = failures.cause(failures.read(Path("r/logs")), [], [])
    place = f"in the loss blamed/typo, blamed.py:{line('tragets')}"
    assert found is not None and f"\n {place}\n did you mean 'targets'?" in failures.block(found, None)
    assert found.words.endswith(f"({place})")
