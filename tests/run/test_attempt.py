"""Which attempt the ranks of several nodes take part in, and where the nodes meet."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.checkpoint.tensors import save
from titancli.errors import EnvironmentProblem
from titancli.launchers import rendezvous
from titancli.launchers.rendezvous import Meeting
from titancli.runs import ATTEMPT, ChangedMeanwhile, Claim, RunFolder, TakenOver
from titancli.worker import attempt
from titancli.worker.attempt import take_part

PLANNED = {"run_id": "r", "name": "n"}


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setenv(ATTEMPT, "")
    with ExitStack() as made:
        yield made


def planned(folder: Path, token: str, *before: dict[str, Any], **values: Any) -> Path:
    """What a node's command has planned, in a folder of its own."""
    entry = {"token": token, "serial": 0, "from_scratch": False, "step": None, **values}
    own = folder / token
    own.mkdir()
    RunFolder(own).write_record({**PLANNED, "attempts": [*before, entry]})
    return own


def take(folder: RunFolder, own: Path, stack: ExitStack) -> tuple[int, bool]:
    return take_part(folder, own, "lock", stack, first_of_node=True)


def test_ranks_begin_an_attempt_and_continue_it_each_time_with_another_token(
    tmp_path: Path, stack: ExitStack
) -> None:
    folder, own = RunFolder(tmp_path / "r"), planned(tmp_path, "a")
    assert take(folder, own, stack) == (0, False)
    first = Claim.of(folder, folder.record())
    assert first.token == "a" == os.environ[ATTEMPT]
    folder.update_attempt(outcome={"why": "failed"})  # another node gave up
    stack.close()
    assert take(folder, own, stack) == (1, False)
    [newest] = folder.record()["attempts"]
    assert newest["outcome"] is None and newest["token"] == os.environ[ATTEMPT] != "a"
    assert RunFolder(own).record() == folder.record()  # what the node's command goes by
    with pytest.raises(TakenOver):
        first.check()  # of a node that was cut off and comes back
    stack.close()
    assert take(folder, own, stack) == (2, False)


def test_the_sources_of_the_node_of_rank_0_are_kept(tmp_path: Path, stack: ExitStack) -> None:
    folder, own = RunFolder(tmp_path / "r"), planned(tmp_path, "a")
    (own / "sources").mkdir()
    (own / "sources/012-uncommitted.patch").write_text("diff")
    take(folder, own, stack)
    assert (folder.path / "sources/012-uncommitted.patch").read_text() == "diff"
    stack.close()
    (own / "sources/012-uncommitted.patch").unlink()
    take(folder, own, stack)
    assert len(list((folder.path / "sources").iterdir())) == 1


def test_sources_that_cannot_be_kept_end_the_start_with_a_reason(tmp_path: Path, stack: ExitStack) -> None:
    folder, own = RunFolder(tmp_path / "r"), planned(tmp_path, "a")
    (own / "sources").mkdir()
    folder.path.mkdir()
    (folder.path / "sources").write_text("a file")
    with pytest.raises(EnvironmentProblem, match=r"cannot write .*sources"):
        take(folder, own, stack)


def test_an_attempt_that_another_one_follows_does_not_continue(tmp_path: Path, stack: ExitStack) -> None:
    folder, own = RunFolder(tmp_path / "r"), planned(tmp_path, "a")
    take(folder, own, stack)
    stack.close()
    take(folder, planned(tmp_path, "b", {"token": "a"}), stack)
    stack.close()
    with pytest.raises(TakenOver, match="this one cannot continue"):
        take(folder, own, stack)
    assert [entry["token"] for entry in folder.record()["attempts"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("values", "refused"), [({}, False), ({"step": 2}, True), ({"from_scratch": True}, True)]
)
def test_a_plan_from_before_another_attempt_is_brought_up_to_date(
    tmp_path: Path, stack: ExitStack, values: dict[str, Any], refused: bool
) -> None:
    """A hot spare was started when the run had no checkpoint, and none of those that trained is left."""
    folder, old = RunFolder(tmp_path / "r"), planned(tmp_path, "c", {"token": "a"}, **values)
    for own in (planned(tmp_path, "a"), planned(tmp_path, "b", {"token": "a"})):
        take(folder, own, stack)
        stack.close()
    save(folder.checkpoints / "step-2")
    if refused:
        with pytest.raises(ChangedMeanwhile):
            take(folder, old, stack)
        return
    assert take(folder, old, stack) == (0, True)
    attempts = folder.record()["attempts"]
    assert [entry["token"] for entry in attempts] == ["a", "b", "c"] and attempts[-1]["serial"] == 1


def test_a_new_run_in_a_folder_that_has_become_one_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    folder = RunFolder(tmp_path / "r")
    take(folder, planned(tmp_path, "a"), stack)
    stack.close()
    with pytest.raises(ChangedMeanwhile):
        take(folder, planned(tmp_path, "b"), stack)


def test_a_lost_node_that_holds_the_folder_is_not_waited_for(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt, "PATIENCE", 0.1)
    folder, own = RunFolder(tmp_path / "r"), planned(tmp_path, "a")
    take(folder, own, stack)  # and the lock is held, as by a node that is frozen
    with ExitStack() as others:
        assert take(folder, own, others) == (1, False)
    assert "continuing without the lock" in caplog.text


# ------------------------------------------------------------------------------------------- where they meet


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "BEAT", 0.05)
    monkeypatch.setattr(rendezvous, "_answers", lambda endpoint: True)


def beats(place: Meeting, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert place.beat()
        time.sleep(0.02)


def test_the_first_node_opens_a_place_and_the_others_find_it(tmp_path: Path, quick: None) -> None:
    first, second = Meeting(tmp_path / "m", 5), Meeting(tmp_path / "m", 5)
    assert first.find(lambda: False) and first.serves
    beating = threading.Thread(target=beats, args=(first, 1.0))
    beating.start()
    assert second.find(lambda: False) and not second.serves
    assert second.endpoint == first.endpoint
    beating.join()
    first.leave()
    assert not list((tmp_path / "m").iterdir())


def test_two_that_begin_at_once_do_not_both_serve(tmp_path: Path, quick: None) -> None:
    places = [Meeting(tmp_path / "m", 60) for _ in range(4)]

    def one(place: Meeting) -> None:
        place.find(lambda: False)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            place.beat()
            time.sleep(0.02)

    threads = [threading.Thread(target=one, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(place.serves for place in places) == 1
    assert len({place.endpoint for place in places}) == 1


def test_a_place_that_falls_silent_is_left_for_another_one(tmp_path: Path, quick: None) -> None:
    first, second, third = (Meeting(tmp_path / "m", 0.3) for _ in range(3))
    assert first.find(lambda: False)
    assert second.find(lambda: False) and second.serves  # the first has given no sign of life
    assert not first.beat()  # and comes back, to find that it is not needed
    found = threading.Event()

    def beat() -> None:
        while not found.wait(0.02):
            second.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    assert third.find(lambda: False) and third.endpoint == second.endpoint
    assert first.find(lambda: False) and first.endpoint == second.endpoint and not first.serves
    found.set()
    beating.join()
    deadline = time.monotonic() + 60
    while third.beat():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def beating(place: Meeting, **options: Any) -> tuple[threading.Event, threading.Thread]:
    """Have a place give signs of life until the event, or until it is lost."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.02) and place.beat(**options):
            pass

    thread = threading.Thread(target=beat)
    thread.start()
    return ended, thread


def test_a_node_that_was_started_with_something_else_does_not_come_in(tmp_path: Path, quick: None) -> None:
    """Before its ranks meet those of the others, which would all be refused with it."""
    first = Meeting(tmp_path / "m", 5, same={"versions": "torch 2.13", "plugin files": "none"})
    assert first.find(lambda: False)
    ended, thread = beating(first)
    try:
        wrong = Meeting(tmp_path / "m", 5, same={"versions": "torch 2.12", "plugin files": "none"})
        with pytest.raises(EnvironmentProblem) as refused:
            wrong.find(lambda: False)
        assert "different versions than" in refused.value.message
        assert ": torch 2.13\n" in refused.value.message and refused.value.message.endswith(": torch 2.12")
        right = Meeting(tmp_path / "m", 5, same={"versions": "torch 2.13", "plugin files": "none"})
        assert right.find(lambda: False)
    finally:
        ended.set()
        thread.join()


def test_recipes_that_differ_are_told_by_the_lines_that_do() -> None:
    recipe = 'name = "tiny"\n\n[optimizer]\nlr = 0.1\n\n[launcher]\njoin_timeout_seconds = 25\n'
    other = recipe.replace("25", "600")
    assert rendezvous._only(recipe, other) == "[launcher] join_timeout_seconds = 25"
    assert rendezvous._only(other, recipe) == "[launcher] join_timeout_seconds = 600"
    longer = recipe + '[[loggers]]\ntype = "csv"\n'
    assert rendezvous._only(recipe, longer) == "nothing of its own"
    assert rendezvous._only(longer, recipe) == '[[loggers]]; [[loggers]] type = "csv"'
    assert rendezvous._only("", "[a]\n" + "".join(f"x{n} = 1\n" for n in range(9))) == "nothing of its own"
    assert rendezvous._only("".join(f"x{n} = 1\n" for n in range(9)), "").endswith("x4 = 1; and 4 more")
    assert rendezvous._only("--nproc 1", "--nproc 2") == "--nproc 1"


def test_a_place_that_others_cannot_connect_to_is_left_to_one_of_them(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk works and its network does not. As long as ranks run there, it stays."""
    said: list[str] = []
    at_work = threading.Event()
    at_work.set()
    first = Meeting(tmp_path / "m", 2, reach=0.1, say=said.append)
    assert first.find(lambda: False)
    cut_off = first.endpoint
    monkeypatch.setattr(rendezvous, "_answers", lambda endpoint: endpoint != cut_off)
    ended, thread = beating(first, waiting=lambda: not at_work.is_set())
    second = Meeting(tmp_path / "m", 2, reach=0.1, say=said.append)
    assert not second.find((tmp_path / "m/1.unreachable").exists) and first.serves
    assert len(said) == 1 and f"cannot connect to {cut_off}" in said[0]
    at_work.clear()
    assert second.find(lambda: False) and second.serves
    thread.join()
    assert "one of them serves instead" in said[1]
    ended, thread = beating(second)
    assert first.find(lambda: False) and first.endpoint == second.endpoint != cut_off
    ended.set()
    thread.join()
    second.leave()
    assert not list((tmp_path / "m").iterdir())


def test_who_can_connect_after_all_takes_back_that_it_could_not(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the place would be left as soon as no ranks run there, and they are just starting again."""
    first, second = Meeting(tmp_path / "m", 5), Meeting(tmp_path / "m", 5, reach=0.1)
    assert first.find(lambda: False)
    ended, thread = beating(first)
    monkeypatch.setattr(rendezvous, "_answers", lambda endpoint: (tmp_path / "m/1.unreachable").exists())
    assert second.find(lambda: False) and second.endpoint == first.endpoint
    ended.set()
    thread.join()
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["1"]


def test_a_place_that_cannot_be_connected_to_any_more_is_lost(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the disk shows that it is alive; torch would wait for its answer for a quarter of an hour."""
    first, second = Meeting(tmp_path / "m", 0.6), Meeting(tmp_path / "m", 0.6)
    assert first.find(lambda: False)
    ended, thread = beating(first)
    assert second.find(lambda: False)
    beats(second, 0.8)
    monkeypatch.setattr(rendezvous, "_answers", lambda endpoint: False)
    deadline = time.monotonic() + 60
    while second.beat():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert first.serves and thread.is_alive()
    ended.set()
    thread.join()


def test_nobody_waits_longer_than_the_command_does(tmp_path: Path, quick: None) -> None:
    alive = Meeting(tmp_path / "m", 60)
    assert alive.find(lambda: False)
    until = time.monotonic() + 0.5
    assert not Meeting(tmp_path / "m", 60).find(lambda: time.monotonic() > until)


def test_a_disk_that_fails_for_a_moment_does_not_end_the_search(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [OSError(errno.ESTALE, "Stale file handle"), None]
    monkeypatch.setattr(Meeting, "_newest", Mock(side_effect=looks))
    assert Meeting(tmp_path / "m", 60).find(lambda: False)
    monkeypatch.setattr(Meeting, "_newest", Mock(side_effect=looks[0]))
    until = time.monotonic() + 0.3
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*/m: Stale file handle"):
        Meeting(tmp_path / "m", 60).find(lambda: time.monotonic() > until)


def test_nor_does_it_end_the_node_that_serves(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    monkeypatch.setattr(rendezvous, "_knocks", lambda place: Mock(exists=stale, unlink=stale))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/1").touch()
    serving = Meeting(tmp_path / "m", 0.1)
    assert serving.find(lambda: False) and serving.serves
    assert serving.beat(lambda: True) and serving.serves and stale.call_count == 2
