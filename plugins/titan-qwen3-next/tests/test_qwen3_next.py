"""What is Qwen3-Next's and Qwen 3.5's own; what holds for every family is in `test_families.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.generate.models import feed
from tests.models.families import QWEN3_NEXT
from tests.models.specs import size_of
from titan_qwen3_next import DeltaNet, Qwen3Next
from titan_qwen3_next.delta import GatedDeltaNet
from titan_testing import check_plugin, run_cli
from titancli.checkpoint import export_hf, read_hf
from titancli.checkpoint.hf.detect_model import hf_form, model_of
from titancli.distributed.collectives import Group
from titancli.distributed.local import RowCut
from titancli.errors import TitanError
from titancli.models.blocks.state import named_state
from titancli.parallel.context import _over_heads
from titancli.registry import current
from titancli.registry.binding import bind
from titancli.registry.discover import load_plugins

RELEASED: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_released_config_is_that_of_the_flavor() -> None:
    assert bind(Qwen3Next, Qwen3Next.from_config_json(RELEASED), current()) == QWEN3_NEXT.flavor("80B-A3B")


QWEN36_27B: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 248320,
}
"""Its text_config; what holds for all of the model stands beside that."""


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_release_that_sees_images_is_read(tied: bool) -> None:
    whole = {"model_type": "qwen3_5", "tie_word_embeddings": tied, "vision_config": {}}
    config = bind(Qwen3Next, Qwen3Next.from_config_json({**whole, "text_config": QWEN36_27B}), current())
    assert (config.tied, config.hidden_dim, config.partial_rotary_factor) == (tied, 17408, 0.25)
    assert size_of(config) == 26_895_998_464 - tied * 248320 * 5120


@pytest.mark.parametrize("change", [{"output_gate_type": "sigmoid"}, {"norm_topk_prob": False}])
def test_a_gate_or_a_routing_that_transformers_does_not_compute_is_refused(change: dict[str, Any]) -> None:
    good = {**hf_form(QWEN3_NEXT.variant("3.5, experts")).config_json()}
    good |= {"output_gate_type": "silu", "norm_topk_prob": True}
    assert Qwen3Next.from_config_json(good)["moe"]["route_norm"]
    with pytest.raises(TitanError, match=f"{next(iter(change))} = "):
        Qwen3Next.from_config_json({**good, **change})


@pytest.mark.parametrize("stacked", [False, True], ids=["experts apart", "experts in one tensor"])
def test_of_a_folder_that_sees_images_the_text_model_is_read(tmp_path: Path, stacked: bool) -> None:
    """With positions of three kinds in its config, and a head for several tokens."""
    ours = QWEN3_NEXT.model("3.5, experts")
    state = {name: tensor.detach() for name, tensor in named_state(ours)}
    folder = tmp_path / "hf"
    export_hf(state, hf_form(ours.config), {}, folder)
    weights = load_file(folder / "model.safetensors")
    if stacked:
        for layer in range(4):
            experts = f"model.layers.{layer}.mlp.experts"
            weights = {name: x for name, x in weights.items() if not name.startswith(experts)}
            weights[f"{experts}.gate_up_proj"] = state[f"layers.{layer}.moe.experts.w13"].clone()
            weights[f"{experts}.down_proj"] = state[f"layers.{layer}.moe.experts.w2"].clone()
    more = {name.replace("model.", "model.language_model.", 1): x for name, x in weights.items()}
    more |= {"model.visual.patch.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(more, folder / "model.safetensors")
    keys = json.loads((folder / "config.json").read_text())
    rope = {
        "rope_type": "default",
        "rope_theta": keys.pop("rope_theta"),
        "partial_rotary_factor": keys.pop("partial_rotary_factor"),
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    text = {**keys, "rope_parameters": rope, "mtp_num_hidden_layers": 1, "attn_output_gate": True}
    whole = {"model_type": "qwen3_5_moe", "vision_config": {}, "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    name, _, config = model_of(folder, None)
    assert name == "titan-qwen3-next/qwen3_next"
    reader = read_hf(folder, hf_form(config))
    reader.check({name: tuple(tensor.shape) for name, tensor in state.items()})
    for name, tensor in state.items():
        assert torch.equal(reader.parameter(name), tensor), name


@pytest.mark.parametrize("first", [1, 4, 6, 8])
def test_a_row_goes_on_from_its_own_state_whatever_comes_in_a_call(first: int) -> None:
    """The convolution looks back over a call's edge: to tokens of the row, not to those of the row before."""
    model = QWEN3_NEXT.model("3.5")
    other, row = torch.randint(0, 128, (2, 14), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = model(row[None])[0, -1]
    cache = model.new_cache()
    rows = [cache.begin(), cache.begin()]
    for start, end in ((0, first), (first, first + 2), (first + 2, 14)):
        logits = feed(model, cache, rows, [other[start:end], row[start:end]])
    torch.testing.assert_close(logits[1], wanted, rtol=1e-4, atol=1e-4)
    cache = model.new_cache()
    begun = cache.begin()
    feed(model, cache, [begun], [row[:13]])
    again = feed(model, cache, [begun, *cache.fork(begun, 1)], [row[13:]] * 2)
    torch.testing.assert_close(again, wanted.expand(2, -1), rtol=1e-4, atol=1e-4)


def test_heads_that_ranks_cannot_share_are_refused_where_degrees_follow_from_the_ranks() -> None:
    """A mesh.tp or mesh.cp of -1 is known only when there are ranks."""
    sizes = dict(dim=8, key_heads=2, heads=4, key_dim=4, value_dim=4)
    layer = GatedDeltaNet(DeltaNet(**sizes, kernel=4, norm_eps=1e-6))
    layer.wqkvz = torch.nn.Linear(8, layer.wqkvz.out_features // 4, bias=False)  # a shard of tp = 4
    with pytest.raises(TitanError, match=r"mesh\.tp does not divide the query heads"):
        layer(torch.zeros(1, 3, 8), None, None, None)
    rows = RowCut(Group("none", 3, 0), head_tail=True)
    with pytest.raises(TitanError, match=r"2 heads .* among the 3 ranks of mesh\.cp"):
        _over_heads(layer.core_recurrence, rows, [torch.zeros(1, 6, 2, 16)], None)


SIZES: dict[str, Any] = {
    **dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, head_dim=8, hidden_dim=48),
    **dict(full_attention_interval=2, linear_num_key_heads=4, linear_num_value_heads=8),
    **dict(linear_key_head_dim=8, linear_value_head_dim=4),
}


@pytest.mark.slow
def test_the_plugin_is_sound() -> None:
    check_plugin("titan-qwen3-next", configs={"model/qwen3_next": SIZES})


@pytest.mark.parametrize("name", ["qwen3_next_debug", "qwen3_next_80b_a3b"])
def test_its_recipes_are_valid(name: str) -> None:
    assert run_cli("validate", name, "--recipe-only").code == 0
    assert run_cli("validate", f"titan-qwen3-next:{name}", "--recipe-only").code == 0


def test_without_it_a_recipe_and_a_folder_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    without = load_plugins()
    without._plugins.pop("titan-qwen3-next")
    monkeypatch.setattr("titancli.registry.discover.load_plugins", lambda **_: without)
    monkeypatch.setattr("titancli.registry._current", None)
    done = run_cli("validate", "llama3_debug", "model=qwen3_next")
    assert done.code == 4 and "comes with titan-qwen3-next, which is not installed" in done.stderr
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RELEASED))
    (folder / "tokenizer.json").write_text("{}")
    for words in (
        ("convert-checkpoint", folder, tmp_path / "out", "--to", "titan"),
        ("recipe", "new", "exp.toml", "--from-hf", folder),
        ("validate", "finetune_qwen3_0.6b", f"weights={folder}", "--unset", "model"),
    ):
        done = run_cli(*words)
        assert done.code in (3, 4), done.stderr
        assert "model_type 'qwen3_next' is read by titan-qwen3-next, which is not installed" in done.stderr
        assert "titan-qwen3-next" in done.stderr.partition("pip install ")[2]
