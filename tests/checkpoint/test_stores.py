"""Stores that misbehave (`tests/stores.py`) under all that is done with them: nothing is lost in any cell."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.tensors import RUN, save
from tests.stores import ODD, Odd
from titancli.checkpoint.format.manifest import MANIFEST, faults, read_manifest, steps
from titancli.checkpoint.remote import requests
from titancli.checkpoint.remote.requests import Unreachable
from titancli.checkpoint.remote.store import at
from titancli.checkpoint.remote.transfer import newest_of_both, probe, take
from titancli.checkpoint.remote.uploads import Uploads
from titancli.errors import TitanError
from titancli.recipe.schema import Checkpoint
from titancli.runs import RunFolder
from titancli.worker.remote import take_step

FAULTS = {
    "fails 30 % of all requests": ("*:raise-30%", True),
    "fails twice": ("*:raise-2", True),
    "tells nothing of what there is": ("looks:raise", False),
    "lists, but tells of no object": ("info:raise", False),
    "lists nothing": ("ls:raise", False),
    "takes nothing": ("writes:raise", False),
    "fails": ("*:raise", False),
    "truncates what it is given": ("put_file:truncate-2 pipe_file:truncate-2", True),
    "flips a bit of what it is given": ("put_file:flip-2 pipe_file:flip-2", True),
    "truncates what it gives": ("cat_file:truncate-1 get_file:truncate-1", True),
    "flips a bit of what it gives": ("cat_file:flip-1 get_file:flip-1", True),
    "truncates all that it is given": ("put_file:truncate-999", False),
    "lists what was": ("ls:stale", True),
    "hangs when it is asked what there is": ("looks:hang", False),
    "hangs when it is given something": ("writes:hang", False),
    "hangs": ("*:hang", False),
}
"""What is wrong, in words and for `ODD`; and whether what was asked for is done all the same."""


@dataclass
class Place:
    """A run folder with steps 4 and 6 and a store with 2 and 4, both good; `keep` is 2."""

    folder: Path
    store: Path

    @property
    def url(self) -> str:
        return f"odd://{self.store}"

    def uploads(self, **more: Any) -> Uploads:
        place = at(self.url, timeout_seconds=0.15 if _hangs() else 60)
        return Uploads(self.folder, place, RUN, 2, read_back=True, **more)

    def good(self) -> set[str]:
        """The steps that are whole somewhere; what has a manifest in the store is what it says, bit for
        bit."""
        there = steps(self.store)
        for path, manifest in there.items():
            assert not faults(path, manifest), path
        return {path.name for path in (*there, *steps(self.folder))}


def _hangs() -> bool:
    return "hang" in os.environ.get(ODD, "")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(requests, "FIRST_PAUSE", 0.002)
    monkeypatch.setattr(requests, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr("titancli.checkpoint.remote.store.BRIEFLY", 0.2)
    Odd.forget()
    monkeypatch.delenv(ODD, raising=False)
    for step in (2, 4, 6):
        save(tmp_path / f"r/checkpoints/step-{step}", seed=step)
    place = Place(tmp_path / "r/checkpoints", tmp_path / "store/r")
    for step in (2, 4):
        shutil.copytree(place.folder / f"step-{step}", place.store / f"step-{step}")
    shutil.rmtree(place.folder / "step-2")
    list(at(place.url).iterdir())
    for step in (2, 4):
        list((at(place.url) / f"step-{step}").iterdir())  # what a stale listing says later
    yield place
    Odd.forget()


def saved(place: Place) -> bool:
    """A save wakes the upload: 6 goes up, 2 is superseded."""
    uploads = place.uploads()
    uploads.wake()
    uploads.settle()
    assert place.good() >= {"step-4", "step-6"}
    assert (place.store / "step-2" / MANIFEST).exists() or (place.store / "step-6" / MANIFEST).exists()
    return (place.store / "step-6" / MANIFEST).exists()


def swept(place: Place) -> bool:
    """All is there, and something that is not a checkpoint, or that the store does not show as one."""
    shutil.copytree(place.folder / "step-6", place.store / "step-6")
    shutil.rmtree(place.folder / "step-4")
    half = place.store / "step-1/rank-00000.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"half of whose?")
    uploads = place.uploads()
    uploads.wake()
    uploads.settle()
    assert half.exists() and place.good() >= {"step-4", "step-6"}
    for name in ("step-4", "step-6"):  # which only the store has, for one of them
        assert not faults(place.store / name, read_manifest(place.store / name))
    return uploads._error is None


def resumed(place: Place) -> bool:
    """On another machine: the newest of the store, and never an older one, or none."""
    shutil.copytree(place.folder / "step-6", place.store / "step-6")
    shutil.rmtree(place.folder)
    Odd.listings.clear()  # what the other machine sees first
    limit = 0.15 if _hangs() else 60
    try:
        found = newest_of_both(
            at(place.url, limit), place.folder, run_id=RUN, rejected=print, say=lambda line: None
        )
    except Unreachable:
        assert not steps(place.folder)
        return False
    assert found == place.folder / "step-6" and not faults(found, read_manifest(found))
    return True


def fetched(place: Place) -> bool:
    """One step, as with `--step 4`: not there is said only where the store says so."""
    shutil.rmtree(place.folder / "step-4")
    section = Checkpoint(remote=f"odd://{place.store.parent}", remote_timeout_seconds=60)
    object.__setattr__(section, "remote_timeout_seconds", 0.15 if _hangs() else 60)  # whole ones in a recipe
    try:
        assert take_step(RunFolder(place.folder.parent), section, 4, lambda line: None)
    except TitanError:
        assert not (place.folder / "step-4").exists()
        return False
    found = place.folder / "step-4"
    assert not faults(found, read_manifest(found))
    assert take(at(place.url) / "step-4", place.folder, lambda line: None) == found
    return True


PATIENCE = 60.0


def left(place: Place) -> bool:
    """After a signal nobody waits for long, whatever the store does."""
    uploads = place.uploads(leaving=lambda: True, exit_seconds=0.3)
    uploads._place = at(place.url, PATIENCE)
    uploads.wake()
    began = time.monotonic()
    done = uploads.finish()
    assert time.monotonic() - began < PATIENCE
    assert place.good() >= {"step-4", "step-6"}
    assert not done or (place.store / "step-6" / MANIFEST).exists()
    # A process that is gone asks for nothing more, not even what it had just begun to ask for again.
    uploads._place._line.ask = _gone
    Odd.release.set()
    if (thread := uploads._thread) is not None:
        thread.join(30)
        assert not thread.is_alive()
    return done


def _gone(*given: Any, **more: Any) -> None:
    raise Unreachable("the process is gone")


@pytest.mark.parametrize("use", [saved, swept, resumed, fetched, left])
@pytest.mark.parametrize("wrong", FAULTS)
def test_nothing_is_lost(
    place: Place, wrong: str, use: Callable[[Place], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, survives = FAULTS[wrong]
    monkeypatch.setenv(ODD, fault)
    if survives:  # on a busy machine 0.2 seconds may be over before the third attempt
        monkeypatch.setattr("titancli.checkpoint.remote.store.BRIEFLY", 60)
    monkeypatch.setattr("titancli.checkpoint.remote.uploads.leave_threads_behind", lambda: None)
    done = use(place)
    if survives and use is not left:
        assert done
    monkeypatch.delenv(ODD)
    Odd.forget()
    if not (place.folder / "step-6").exists():
        return
    # And when the store has come to itself, the next attempt puts all there.
    place.uploads().finish()
    here = {path.name: manifest for path, manifest in steps(place.folder).items()}
    there = {path.name: manifest for path, manifest in steps(place.store).items()}
    assert there.items() >= here.items() and place.good() >= {"step-6"}
    assert not [path.name for path in place.store.iterdir() if "upload" in path.name]


def test_the_probe_before_a_run_says_what_is_wrong(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in ("writes:raise", "looks:raise", "pipe_file:flip-9", "*:hang"):
        monkeypatch.setenv(ODD, fault)
        if fault == "looks:raise":
            probe(at(place.url))
            continue
        with pytest.raises(TitanError, match="no checkpoint can be uploaded: odd://"):
            probe(at(place.url, 0.3, 0.1))
