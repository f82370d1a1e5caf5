"""What was made before titan's modules were moved still works: a lock file, a checkpoint, a plugin."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.conftest import losses
from titancli import registry
from titancli.checkpoint import CheckpointReader
from titancli.cli import main
from titancli.recipe import load_recipe

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(autouse=True)
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the old run `run` and the old plugin `before.py`, which is loaded."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "before_run", tmp_path / "run")
    shutil.copy(FIXTURES / "before.py", tmp_path)
    registry.configure(files=[tmp_path / "before.py"])
    yield tmp_path
    registry.configure()
    sys.modules.pop("before", None)


def test_a_lock_file_gives_the_same_recipe(old: Path) -> None:
    """Sections and fields that came since have their defaults."""
    lock = old / "run/recipe.lock.toml"
    held, data = tomllib.loads(lock.read_text()), load_recipe(lock).data
    for section, value in held.items():
        now = data[section]
        assert ({key: now[key] for key in value} if isinstance(value, dict) else now) == value, section


def test_a_checkpoint_is_read_tensor_by_tensor(old: Path) -> None:
    reader = CheckpointReader(old / "run/checkpoints/step-2", verify="full", prefix="model.")
    assert reader.shape("tok_embeddings.weight") == (260, 16)
    assert reader.read("layers.0.feed_forward.w1.weight").abs().sum() > 0


def test_a_run_goes_on_with_the_losses_that_it_had(old: Path) -> None:
    sys.modules.pop("before", None)
    assert main(["-p", "./before.py", "train", "run", "--resume"]) == 0
    assert losses(old / "run") == pytest.approx({3: 10.820556, 4: 11.502329}, rel=1e-4)
    written = [line.split() for line in (old / "run/lines.txt").read_text().splitlines()]
    assert [(step, reported) for step, _, reported in written] == [("3", "True"), ("4", "True")]


def test_a_plugin_offers_what_it_did(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offered = [name for name, _ in registry.current().components() if name.startswith("before/")]
    assert offered == ["before/count", "before/twice", "before/inner", "before/lines", "before/length"]
    sys.modules.pop("before", None)
    assert main(["-p", "./before.py", "validate", "run/recipe.lock.toml", "training.seq_len=99"]) == 3
    assert "must be less than 99" in capsys.readouterr().err
