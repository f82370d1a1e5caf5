"""What a run starts from: one decision, of which each kind is shown here."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoint.tensors import save
from titancli.checkpoint import read_manifest
from titancli.checkpoint.format.manifest import is_checkpoint
from titancli.checkpoint.start_from import NOTHING, StartFrom, start_from
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.recipe import load_recipe

WHOLE = "checkpoint.initial_load_model_only=false"
EXCLUDE = 'checkpoint.exclude_from_loading=["data", "model.head.*"]'


def decided(*overrides: str, checkpoint: Path | None = None) -> StartFrom:
    return start_from(load_recipe("llama3_debug", overrides).recipe, checkpoint)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint in a store; the cache is below `tmp_path`."""
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    save(tmp_path / "store/step-1")
    return f"file://{tmp_path}/store/step-1"


def test_each_kind(tmp_path: Path) -> None:
    assert decided() == NOTHING == decided(EXCLUDE)
    weights = f"weights={tmp_path}"
    assert decided(weights) == StartFrom("weights", tmp_path)
    assert decided(weights, WHOLE) == StartFrom("state", tmp_path)
    assert decided(weights, EXCLUDE).exclude == ("data", "model.head.*")
    # The run's own checkpoint is gone on from, whatever it once began with.
    own = tmp_path / "step-1"
    for settings in ((), (weights,), (weights, WHOLE)):
        assert decided(*settings, checkpoint=own) == StartFrom("state", own)
    assert decided(EXCLUDE, checkpoint=own).exclude == ("data", "model.head.*")


def test_nothing_has_no_folder() -> None:
    assert not NOTHING.is_remote
    NOTHING.fetch(pytest.fail)
    with pytest.raises(ValueError, match="has no folder"):
        _ = NOTHING.folder


def test_a_folder_is_where_it_is_named_whatever_it_holds(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("text", "missing"):
        start = decided(f"weights={tmp_path / name}", WHOLE)
        assert (start.kind, start.folder, start.is_remote) == ("state", tmp_path / name, False)
        start.fetch(pytest.fail)
        assert not is_checkpoint(start.folder)
        with pytest.raises(EnvironmentProblem, match="not a titan checkpoint"):
            read_manifest(start.folder)


@pytest.mark.parametrize("setting", [WHOLE, "checkpoint.initial_load_model_only=true"])
def test_a_url_is_fetched_once_into_the_cache(tmp_path: Path, url: str, setting: str) -> None:
    start = decided(f"weights={url}", setting)
    assert start.is_remote and start.folder.is_relative_to(tmp_path / "cache/weights")
    assert start.folder.name == "step-1" and not start.folder.exists()
    said: list[str] = []
    with ThreadPoolExecutor(2) as two:
        list(two.map(lambda _: decided(f"weights={url}", setting).fetch(said.append), range(2)))
    assert len(said) == 1 and url in said[0]
    assert read_manifest(start.folder) == read_manifest(tmp_path / "store/step-1")
    save(tmp_path / "store/other/step-1")
    assert decided(f"weights=file://{tmp_path}/store/other/step-1").folder != start.folder


def test_what_cannot_be_fetched_leaves_nothing_in_the_cache(tmp_path: Path, url: str) -> None:
    start = decided(f"weights={url}")
    [data, *_] = (tmp_path / "store/step-1").glob("*.safetensors")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EnvironmentProblem, match="its checksum does not match"):
        start.fetch(lambda line: None)
    (tmp_path / "store/step-1/manifest.json").write_text("{")
    with pytest.raises(EnvironmentProblem, match="is damaged"):
        start.fetch(lambda line: None)
    with pytest.raises(EnvironmentProblem, match="nothing is not a titan checkpoint"):
        decided(f"weights=file://{tmp_path}/nothing").fetch(lambda line: None)
    assert not start.folder.exists()


def test_patterns_are_heeded_once_and_one_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    start = decided(f"weights={tmp_path}", EXCLUDE)
    assert start.exclusion.has("data") and start.exclusion.has("model.head.weight")
    start.exclusion.check(["model.head.weight"])
    with pytest.raises(RecipeError, match=r"'model.head.\*' matches nothing in the checkpoint"):
        start.exclusion.check(["model.norm.weight"])
    lock = tmp_path / "recipe.lock.toml"
    lock.write_text('[checkpoint]\nexclude_from_loading = ["data", "model.head.*"]\n')
    assert not start.exclusion.patterns
    lock.write_text("[checkpoint")  # damaged: nobody knows whether it was left out
    with pytest.raises(EnvironmentProblem, match=r"recipe\.lock\.toml cannot be read"):
        _ = start.exclusion


def test_a_damaged_manifest_changes_no_decision(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    (tmp_path / "step-1/manifest.json").write_bytes(b"\0")
    start = decided(f"weights={tmp_path / 'step-1'}", WHOLE)
    assert start == StartFrom("state", tmp_path / "step-1")
    assert is_checkpoint(start.folder)
    with pytest.raises(EnvironmentProblem, match="is damaged"):
        read_manifest(start.folder)


def test_it_imports_no_torch() -> None:
    code = "import sys, titancli.checkpoint.start_from; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
