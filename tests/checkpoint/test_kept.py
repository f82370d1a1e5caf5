"""What a Hugging Face folder has beside its weights is there again in an export of what was made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_convert import TOKENIZER
from tests.run.conftest import furnish, train_here
from titancli.checkpoint.format.manifest import faults, read_manifest
from titancli.checkpoint.hf.sidecar_files import kept_of, texts
from titancli.errors import EnvironmentProblem

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=500000.0)
MODEL = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48, vocab_size=300)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose model says a token of two that end its texts, third at the latest."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("original")
    torch.manual_seed(0)
    ids = dict(bos_token_id=3, eos_token_id=299, pad_token_id=5)
    rope = {**ROPE, "original_max_position_embeddings": 8192}
    more = dict(vocab_size=300, intermediate_size=48, rms_norm_eps=1e-5, initializer_range=0.3)
    config = LlamaConfig(**more, **SIZES, **ids, rope_parameters=rope, max_position_embeddings=65536)
    model = LlamaForCausalLM(config)
    says = model.generate(torch.tensor([[0]]), max_new_tokens=3, do_sample=False)[0, -1].item()
    model.config.eos_token_id = [299, says]
    model.generation_config.update(eos_token_id=[299, says], do_sample=True, temperature=0.6, top_k=20)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "model_max_length": 64})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "README.md").write_text("read by nobody")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    return folder


def titan(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "titancli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_to_titan_and_back_is_the_same_folder(original: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = titan("convert-checkpoint", original, tmp_path / "step-0", "--to", "titan")
    assert "not copied: modeling_own.py" in done.stderr
    manifest = read_manifest(tmp_path / "step-0")
    assert {"hf-config.json", "hf-generation_config.json", "hf-tokenizer.json"} <= manifest.files.keys()
    assert faults(tmp_path / "step-0", manifest) == []
    titan("convert-checkpoint", tmp_path / "step-0", tmp_path / "out", "--to", "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        before, after = ((folder / name).read_text() for folder in (original, tmp_path / "out"))
        assert json.loads(after) == json.loads(before) if name.endswith("json") else after == before
    before, after = (json.loads((f / "config.json").read_text()) for f in (original, tmp_path / "out"))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "dtype"):
        assert after[key] == before[key], key
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.generation_config.top_k == 20
    prompt = torch.tensor([[0]])
    ends = set(model.generation_config.eos_token_id)
    made = model.generate(prompt, max_new_tokens=40, do_sample=False)[0].tolist()
    assert len(made) <= 4
    assert made[-1] in ends
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
        == "hello<|end|>"
    )


def test_a_run_hands_on_what_its_folder_had(original: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Saved with each checkpoint: an export and a resumed run need the folder no longer."""
    monkeypatch.chdir(furnish(tmp_path))
    base = tmp_path / "base"
    base.mkdir()
    for path in original.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    model = [f"model.{key}={value}" for key, value in MODEL.items()]
    arguments = [*model, f"weights={base}", f"tokenizer.path={base}", "tokenizer.type=hf", "training.steps=2"]
    assert train_here("tiny.toml", "--run-dir", "r", *arguments) == 0
    saved = kept_of(tmp_path / "r/checkpoints/step-2")
    assert saved == kept_of(base)
    titan("convert-checkpoint", tmp_path / "r", tmp_path / "out", "--to", "hf")
    before, after = (json.loads((f / "generation_config.json").read_text()) for f in (base, tmp_path / "out"))
    assert after == before


OWN = {"model_type": "llama"}
KEPT = {
    "config.json": b'{"eos_token_id": [1, 2], "bos_token_id": 3, "pad_token_id": 4, "use_cache": false}',
    "generation_config.json": b'{"eos_token_id": [1, 2], "pad_token_id": 4, "temperature": 0.6}',
}


def test_the_folders_ids_stay_where_the_tokenizer_is_the_folders() -> None:
    made = texts(OWN, KEPT, 2, None)
    assert made["config.json"] == {
        "model_type": "llama",
        "eos_token_id": [1, 2],
        "bos_token_id": 3,
        "pad_token_id": 4,
        "use_cache": False,
    }
    assert made["generation_config.json"] == json.loads(KEPT["generation_config.json"])


def test_another_tokenizers_ids_win() -> None:
    made = texts(OWN, KEPT, 9, None)
    ids = {"eos_token_id": 9, "bos_token_id": None}
    assert made["config.json"] == {"model_type": "llama", "use_cache": False, **ids}
    assert made["generation_config.json"] == {"temperature": 0.6, **ids}


def test_weights_that_no_folder_was_the_source_of_have_the_tokenizers_ids() -> None:
    made = texts(OWN, {}, 9, 8)
    ids = {"eos_token_id": 9, "bos_token_id": 8}
    assert made == {
        "config.json": {**OWN, **ids},
        "generation_config.json": {"_from_model_config": True, **ids},
    }
    assert texts(OWN, {}, None, None) == {"config.json": {**OWN, "eos_token_id": None, "bos_token_id": None}}


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(EnvironmentProblem, match=r"generation_config\.json is damaged"):
        kept_of(tmp_path)
