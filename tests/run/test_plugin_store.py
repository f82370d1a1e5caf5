"""A checkpoint store of a plugin: uploads, resumes, commands that take a URL, and stores that misbehave."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import shelf
from tests.checkpoint.tensors import RUN, save
from tests.docs.markdown import ROOT, blocks
from tests.run.conftest import Command, Finished, losses
from titancli import registry
from titancli.checkpoint.format.manifest import faults, read_manifest, steps
from titancli.checkpoint.remote import Fsspec, leases
from titancli.checkpoint.remote.requests import Unreachable
from titancli.checkpoint.remote.store import at
from titancli.checkpoint.remote.transfer import probe, upload
from titancli.checkpoint.remote.uploads import Uploads
from titancli.checkpoint.start_from import start_from
from titancli.errors import PluginError, RecipeError, TitanError
from titancli.recipe import load_recipe

Train = Callable[..., Finished]
SHELF = str(Path(shelf.__file__))


@pytest.fixture(autouse=True)
def no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHELF", raising=False)
    monkeypatch.delenv("SHELF_RANKS", raising=False)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A folder of the plugin's store, in this process."""
    registry.configure(files=[Path(SHELF)])
    yield f"shelf://{tmp_path}/store"
    registry.configure()


def good(store: Path) -> list[str]:
    """The checkpoints in a folder of the store, the newest first; each of them is whole."""
    found = steps(store)
    for path, manifest in found.items():
        assert not faults(path, manifest), path
    return [path.name for path in found]


# ------------------------------------------------------------------------------------------ as it should be


def test_the_example_of_the_docs_keeps_a_run(
    train: Train, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (example,) = [one for one in blocks(ROOT / "docs/plugins.md") if one.value == "titan_sqlite.py"]
    assert len(example.text.splitlines()) <= 60
    (here / "titan_sqlite.py").write_text(example.text)
    url, plugin = f"sqlite://{here}/all.db/runs", ["-p", "./titan_sqlite.py"]
    line = ["tiny.toml", *plugin, "--run-dir", "r", "--resume", f"checkpoint.remote={url}"]
    assert train(*line, "checkpoint.keep_latest_k=2").code == 0
    before = losses(here / "r")
    lock = (here / "r/recipe.lock.toml").read_text()
    assert '[checkpoint.store]\ntype = "titan_sqlite/sqlite"\nwait_seconds = 60.0\n' in lock

    def titan(*arguments: str) -> str:
        from titancli.cli import main

        capfd.readouterr()
        code = main([*arguments, *plugin])
        registry.configure()
        said = capfd.readouterr()
        assert code == 0, said.err
        return said.out

    listed = json.loads(titan("checkpoint", "list", f"{url}/r", "--json"))["checkpoints"]
    assert [one["step"] for one in listed] == [4, 6] or [one["step"] for one in listed] == [6, 4]
    assert "good" in titan("checkpoint", "verify", f"{url}/r/step-6")
    titan("checkpoint", "show", f"{url}/r/step-6")
    titan("convert-checkpoint", f"{url}/r", "hf", "--to", "hf")
    assert (here / "hf/model.safetensors").is_file() and not list(here.glob(".titan-*"))

    # On another machine: a dry run takes nothing, a resume the newest, `--step` the one that is named.
    shutil.move(here / "r", here / "old")
    dry = train(*line, "--step", "4", "--dry-run", "--json")
    assert json.loads(dry.out)["plan"]["start_step"] == 4 and not (here / "r").exists()
    again = train(*line, "--step", "4")
    assert again.code == 0, again.err
    assert f"downloading {url}/r/step-4" in again.err
    assert losses(here / "r") == {step: before[step] for step in (5, 6)}
    # The folder is whole again, but has lost one: the lock names the store.
    shutil.rmtree(here / "r/checkpoints/step-4")
    dry = train("r", "--resume", "--step", "4", "--dry-run", *plugin)
    assert dry.code == 0 and "step-4" in dry.err + dry.out

    begun = train("tiny.toml", *plugin, "--run-dir", "x", f"weights={url}/r/step-6", "training.steps=1")
    assert begun.code == 0 and f"downloading {url.replace('///', '//')}/r/step-6" in begun.err, begun.err


def test_the_store_of_a_recipe(here: Path, url: str) -> None:
    def section(*overrides: str) -> Any:
        return load_recipe("tiny.toml", overrides).recipe.checkpoint

    remote = f"checkpoint.remote={url}"
    assert section("checkpoint.remote=s3://bucket/x").store is None
    assert section(remote).store == section(remote, "checkpoint.store=shelf").store
    assert section(remote, "checkpoint.store.label=a").store.label == "a"
    assert section(remote, 'checkpoint.store={type="shelf/shelf", label="a"}').store.label == "a"
    assert isinstance(section(remote, "checkpoint.store=fsspec").store, Fsspec)
    assert section("checkpoint.remote=s3://bucket/x", "checkpoint.store=shelf").store.label == ""
    for wrong, said in {
        "checkpoint.store=shelve": "did you mean 'shelf'",
        "checkpoint.store=3": "must be a table with a type",
    }.items():
        with pytest.raises(RecipeError) as caught:
            section(remote, wrong)
        assert said in str([(problem.message, problem.hint) for problem in caught.value.problems])
    labelled = load_recipe(
        "tiny.toml", [remote, "checkpoint.store.label=a", f"weights={url}/r/step-2"]
    ).recipe
    assert start_from(labelled).store.label == "a"
    other = load_recipe("tiny.toml", [remote, "checkpoint.store.label=a", "weights=s3://b/r/step-2"]).recipe
    assert start_from(other).store is None


def test_fields_of_the_store_reach_it(train: Train, here: Path) -> None:
    line = ["tiny.toml", "-p", SHELF, "--run-dir", "r", "--resume", "training.steps=2"]
    line += [f"checkpoint.remote=shelf://{here}/store", "checkpoint.store.label=a"]
    assert train(*line).code == 0
    assert (here / "store/r/step-2/manifest.json.a").is_file()
    shutil.rmtree(here / "r")
    done = train(*line[:-1], "checkpoint.store.label=a", "training.steps=3")
    assert done.code == 0 and "from step-2" in done.err, done.err
    # The lock names the store: that of another folder with this scheme, too.
    more = ["r", "--resume", "-p", SHELF]
    assert train(*more, "training.steps=4", f"checkpoint.remote=shelf://{here}/other").code == 0
    assert (here / "other/r/step-4/manifest.json.a").is_file()
    assert train(*more, "training.steps=5", f"checkpoint.remote=file://{here}/third").code == 0
    assert (here / "third/r/step-5/manifest.json").is_file()
    assert train(*more, "training.steps=6", "--unset", "checkpoint.remote").code == 0


# -------------------------------------------------------------------------------------- raises, or hangs


def test_a_store_that_raises_in_the_middle_of_an_upload(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titancli.checkpoint.remote.requests.LONG", 0.1)
    monkeypatch.setenv("SHELF", "upload:half-1")
    line = ["tiny.toml", "-p", SHELF, "--run-dir", "r", f"checkpoint.remote=shelf://{here}/store"]
    done = train(*line, "checkpoint.keep_latest_k=0")
    assert done.code == 0, done.err
    assert "a checkpoint was not uploaded" in done.err and "the shelf has fallen down" in done.err
    assert good(here / "store/r") == ["step-6", "step-4", "step-2"]

    monkeypatch.setenv("SHELF", "upload:half")
    lost = train("tiny.toml", "-p", SHELF, "--run-dir", "q", line[-1], "checkpoint.keep_latest_k=0")
    assert lost.code == 1 and "not all of its checkpoints" in lost.err
    assert not steps(here / "store/q")  # parts of a checkpoint are none
    assert [path.name for path in steps(here / "q/checkpoints")] == ["step-6", "step-4", "step-2"]
    monkeypatch.delenv("SHELF")
    again = train("q", "--resume", "-p", SHELF)
    assert again.code == 0 and good(here / "store/q") == ["step-6", "step-4", "step-2"], again.err


@pytest.mark.parametrize(
    ("method", "doing"),
    [("stat", "looking at it"), ("list", "listing it"), ("read", "reading it"), ("write", "writing it")],
)
def test_a_store_that_hangs_is_left_after_the_limit(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, method: str, doing: str
) -> None:
    save(tmp_path / "step-2")
    upload(tmp_path / "step-2", at(url) / "step-2")
    monkeypatch.setenv("SHELF", f"{method}:hang")
    monkeypatch.setattr("titancli.checkpoint.remote.requests.leave_threads_behind", lambda: None)
    place = at(url, 0.2)
    calls: dict[str, Callable[[], object]] = {
        "stat": lambda: (place / "step-2/manifest.json").stat(),
        "list": lambda: list(place.iterdir()),
        "read": lambda: (place / "step-2/manifest.json").read_bytes(),
        "write": lambda: probe(place),
    }
    with pytest.raises(
        TitanError, match=rf"{doing} has made no progress .* checkpoint.remote_timeout_seconds"
    ):
        calls[method]()


@pytest.mark.e2e
def test_a_run_whose_store_hangs_ends(command: Callable[..., Command], here: Path) -> None:
    line = ["tiny.toml", "-p", SHELF, f"checkpoint.remote=shelf://{here}/store", "training.steps=2"]
    line += ["checkpoint.remote_timeout_seconds=1"]
    late = command(*line, "--run-dir", "r", env={**os.environ, "SHELF": "upload:hang"}).wait()
    assert late.code == 1 and "uploading it has made no progress for 1 seconds" in late.err, late.err
    early = command(*line, "--run-dir", "q", env={**os.environ, "SHELF": "*:hang"}).wait()
    assert early.code == 5 and "has made no progress for 1 seconds" in early.err
    assert not (here / "q/checkpoints").exists()


# -------------------------------------------------------------------------------------- two runs at once


def test_two_runs_of_one_name(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEWED", 0.05)
    monkeypatch.setattr(leases, "GONE", 1.0)
    one, two = tmp_path / "one/step-2", tmp_path / "two/step-2"
    save(one, seed=1)
    save(two, seed=2, run_id="2" * 32)
    ready, go = threading.Event(), threading.Event()
    write = shelf.Shelf.write

    def slow(self: Any, key: str, source: Any) -> None:
        if key.endswith("rank-00000.safetensors"):
            ready.set()
            go.wait(30)
        write(self, key, source)

    place = at(url)
    monkeypatch.setattr(type(place._store), "write", slow)
    first = threading.Thread(target=upload, args=(one, place / "step-2"))
    first.start()
    assert ready.wait(30)
    with pytest.raises(TitanError, match="is being uploaded by another run"):
        upload(two, at(url) / "step-2")
    go.set()
    first.join(30)
    with pytest.raises(TitanError, match="was written by another run"):
        upload(two, at(url) / "step-2")
    assert good(tmp_path / "store") == ["step-2"]
    assert read_manifest(at(url) / "step-2").run_id == RUN


def test_a_second_run_does_not_take_the_name_of_the_first(train: Train, here: Path) -> None:
    line = ["tiny.toml", "-p", SHELF, "training.steps=2", f"checkpoint.remote=shelf://{here}/store"]
    assert train(*line, "--run-dir", "a/r").code == 0
    second = train(*line, "--run-dir", "b/r")
    assert second.code == 5 and "already holds the checkpoints of a run (step-2)" in second.err
    assert not (here / "b").exists()


# -------------------------------------------------------------------------------------- nothing, or junk


def test_a_store_that_was_emptied(train: Train, here: Path) -> None:
    line = ["tiny.toml", "-p", SHELF, "--run-dir", "r", f"checkpoint.remote=shelf://{here}/store"]
    assert train(*line, "training.steps=2").code == 0
    shutil.rmtree(here / "store")
    again = train("r", "--resume", "-p", SHELF, "training.steps=4")
    assert again.code == 0, again.err
    assert good(here / "store/r") == ["step-4", "step-2"]
    shutil.rmtree(here / "store")
    shutil.rmtree(here / "r/checkpoints")
    lost = train("r", "--resume", "-p", SHELF)
    assert lost.code == 5 and f"shelf://{here}/store/r holds none either" in lost.err


@pytest.mark.parametrize("method", ["stat", "list", "read"])
def test_what_is_no_answer(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    save(tmp_path / "step-2")
    upload(tmp_path / "step-2", at(url) / "step-2")
    monkeypatch.setenv("SHELF", f"{method}:junk")
    with pytest.raises(PluginError, match=rf"{method} of the store \(Shelf\) returned "):
        steps(at(url))
    uploads = Uploads(tmp_path, at(url), RUN, 1, read_back=True)
    uploads.wake()
    uploads.settle()
    assert isinstance(uploads._error, PluginError)


def test_a_store_that_fails_is_not_taken_for_an_empty_one(
    train: Train, here: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["tiny.toml", "-p", SHELF, "--run-dir", "r", "--resume", f"checkpoint.remote={url}"]
    assert train(*line, "training.steps=2").code == 0
    shutil.rmtree(here / "r")
    monkeypatch.setattr("titancli.checkpoint.remote.store.BRIEFLY", 0.0)
    monkeypatch.setenv("SHELF", "list:raise")
    refused = train(*line)
    assert refused.code == 5 and "cannot be reached: OSError: the shelf is locked" in refused.err
    assert not (here / "r").exists()


def test_a_store_that_cannot_be_built_or_is_unknown(train: Train, here: Path, url: str) -> None:
    line = ["tiny.toml", "-p", SHELF, "--run-dir", "r", f"checkpoint.remote={url}"]
    broken = train(*line, "checkpoint.store.label=broken")
    assert broken.code == 4 and "the store shelf/shelf cannot be built" in broken.err, broken.err
    assert not (here / "r").exists()
    registry.configure()
    with pytest.raises(TitanError, match="is not the URL of a store") as caught:
        at(url)
    assert "titan list-components store" in str(caught.value.hint)
    assert not isinstance(caught.value, Unreachable)


def test_two_plugins_with_a_store_of_this_name_are_refused(here: Path, url: str) -> None:
    (here / "other.py").write_text(Path(SHELF).read_text().replace("shelf:Shelf", "other:Shelf"))
    registry.configure(files=[Path(SHELF), here / "other.py"])
    for refused in (lambda: at(url), lambda: load_recipe("tiny.toml", [f"checkpoint.remote={url}"])):
        with pytest.raises(PluginError, match="store 'shelf' is provided by more than one plugin"):
            refused()
    remote = [f"checkpoint.remote={url}", "checkpoint.store=other/shelf"]
    assert load_recipe("tiny.toml", remote).recipe.checkpoint.store is not None


# ---------------------------------------------------------------------------------------------- ranks


@pytest.mark.e2e
def test_ranks_that_see_other_things_in_the_store(command: Callable[..., Command], here: Path) -> None:
    """Rank 0 alone asks it."""
    line = ["tiny.toml", "-p", SHELF, "--nproc", "2", "--run-dir", "r", "--resume"]
    line += [f"checkpoint.remote=shelf://{here}/store", "lr_scheduler.total_steps=4"]
    assert command(*line, "training.steps=2").wait().code == 0
    shutil.rmtree(here / "r/checkpoints/step-2")
    env = {**os.environ, "SHELF": "*:nothing", "SHELF_RANKS": "1"}
    again = command(*line, "training.steps=4", env=env).wait()
    assert again.code == 0 and "from step-2" in again.err, again.err
    assert good(here / "store/r") == ["step-4", "step-2"]
