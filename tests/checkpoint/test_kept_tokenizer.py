"""All files of a tokenizer are in exports: of a run, and of a folder that was converted and back."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Titan, titan
from tests.cli.test_new_finetune import CHAT, SMALL, TEMPLATE
from tests.cli.test_new_recipe import LLAMA
from tests.generate.models import make_tokenizer
from titancli.checkpoint.hf.sidecar_files import kept_of
from titancli.data import tokenizer_files as files
from titancli.data.hf_tokenizer import HFTokenizer
from titancli.errors import EnvironmentProblem

__all__ = ["titan"]
FILES = {
    "chat_template.jinja": TEMPLATE,
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "additional_chat_templates/rag.v2-x--y.jinja": "{{ documents }}",
    "chat_template.json": json.dumps({"chat_template": TEMPLATE}),
    "added_tokens.json": "{}",
    "merges.txt": "#version: 0.2\n",
    "spiece.model": "pieces",
    "tekken.json": "{}",
    "vocab.txt": "a\nb\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    there = make_tokenizer(tmp_path / "hf")
    keys = {key: value for key, value in LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**{**keys, "vocab_size": 300})).save_pretrained(there)
    for name, text in FILES.items():
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_text(text)
    return there


def held(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in FILES if (folder / name).is_file()}


def test_exports_have_every_tokenizer_file(titan: Titan, folder: Path) -> None:
    from transformers import AutoTokenizer

    Path("chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    assert titan("recipe", "new", "mine.toml", "--from-hf", "hf", "--sft", "chats.jsonl").code == 0
    few = (*SMALL, "training.steps=1", "training.global_batch_size=1", "training.seq_len=64")
    done = titan("train", "mine.toml", "--unset", "training.epochs", *few, "--run-dir", "run")
    assert done.code == 0, done.err
    assert held(Path("run/exports/step-1-hf")) == FILES
    assert titan("convert-checkpoint", "run", "out", "--to", "hf").code == 0
    assert held(Path("out")) == FILES
    done = titan("convert-checkpoint", "hf", "base", "--to", "titan")
    assert done.code == 0
    assert "not copied" not in done.err
    assert titan("checkpoint", "verify", "base").code == 0
    assert titan("convert-checkpoint", "base", "back", "--to", "hf").code == 0
    assert held(Path("back")) == FILES
    theirs = AutoTokenizer.from_pretrained("back").chat_template
    assert {"tool_use", "rag.v2-x--y"} <= theirs.keys()


def test_templates_stay_in_their_folder(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names are the folder's, and links may lead anywhere."""
    there = folder / files.TEMPLATES
    secret = tmp_path / "secret"
    secret.write_text("key")
    (there / "link.jinja").symlink_to(secret)
    (there / "inside.jinja").symlink_to(folder / "merges.txt")
    (there / "odd name.jinja").write_text("")
    (there / "-rf.jinja").write_text("")
    (there / "folder.jinja").mkdir()
    (there / "lost.jinja").symlink_to("nothing")
    os.truncate(os.open(there / "huge.jinja", os.O_CREAT | os.O_WRONLY), 1 << 40)
    with caplog.at_level(logging.WARNING):
        kept = kept_of(folder, tokenizer=True)
        HFTokenizer(folder)
    own = {name for name in FILES if "/" in name} | {f"{files.TEMPLATES}/inside.jinja"}
    assert {name for name in kept if "/" in name} == own
    said = "\n".join(record.getMessage() for record in caplog.records)
    for name in ("link", "odd name", "-rf", "folder", "huge", "lost"):
        assert said.count(f"{name}.jinja is left out") == 1, name


def test_a_linked_folder_is_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / files.TEMPLATES).rename(tmp_path / "far")
    (folder / files.TEMPLATES).symlink_to(tmp_path / "far")
    assert not [name for name in files.tokenizer_files(folder) if "/" in name]


def test_the_hub_cache_is_followed(tmp_path: Path) -> None:
    blobs, there = tmp_path / "blobs", tmp_path / "snapshots/abc" / files.TEMPLATES
    blobs.mkdir()
    there.mkdir(parents=True)
    (blobs / "1234").write_text("{{ tools }}")
    (there / "tool_use.jinja").symlink_to("../../../blobs/1234")
    assert list(files.tokenizer_files(there.parent)) == [f"{files.TEMPLATES}/tool_use.jinja"]


def test_a_checkpoint_names_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    for name in ("hf-additional_chat_templates--ok.jinja", "hf-additional_chat_templates--..jinja"):
        (tmp_path / name).write_text("")
    assert list(kept_of(tmp_path, tokenizer=True)) == [f"{files.TEMPLATES}/ok.jinja"]
    assert not files.is_tokenizer_file(f"../{files.TEMPLATES}/a.jinja")
    assert not files.is_tokenizer_file(f"{files.TEMPLATES}/../a.jinja")


def test_a_huge_vocabulary_is_refused(folder: Path) -> None:
    os.truncate(folder / "vocab.txt", 1 << 40)
    with pytest.raises(EnvironmentProblem, match=r"vocab\.txt cannot be read: .* no more than 268435456"):
        kept_of(folder, tokenizer=True)
