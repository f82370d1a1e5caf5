"""Families of models through `titan train`: the loss falls, a resumed run is the one that went on, and
transformers takes over where it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished, losses
from titancli.cli import main

pytestmark = pytest.mark.e2e

FAMILIES = {
    "deepseek_v3": """\
extends = ["titan:deepseek_v3_debug", "tiny.toml"]
name = "tiny_deepseek"
[model]
type = "deepseek_v3"
flavor = "debugmodel"
dim = 32
n_layers = 2
n_heads = 4
hidden_dim = 48
q_lora_rank = 16
kv_lora_rank = 24
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16
n_mtp_layers = 1
[model.moe]
hidden_dim = 16
score_func = "sigmoid"
route_norm = true
num_expert_groups = 4
num_limited_groups = 2
[optimizer]
type = "adamw"
lr = 5e-3
[lr_scheduler]
total_steps = 8
""",
    "llama4": """\
extends = ["titan:llama4_debug", "tiny.toml"]
name = "tiny_llama4"
[model]
type = "llama4"
flavor = "debugmodel_irope"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
hidden_dim = 48
every_n_layers_nope = 2
fixed_attn_block_size = 10
qk_norm = true
attn_temperature = { floor_scale = 8 }
moe = { num_experts = 4, hidden_dim = 16 }
[optimizer]
type = "adamw"
lr = 1e-2
[lr_scheduler]
total_steps = 8
""",
    "qwen3_next": """\
extends = ["titan-qwen3-next:qwen3_next_debug", "tiny.toml"]
name = "tiny_qwen3_next"
[model]
type = "qwen3_next"
flavor = "debugmodel"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 8
vocab_size = 257
full_attention_interval = 2
linear_num_key_heads = 2
linear_num_value_heads = 4
linear_key_head_dim = 8
linear_value_head_dim = 8
[model.moe]
num_experts = 4
hidden_dim = 16
[optimizer]
type = "adamw"
lr = 1e-2
[lr_scheduler]
total_steps = 8
""",
    "gpt_oss": """\
extends = ["titan:gpt_oss_debug", "tiny.toml"]
name = "tiny_gpt_oss"
[model]
type = "gpt_oss"
flavor = "debugmodel"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 8
sliding_window = 10
moe = { num_experts = 4, top_k = 2, hidden_dim = 16 }
[optimizer]
type = "adamw"
lr = 1e-2
[lr_scheduler]
total_steps = 8
""",
}


QUICK = ("gpt_oss", "qwen3_next")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_it_learns_goes_on_and_is_exported(
    train: Callable[..., Finished],
    here: Path,
    capfd: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
    family: str,
) -> None:
    record_property("family", family)
    (here / "family.toml").write_text(FAMILIES[family])
    done = train("family.toml", "--run-dir", "one", "training.steps=8")
    assert done.code == 0, done.err
    found = losses(here / "one")
    assert found[8] < 0.8 * found[1]
    assert train("family.toml", "--run-dir", "two", "training.steps=4").code == 0
    assert train("two", "--resume", "training.steps=8").code == 0
    assert losses(here / "two") == found
    folders = [here / run / "checkpoints" / "step-8" for run in ("one", "two")]
    one, two = ([file.read_bytes() for file in sorted(folder.glob("*.safetensors"))] for folder in folders)
    assert one and one == two
    assert main(["convert-checkpoint", "one", "hf", "--to", "hf", "--verify"]) == 0
    assert "verified: yes" in "".join(capfd.readouterr())
