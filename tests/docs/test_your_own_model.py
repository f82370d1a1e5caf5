"""docs/your-own-model.md: its models train alike beside torch, and on one rank and two."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, Block, blocks
from tests.ranks import Ranks
from tests.run.conftest import Finished, here, losses, on_pool, train  # noqa: F401

PAGE = blocks(ROOT / "docs" / "your-own-model.md")
FILES = {block.value: block for block in PAGE if block.mark == "file"}
MODELS = {
    "arcee": ("-p", "./titan_arcee.py", 'model={type="arcee", flavor="tiny"}'),
    "learned": (
        "-p",
        "./titan_learned.py",
        "model={type='learned', dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=288}",
    ),
    "sharp": (
        "-p",
        "./titan_sharp.py",
        "model={type='sharp', dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=288}",
    ),
}


def put(name: str, folder: Path) -> Block:
    """Write a file of the page."""
    (folder / name).write_text(FILES[name].text)
    return FILES[name]


def test_the_loop_in_torch_has_the_losses_of_the_engine(tmp_path: Path) -> None:
    put("titan_arcee.py", tmp_path)
    script = put("beside.py", tmp_path)
    [shown] = [block.text for block in PAGE[PAGE.index(script) + 1 :][:1]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "beside.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == shown, done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_have_the_losses_of_one(
    train: Callable[..., Finished],  # noqa: F811
    ranks: Ranks,
    here: Path,  # noqa: F811
    name: str,
) -> None:
    """FSDP2, and tensor parallelism."""
    put(f"titan_{name}.py", here)
    how = (
        "tiny.toml",
        *MODELS[name],
        "training.steps=3",
        "training.global_batch_size=4",
        "training.mixed_precision_param=float32",
    )
    assert train(*how, "--run-dir", "one").code == 0
    expected = losses(here / "one")
    for degree in ("dp_shard", "tp"):
        done = train(*how, f"mesh.{degree}=2", "--run-dir", degree, *on_pool(ranks, 2))
        assert done.code == 0, done.err
        assert losses(here / degree) == pytest.approx(expected, abs=1e-5)


def test_a_style_that_is_missing_is_refused(train: Callable[..., Finished], here: Path, ranks: Ranks) -> None:  # noqa: F811
    put("titan_sharp.py", here)
    text = (
        (here / "titan_sharp.py")
        .read_text()
        .replace(', "sharpness": "column"', "")
        .replace("titan_sharp", "titan_blunt")
    )
    (here / "titan_blunt.py").write_text(text)
    done = train("tiny.toml", "-p", "./titan_blunt.py", MODELS["sharp"][2], "mesh.tp=2", *on_pool(ranks, 2))
    assert done.code != 0
    assert "sharpness" in done.err
