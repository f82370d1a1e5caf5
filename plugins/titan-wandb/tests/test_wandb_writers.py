"""titan-wandb: the files of W&B say the same, whatever the texts are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wandb
from test_wandb import rows, start

from tests.security.writers import UTF8, Writer, check_comments, check_rows
from titan_wandb import WandB
from titan_wandb.logger import build
from titancli.recipe import toml_text

WRITERS = [Writer("W&B", "titan_wandb.logger:WandBLogger", "titan_wandb.logger")]


def test_what_writes_has_a_row() -> None:
    check_rows("titan_wandb", WRITERS)
    check_comments("titan_wandb", {})


def test_the_files_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    folders, texts = [], UTF8[:-1]
    for number, text in enumerate(texts):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        (folders[-1] / "recipe.lock.toml").write_bytes(toml_text({"x": text}).encode())
        logger = build(WandB(mode="offline", group=text), run_folder=folders[-1], is_main=True)
        attempt = {"host": text, "argv": [text]}
        logger.run_start({"run_id": "id", "recipe": {"name": "n", "x": text, text: 1}, "attempts": [attempt]})
        logger.step_end(1, {text: 1.5, "loss": 2.0})
        logger.run_end({"why": text})
    wandb.teardown()  # its process has written all when it ends
    for folder, text in zip(folders, texts, strict=True):
        (run,) = folder.glob("wandb/offline-run-*")
        found = {name: value for name, value in rows(run)[1].items() if not name.startswith("_")}
        assert found == {text: 1.5, "loss": 2}
        begun = start(run)
        config = {update.key: json.loads(update.value_json) for update in begun.config.update}
        config.pop("_wandb", None)
        assert config == {"name": "n", "x": text, text: 1, "environment": {"host": text, "argv": [text]}}
        assert begun.run_group == text
        assert (run / "files/recipe.lock.toml").read_bytes().decode() == toml_text({"x": text})
