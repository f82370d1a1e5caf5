"""titan-transformers keeps to the rules of plugins; `recipe new --from-hf` takes it where no family fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.models.hf_configs import LLAMA
from titan_testing import check_plugin, run_cli
from titan_transformers import HFCausalLM
from titancli.checkpoint import read_hf
from titancli.registry.component import build_hf
from titancli.registry.discover import load_plugins


@pytest.mark.slow
def test_the_plugin_is_sound() -> None:
    check_plugin("titan-transformers", configs={"model/hf_causal_lm": {"config": LLAMA}})


def test_its_recipe_is_valid() -> None:
    assert run_cli("validate", "titan-transformers:hf_causal_lm_debug", "hf_causal_lm_debug").code == 0


def test_without_it_a_recipe_and_a_folder_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "phi"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": "phi"}))
    (folder / "tokenizer.json").write_text("{}")
    without = load_plugins()
    without._plugins.pop("titan-transformers")
    monkeypatch.setattr("titancli.registry.discover.load_plugins", lambda **_: without)
    monkeypatch.setattr("titancli.registry._current", None)
    for words in (
        ("recipe", "new", "exp.toml", "--from-hf", folder),
        ("show", "hf_causal_lm"),
        ("show", "model/titan-transformers/hf_causal_lm"),
        ("validate", "llama3_debug", "model=hf_causal_lm"),
    ):
        done = run_cli(*words)
        assert done.code == 4, done.stderr
        assert "comes with titan-transformers, which is not installed" in done.stderr
        assert "titan-transformers" in done.stderr.partition("pip install ")[2]
    assert not Path("exp.toml").exists()


def test_a_folder_of_the_base_model_alone_is_read(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.0)
    theirs = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, **no_dropout)
    )
    theirs.save_pretrained(tmp_path / "whole")
    theirs.transformer.save_pretrained(tmp_path / "base")  # as openai-community/gpt2 has it
    form = build_hf(HFCausalLM(config=tmp_path / "whole"))
    whole, base = (read_hf(tmp_path / name, form) for name in ("whole", "base"))
    assert {name.partition(".")[0] for name in base.names()} == {"transformer"}
    assert whole.names() >= base.names()
    for name in base.names():
        assert torch.equal(base.parameter(name), whole.parameter(name))
