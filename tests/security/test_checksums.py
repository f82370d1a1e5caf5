"""One bit of what a run folder says about itself: found, or without meaning."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import run_folders
from tests.observe.test_digests import fill, writer
from tests.run.conftest import Finished, trained
from titan_proof.digests import read_digests
from titancli.checksum import Checksum
from titancli.cli import main
from titancli.errors import TitanError
from titancli.observe import notes
from titancli.observe.digests import path_of
from titancli.observe.summary import summarize
from titancli.recipe import load_recipe
from titancli.recipe.load import lock_text
from titancli.runs import RunFolder, read_lock

Train = Callable[..., Finished]


def flipped(data: bytes) -> Iterator[bytes]:
    """The same bytes with one bit the other way, each in turn."""
    changed = bytearray(data)
    for place in range(len(data)):
        for bit in range(8):
            changed[place] ^= 1 << bit
            yield bytes(changed)
            changed[place] ^= 1 << bit


def meanings(path: Path, read: Callable[[], Any]) -> tuple[int, int]:
    """How many flips were refused and how many change nothing; there is no third kind."""
    data, refused, harmless = path.read_bytes(), 0, 0
    good = read()
    for changed in flipped(data):
        path.write_bytes(changed)
        try:
            assert read() == good, changed
            harmless += 1
        except TitanError:
            refused += 1
    return refused, harmless


def test_each_bit_of_a_lock_file(tmp_path: Path) -> None:
    import tomli

    def read() -> Any:
        try:
            return tomli.loads(read_lock(path))
        except ValueError as error:  # as whoever reads it says
            raise TitanError(str(error)) from error

    path = tmp_path / "recipe.lock.toml"
    loaded = load_recipe("llama3_debug")
    path.write_text(lock_text(loaded)[:600])
    with pytest.raises(TitanError, match="is damaged, or was edited"):
        read()  # a part of it
    small = type(loaded)(loaded.recipe, {"training": loaded.data["optimizer"]}, {}, loaded.path)
    path.write_text(lock_text(small))
    refused, harmless = meanings(path, read)
    assert refused > 8 * len(lock_text(small).partition("\n# xxh3")[2])
    assert harmless < 8 * 130  # the first line, which is a comment


def test_a_lock_file_that_an_editor_or_git_has_converted_is_the_same(tmp_path: Path) -> None:
    text = lock_text(load_recipe("llama3_debug"))
    path = tmp_path / "recipe.lock.toml"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert read_lock(path).replace("\r\n", "\n") == text


def test_each_bit_of_a_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    record = {"format": 1, "name": "tiny", "attempts": [{"token": "a", "outcome": None, "serial": 3}]}
    folder.write_record(record)
    assert folder.record() == record
    refused, harmless = meanings(folder.record_file, lambda: {n: folder.record().get(n) for n in record})
    assert harmless < 8 * 20 < refused


def test_each_bit_of_a_note(tmp_path: Path) -> None:
    notes.write(tmp_path, "the one with dropout")
    refused, harmless = meanings(tmp_path / notes.FILE, lambda: notes.read(tmp_path))
    assert harmless < 8 * 20 < refused


def test_each_bit_of_the_digests(tmp_path: Path) -> None:
    fill(writer(tmp_path), 1, 2, 3)
    path = path_of(tmp_path, 1, 0, 0)
    refused, harmless = meanings(path, lambda: read_digests(tmp_path))
    assert harmless == 0 < refused


def test_a_seal_is_looked_for_at_the_beginning_alone() -> None:
    seal = Checksum("<", ">")
    assert seal.holds(seal.put("text").encode()) is True
    assert seal.holds(b"text") is seal.holds(b"x" * 2000 + seal.put("text").encode()) is None
    assert seal.holds(seal.put("text").encode()[:9]) is False


def edit(lock: Path) -> None:
    text = lock.read_text()
    assert "\nlr = 0.002\n" in text
    lock.write_text(text.replace("\nlr = 0.002\n", "\nlr = 0.003\n"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trained(folder, "--run-dir", "r", "training.steps=2")
    return folder


@pytest.fixture
def run(saved: Path, here: Path) -> Path:
    shutil.copytree(saved / "r", here / "r")
    return here / "r"


def test_a_resume_does_not_go_on_with_another_rate_than_it_had(train: Train, run: Path) -> None:
    lock = run / "recipe.lock.toml"
    good = lock.read_text()
    edit(lock)
    before = sorted(run.rglob("*"))
    for line in (("r", "--resume"), ("tiny.toml", "--run-dir", "r", "--resume"), ("r", "--run-dir", "s")):
        done = train(*line, "training.steps=3")
        assert done.code == 3, done.err
        assert "r/recipe.lock.toml is damaged, or was edited: its checksum does not match" in done.err
        assert "KEY=VALUE on the command line" in done.err
    assert sorted(run.rglob("*")) == before
    (run.parent / "edited.toml").write_text(lock.read_text())  # a recipe like any other
    assert train("edited.toml", "--dry-run").code == 0
    lock.write_text(good.replace("\n", "\r\n"))  # what a version control may do to it is no change
    done = train("r", "--resume", "training.steps=3", "optimizer.lr=0.0007")
    assert done.code == 0, done.err
    assert "changed: optimizer.lr: 0.002 -> 0.0007" in done.err


@pytest.mark.parametrize(
    "line",
    [
        ["validate", "r"],
        ["recipe", "show", "r"],
        ["runs", "compare", "r", "r"],
        ["replay", "r", "--step", "2"],
        ["reproduce", "r", "--export", "e.json"],
    ],
    ids=lambda line: line[0],
)
def test_other_commands_do_not_believe_it_either(
    run: Path, line: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    edit(run / "recipe.lock.toml")
    assert main(line) in (3, 5)
    assert "r/recipe.lock.toml is damaged, or was edited" in capfd.readouterr().err


def test_ranks_that_start_anew_do_not_believe_it_either(run: Path) -> None:
    from titancli.worker import rank

    edit(run / "recipe.lock.toml")
    with pytest.raises(TitanError, match="is damaged, or was edited"):
        rank.main(run, place=rank.Place(restart=1))


def test_a_record_that_was_edited_is_shown_as_unknown_and_not_continued(train: Train, run: Path) -> None:
    record = run / "run.json"
    record.write_text(record.read_text().replace('"serial": 0', '"serial": 1'))
    [problem] = summarize(run).problems
    assert "run.json is damaged, or was edited: its checksum does not match" in problem
    done = train("r", "--resume", "training.steps=3")
    assert done.code == 5, done.err
    assert "delete its line xxh3_64" in done.err
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in lines if "xxh3_64" not in line))
    done = train("r", "--resume", "training.steps=3")
    assert done.code == 0, done.err
    assert "xxh3_64" in record.read_text().splitlines()[1]


def test_a_record_made_by_hand_is_taken_as_it_is(tmp_path: Path) -> None:
    assert summarize(run_folders.make(tmp_path / "r")).state == "finished"
