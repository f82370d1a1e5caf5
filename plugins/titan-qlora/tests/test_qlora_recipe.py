"""`titan recipe new --from-hf FOLDER --qlora DATA`: a recipe that trains as it is, and what it says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.cli.conftest import Titan, titan  # noqa: F401 - a fixture
from tests.cli.test_new_finetune import SMALL, TEMPLATE, rows
from tests.generate.models import make_tokenizer
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import estimate
from titancli.recipe import load_recipe


def test_a_new_recipe_trains_beside_a_quantized_base(
    titan: Titan,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    there = make_tokenizer(tmp_path / "hf")
    config = json.loads((there / "tokenizer_config.json").read_text())
    (there / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(there)
    done = titan("recipe", "new", "a.toml", "--from-hf", "hf", "--qlora", rows("c.jsonl", "sft"))
    assert done.code == 0, done.err
    made = tomllib.loads(Path("a.toml").read_text())
    assert made["converters"] == [{"type": "titan-qlora/qlora", "rank": 16, "alpha": 32.0}]
    more = ("training.global_batch_size=2", "training.seq_len=64", "training.dtype=bfloat16")
    done = titan("train", "a.toml", *SMALL, *more, "--run-dir", "run", "--nproc", "1")
    assert done.code == 0, done.err
    said = (Path("run") / "events.jsonl").read_text() + done.out + done.err
    assert "in NF4" in said and "trained are" in said
    done = titan("recipe", "new", "b.toml", "--from-hf", "hf", "--qlora", "c.jsonl", "--lora")
    assert done.code != 0 and "either --lora or --qlora" in done.err


def test_a_plan_counts_the_activations_that_lora_has() -> None:
    """The base in 4 bits is made anew for each product, so none of its values stay."""
    at_most = {}
    for converter in ("lora", "qlora"):
        recipe = load_recipe("lora_qwen3_8b", [f'converters=[{{type = "{converter}", rank = 16}}]']).recipe
        found = estimate(recipe, recipe.degrees(1), DEVICES["RTX4090"])
        assert found is not None
        at_most[converter] = found.worst.classes
    assert at_most["qlora"]["activations"] == pytest.approx(at_most["lora"]["activations"], rel=0.06)
    assert at_most["qlora"]["parameters"] < 0.4 * at_most["lora"]["parameters"]
