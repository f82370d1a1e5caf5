"""A converted config of each tool trains on a small model, unchanged except for its length."""

from __future__ import annotations

import json
import math
from pathlib import Path

import migrate_configs as configs
import pytest

from tests.cli.test_new_finetune import TEMPLATE
from tests.generate.models import make_tokenizer
from titan_testing import run_cli
from titancli.observe.events import read_events

pytestmark = pytest.mark.e2e

TALK = [{"from": "human", "value": "3 + 4?"}, {"from": "gpt", "value": "7"}]
CONFIGS = {
    "axolotl": configs.AXOLOTL.replace("someone/talks", "./talks.jsonl").replace("[:20%]", "")
    + "peft_use_rslora: true\n",
    "llamafactory": configs.LLAMAFACTORY + "use_dora: true\nloraplus_lr_ratio: 16\nquantization_bit: 4\n",
    "torchtune": configs.TORCHTUNE.replace("packed: True", "packed: True\n  source: json\n"
                                           "  data_files: asked.jsonl")
    .replace("  lora_rank", "  apply_lora_to_output: True\n  lora_rank"),
}  # fmt: skip
"""rsLoRA; DoRA with LoRA+ beside a base in 4 bits; an adapted output."""


def base(folder: Path) -> None:
    """Write a small Llama with a tokenizer that has a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer(folder)
    words = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(words | {"chat_template": TEMPLATE}))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)


@pytest.mark.parametrize("tool", sorted(CONFIGS))
def test_a_converted_config_trains(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base(Path("base"))
    Path("talks.jsonl").write_text(f"{json.dumps({'conversations': TALK})}\n" * 40)
    Path("asked.jsonl").write_text('{"instruction": "3 + 4?", "input": "", "output": "7"}\n' * 40)
    info = {"talks": {"file_name": "talks.jsonl", "formatting": "sharegpt"}}
    Path("dataset_info.json").write_text(json.dumps(info))
    text = CONFIGS[tool] + ("dataset_dir: .\n" if tool == "llamafactory" else "")
    Path("config.yaml").write_text(text)
    done = run_cli("recipe", f"from-{tool}", "config.yaml", "mine.toml", "--model", "./base")
    assert done.code == 0, done.stderr
    small = ("training.steps=2", "training.global_batch_size=2", "checkpoint.interval=2")
    done = run_cli("train", "mine.toml", *small, "--run-dir", "run", "--nproc", "1")
    assert done.code == 0, done.stderr
    ended = [event for event in read_events(Path("run/events.jsonl")) if event["event"] == "step"]
    assert [event["step"] for event in ended] == [1, 2]
    assert all(math.isfinite(event["metrics"]["loss"]) for event in ended)
