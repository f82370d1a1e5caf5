"""`titan runs list`: what is chosen, in which order, and on how wide a terminal; and notes."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from tests.cli.conftest import Titan
from tests.cli.run_folders import attempt, began, ended, make, step
from tests.cli.test_terminal import on_a_terminal
from titancli.observe import notes
from titancli.runs import RunFolder

LONG = "llama3_8b_float8_with_a_long_name-20260131T120000Z"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five runs; the second newest has the lowest loss, one logged NaN and one nothing."""
    monkeypatch.delenv("TITAN_RUNS", raising=False)
    folder = tmp_path / "runs"
    for number, (name, loss) in enumerate([(LONG, 2.0), ("b", "NaN"), ("c", None), ("d", 1.25), ("e", 10.5)]):
        events = [began(), *([step(30 + number, 4, loss)] if loss is not None else [])]
        why = "failed" if name in "bc" else "finished"
        make(folder / name, events, [attempt(ended(why, 30 + number))], created=60 * number)
    return folder


def names(titan: Titan, *arguments: str) -> list[str]:
    done = titan("runs", "list", *arguments, "--json")
    assert done.code == 0, done.err
    return [Path(run["path"]).name[:5] for run in json.loads(done.out)["runs"]]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ((), "llama b c d e"),
        (("--reverse",), "e d c b llama"),
        (("--limit", "2"), "d e"),
        (("--sort", "loss"), "d llama e b c"),  # NaN and nothing last
        (("--sort", "loss", "--reverse"), "e llama d b c"),
        (("--sort", "loss", "--limit", "1"), "d"),
        (("--sort", "run"), "b c d e llama"),
        (("--sort", "step", "--reverse", "--limit", "2"), "e d"),
        (("--filter", "state=failed"), "b c"),
        (("--filter", "state!=failed", "--filter", "loss<=2"), "llama d"),
        (("--filter", "loss > 2"), "e"),
        (("--filter", "name=llama*"), "llama"),
        (("--filter", "loss=nan"), "b"),
        (("--filter", "step=33"), "d"),
        (("--filter", "note=base*"), "e"),
        (("--filter", "tokens/s>=10", "--limit", "9"), "llama b d e"),
    ],
)
def test_what_is_chosen_and_in_which_order(
    titan: Titan, runs: Path, arguments: tuple[str, ...], shown: str
) -> None:
    assert titan("runs", "note", "runs/e", "baseline of all").code == 0
    assert names(titan, *arguments) == shown.split()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sort", "lss"), "no run has 'lss'\n did you mean 'loss'?"),
        (("--filter", "lss<3"), "no run has 'lss'"),
        (("--filter", "failed"), "it is no condition\n write KEY=PATTERN"),
        (("--filter", "loss<low"), "'low' is no number"),
    ],
)
def test_what_no_run_has_is_refused(titan: Titan, runs: Path, arguments: tuple[str, ...], words: str) -> None:
    done = titan("runs", "list", *arguments)
    assert done.code == 2 and words in done.err and done.out == ""


def test_no_such_runs_and_no_runs_at_all(titan: Titan, runs: Path, tmp_path: Path) -> None:
    assert titan("runs", "list", "--filter", "state=running") == (0, "", "there are no such runs in runs\n")
    (tmp_path / "none").mkdir()
    assert titan("runs", "list", "none", "--sort", "loss").err == "there are no runs in none\n"


def test_a_program_gets_a_header_and_whole_names(titan: Titan, runs: Path) -> None:
    make(runs / "two words", [began()], [attempt(ended("data_ended", 9))])
    lines = [re.split(r"\s{2,}", line) for line in titan("runs", "list").out.splitlines()]
    assert lines[0] == ["run", "state", "step", "loss", "tokens/s", "age", "recipe", "note"]
    assert {len(line) for line in lines} == {8}
    assert {line[0] for line in lines[1:]} >= {f"runs/{LONG}", "runs/two words"}


@pytest.mark.parametrize("columns", [80, 60, 30])
def test_no_number_is_cut_on_a_narrow_terminal(
    titan: Titan, runs: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.chdir(runs.parent)
    notes.write(
        runs / "d", "the best of them, with a lower learning rate and a longer warm-up than the others"
    )
    out, _ = on_a_terminal("runs", "list", COLUMNS=str(columns), NO_COLOR="1")
    lines = out.replace("\r", "").splitlines()
    assert len(lines) == 6  # none is wrapped
    shown = ["30/100 2.0000 10", "31/100 nan 10", "32/100 — —", "33/100 1.2500 10", "34/100 10.5000 10"]
    for line, numbers in zip(lines[1:], shown, strict=True):
        assert set(numbers.split()) <= set(line.split()), line
    if columns == 80:
        assert max(map(len, lines)) <= columns
    first = lines[1].split()[0]
    assert "…" in first and first.startswith("runs") and LONG.endswith(first.partition("…")[2])
    assert "…" in lines[4]  # the note


def test_a_note_is_written_shown_replaced_and_removed(titan: Titan, runs: Path) -> None:
    hold = RunFolder(runs / "d").hold()  # a run that goes on is not disturbed
    try:
        assert titan("runs", "note", "runs/d", "first  try\n") == (0, "", "")
    finally:
        hold.release()
    assert titan("runs", "note", "runs/d").out == "first try\n"
    assert "  note      first try\n" in titan("runs", "show", "runs/d").out
    assert json.loads(titan("runs", "show", "runs/d", "--json").out)["run"]["note"] == "first try"
    assert "runs/d: first try" in titan("runs", "watch", "runs/d").err
    assert titan("runs", "note", "runs/d", "second").code == 0
    assert titan("runs", "note", "runs/d").out == "second\n"
    assert titan("runs", "note", "runs/d", "").code == 0
    assert titan("runs", "note", "runs/d").out == "\n"
    assert not (runs / "d" / notes.FILE).exists()
    assert titan("runs", "note", "runs/nowhere", "x").code == 5
    assert titan("runs", "note", "runs/d", "x" * 5000).code == 2
    assert titan("runs", "note", "runs/d", "\udcff").code == 2


def test_of_notes_that_are_written_at_once_one_is_left_whole(runs: Path) -> None:
    texts = [f"{letter * 3000}" for letter in "abcd"]
    writers = [threading.Thread(target=notes.write, args=(runs / "d", text)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert notes.read(runs / "d") in texts


def test_a_damaged_note_is_named_and_hinders_nothing(titan: Titan, runs: Path) -> None:
    notes.write(runs / "d", "mine")
    file = runs / "d" / notes.FILE
    file.write_text(file.read_text().replace("mine", "thine"))
    assert titan("runs", "list").code == 0
    done = titan("runs", "show", "runs/d")
    assert "note.json is damaged" in done.out and "thine" not in done.out
    done = titan("runs", "note", "runs/d")
    assert done.code == 5 and "titan runs note RUN TEXT" in done.err
    assert titan("runs", "note", "runs/d", "anew").code == 0
    assert titan("runs", "note", "runs/d").out == "anew\n"
