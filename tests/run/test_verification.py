"""`titan data verify` reads every byte of a run's data: one that changed under an unchanged time is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished
from titancli import fingerprint
from titancli.cli import main
from titancli.data.shards import writer  # noqa: F401 - it binds sizes, before they are small
from titancli.runs import RunFolder

Titan = Callable[..., Finished]
SHARDS = ("dataset.type=token_shards", 'dataset.paths=["shards"]')
VALIDATION = 'validation.datasets.held_out={type="text_files", paths=["held-out.txt"]}'


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything above 1 KiB is large, and read once."""
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    for name, size in (("WHOLE_BYTES", 1024), ("CHUNK_BYTES", 512), ("BLOCK_BYTES", 128), ("END_BYTES", 64)):
        monkeypatch.setattr(fingerprint, name, size)


@pytest.fixture
def titan(capfd: pytest.CaptureFixture[str]) -> Titan:
    """`titan(*arguments)`: the command in this process."""

    def run(*arguments: str) -> Finished:
        capfd.readouterr()
        code = main(list(arguments))
        return Finished(code, *capfd.readouterr())

    return run


def flip(path: Path, at: int) -> None:
    """Change one byte; time and size stay what they were."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def verified(here: Path) -> dict[str, Any]:
    return RunFolder(here / "r").record()["attempts"][-1]["data_verified"]


@pytest.mark.usefixtures("large")
def test_a_byte_under_an_unchanged_time_is_found_and_the_date_recorded(
    train: Callable[..., Finished],
    here: Path,
    titan: Titan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(here)
    (here / "held-out.txt").write_text("held out\n" * 300)
    size = (here / "text.txt").stat().st_size
    assert train("tiny.toml", VALIDATION, "training.steps=1", "--run-dir", "r").code == 0
    done = titan("data", "verify", "r")
    assert done.code == 0 and done.out.startswith("good: r (2 files, "), done
    assert "compared with the record of the run and kept checksums of 2 of them" in done.out
    first = verified(here)
    assert (
        first["ok"] and first["files"] == 2 and first["bytes"] == size + 2700 and first["time"].endswith("Z")
    )
    flip(here / "text.txt", 70_001)
    assert titan("train", "r", "--resume", "training.steps=2", "--dry-run").code == 0, "nothing else sees it"
    done = titan("data", "verify", "r", "--json")
    found = json.loads(done.out)
    assert done.code == 5 and not found["ok"] and found["schema"] == "titan.data-verification"
    assert any(
        f"text.txt: from byte {70_001 // 512 * 512:,} on it is not what it was" in f for f in found["faults"]
    )
    assert any("dataset: contents was merkle:" in fault for fault in found["faults"])
    assert verified(here)["faults"] == found["faults"] and verified(here)["time"] > first["time"]
    flip(here / "text.txt", 70_001)
    assert titan("data", "verify", "r").code == 5, "it is not what was read last"
    assert titan("data", "verify", "r").code == 0 and verified(here)["ok"]
    (here / "held-out.txt").unlink()
    done = titan("data", "verify", "r")
    assert done.code == 5 and "validation.datasets.held_out: " in done.out and "held-out.txt" in done.out


@pytest.mark.usefixtures("large")
def test_a_recipe_is_checked_against_what_was_read_last(here: Path, titan: Titan, monkeypatch: Any) -> None:
    monkeypatch.chdir(here)
    done = titan("data", "verify", "tiny.toml")
    assert done.code == 0 and "compared with nothing but" in done.out
    flip(here / "text.txt", 3)
    done = titan("data", "verify", "tiny.toml")
    assert done.code == 5 and "text.txt: from byte 0 on it is not what it was" in done.out
    assert titan("data", "verify", "nowhere.toml").code == 3


def test_shards_of_a_run_are_held_against_their_index(
    train: Callable[..., Finished],
    here: Path,
    titan: Titan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(here)
    assert titan("data", "tokenize", "text.txt", "shards", "--tokenizer", "byte", "--workers", "1").code == 0
    assert train("tiny.toml", *SHARDS, "training.steps=1", "--run-dir", "r").code == 0
    assert titan("data", "verify", "r").code == 0
    flip(here / "shards/00000.bin", 4000)
    done = titan("data", "verify", "r")
    assert done.code == 5 and "00000.bin: the data differ from index.json from byte 0 on" in done.out
    assert not verified(here)["ok"]


def test_a_run_under_way_is_checked_and_left_as_it_is(
    train: Callable[..., Finished],
    here: Path,
    titan: Titan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(here)
    assert train("tiny.toml", "training.steps=1", "--run-dir", "r").code == 0
    before = (here / "r/run.json").read_bytes()
    hold = RunFolder(here / "r").hold()
    done = titan("data", "verify", "r")
    hold.release()
    assert done.code == 0 and "the date is not recorded" in done.err
    assert (here / "r/run.json").read_bytes() == before


def test_shards_in_a_store_are_read_from_there_and_a_stream_is_said_to_be_left_out(
    train: Callable[..., Finished], here: Path, titan: Titan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    monkeypatch.setenv("TITAN_CACHE", str(here / "cache"))
    (here / "rows.jsonl").write_text('{"text": "a row"}\n' * 9)
    assert titan("data", "tokenize", "text.txt", "shards", "--tokenizer", "byte", "--workers", "1").code == 0
    store = f'{{type="token_shards", paths=["file://{here}/shards"]}}'
    stream = '{type="hf", path="./rows.jsonl", streaming=true}'
    data = f'dataset={{type="mix", weights={{a=1, b=1}}, datasets={{a={store}, b={stream}}}}}'
    assert train("tiny.toml", data, "training.steps=1", "--run-dir", "r").code == 0
    done = titan("data", "verify", "r")
    assert done.code == 0 and "rows.jsonl is a stream" in done.out and "(2 files, " in done.out, done
    flip(here / "shards/00000.bin", 4000)
    done = titan("data", "verify", "r")
    assert done.code == 5 and "shards/00000.bin: the data differ from index.json from byte 0 on" in done.out
