"""Writing quantized folders: every value the nearest that its block holds, and transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.tensors import RUN, bits
from tests.checkpoint.test_quantized import opened
from titancli.checkpoint import CheckpointReader, save_checkpoint
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.quantise import _misread, to_fp8, to_mxfp4
from titancli.checkpoint.hf.stored import E2M1
from titancli.cli import main
from titancli.errors import TitanError
from titancli.models.blocks.state import named_state
from titancli.recipe import load_recipe, lock_text
from titancli.registry.component import build

COMMON = ["model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.vocab_size=300"]
RECIPES = {
    "llama": ("llama3_debug", [*COMMON, "model.dim=128", "model.hidden_dim=256"]),
    "gpt_oss": (
        "gpt_oss_debug",
        [*COMMON, "model.dim=64", "model.head_dim=16", "model.moe.hidden_dim=32", "model.moe.num_experts=4"],
    ),
    "deepseek": (
        "deepseek_v3_debug",
        [
            *("model.dim=128", "model.n_layers=2", "model.n_heads=2", "model.vocab_size=300"),
            *("model.hidden_dim=128", "model.moe.hidden_dim=128"),
        ],
    ),
}


def checkpoint(folder: Path, recipe: str) -> Path:
    loaded = load_recipe(RECIPES[recipe][0], RECIPES[recipe][1])
    model = build(loaded.recipe.model, seq_len=64)
    model.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
    tensors = {f"model.{name}": parameter.detach() for name, parameter in named_state(model)}
    save_checkpoint(folder, tensors, {}, lock_text=lock_text(loaded), run_id=RUN)
    return folder


def convert(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    return main(["convert-checkpoint", *map(str, args)]), *capsys.readouterr()


def values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers makes of a folder of gpt_oss; a block of values may be held in two ways."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return {
        name.removesuffix("_blocks"): convert_moe_packed_tensors(tensor, tensors[name[:-6] + "scales"])
        if name.endswith("_blocks")
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scales")
    }


def nearest(x: Tensor, values: Tensor, scales: Tensor, found: Tensor) -> None:
    """Of all `values` times an element's scale none is nearer to it than what was found."""
    best = (values[:, None, None] * scales - x).abs().amin(0)
    assert bool(((found - x).abs() <= best * (1 + 1e-6) + 1e-12).all())


def test_fp8_values_are_the_nearest_that_transformers_reads():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * 0.02
    x[:128, :128] = 0
    x[0, 130] = 3.0
    values, scales = to_fp8("x", x)
    assert scales.shape == (2, 3)
    codes = torch.arange(256).byte().view(torch.float8_e4m3fn).float()
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    nearest(x, codes[codes.isfinite()], wide, values.float() * wide)
    back = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    assert bits(back) == bits(values.float() * wide)
    assert values[0, 130].item() == 448  # the whole range is used
    assert not bool(back[:128, :128].any())


def test_smaller_last_blocks_are_read_back_as_they_were_written(tmp_path: Path):
    """576 rows with 5 scales, as DeepSeek-V3's release has them."""
    x = torch.randn(576, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    x[512:] *= 8
    values, scales = to_fp8("x", x)
    assert scales.shape == (5, 2)
    wide = scales.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)
    codes = torch.arange(256).byte().view(torch.float8_e4m3fn).float()
    nearest(x, codes[codes.isfinite()], wide, values.float() * wide)
    assert values[512:].float().abs().max() == 448  # the last block has its own range
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    reader = opened(tmp_path, {"x.weight": values, "x.weight_scale_inv": scales}, how)
    assert bits(reader.parameter("x.weight")) == bits((values.float() * wide).bfloat16())
    assert bits(to_fp8("x", torch.ones(200, 100))[1]) == bits(torch.full((2, 1), 1 / 448))


def test_what_readers_would_misread_is_left_and_the_rest_is_not():
    assert _misread("layers.0.self_attn.kv_a_proj_with_mqa.weight", 576, 128) is False
    assert _misread("layers.0.self_attn.k_proj.weight", 576, 128)  # vLLM joins it with those behind it
    assert _misread("layers.0.self_attn.v_proj.weight", 576, 128) is False
    assert _misread("layers.0.self_attn.o_proj.weight", 192, 128)  # 96 in transformers
    assert _misread("layers.0.self_attn.o_proj.weight", 64, 128) is False
    assert _misread("layers.0.self_attn.o_proj.weight", 128, 192)


def test_a_smaller_last_block_of_deepseek_is_written_and_said_to_be_unread_by_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = checkpoint(tmp_path / "step-1", "deepseek")
    asked = [source, tmp_path / "a", "--to", "hf", "--quantise", "fp8"]
    code, _, err = convert(capsys, *asked, "--verify")
    assert code == 2 and "kv_a_proj_with_mqa.weight, whose last block is smaller" in err
    code, _, err = convert(capsys, *asked)
    assert code == 0, err
    found = load_file(tmp_path / "a" / "model.safetensors")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert found[name].shape == (576, 128) and found[f"{name}_scale_inv"].shape == (5, 1)
    code, out, err = convert(capsys, tmp_path / "a", tmp_path / "back", "--to", "titan")
    assert code == 0, out + err
    back = CheckpointReader(tmp_path / "back", prefix="model.").read("layers.0.attention.wkv_a.weight")
    wide = found[f"{name}_scale_inv"].repeat_interleave(128, 0)[:576]
    form = hf_form(load_recipe(*RECIPES["deepseek"]).recipe.model)
    theirs = dict(form.to_hf("layers.0.attention.wkv_a.weight", back))[name]  # rotated rows in their order
    assert bits(theirs) == bits((found[name].float() * wide).bfloat16())


def test_mxfp4_values_are_the_nearest_that_transformers_reads():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    x = torch.randn(2, 96, 40, generator=torch.Generator().manual_seed(0)) * 0.02
    x[0, :32] = 0
    x[1, :32, 0] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, *([-0.25, -0.75] * 12)]) * 2**-9
    blocks, scales = to_mxfp4("x", x)
    back = convert_moe_packed_tensors(blocks, scales).float()
    wide = (scales.float() - 127).exp2().repeat_interleave(32, -1).transpose(1, 2)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    for expert in range(2):
        nearest(x[expert], values, wide[expert], back[expert])
    # Half-way values go to the even code.
    assert (back[1, :10, 0] * 2**9).tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1]
    assert bool((back.abs() <= 6 * wide).all())
    again = convert_moe_packed_tensors(*to_mxfp4("x", back))
    assert bits(again.float()) == bits(back)


@pytest.mark.parametrize("make", [to_fp8, to_mxfp4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_refused_by_name(make: Any, bad: float):
    x = torch.ones(128, 128) if make is to_fp8 else torch.ones(1, 32, 8)
    x.view(-1)[5] = bad
    with pytest.raises(TitanError, match=r"experts\.down holds a value that is NaN or infinite"):
        make("experts.down", x)


def test_an_mxfp4_folder_comes_back_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Written, read into a checkpoint, and written again: each step compared with transformers."""
    source = checkpoint(tmp_path / "step-1", "gpt_oss")
    code, out, err = convert(capsys, source, tmp_path / "a", "--to", "hf", "--quantise", "mxfp4", "--verify")
    assert code == 0, out + err
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["dtype"] == "bfloat16"
    first = load_file(tmp_path / "a" / "model.safetensors")
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert first[f"{experts}_blocks"].shape == (4, 64, 2, 16)
    assert experts not in first
    code, out, err = convert(capsys, tmp_path / "a", tmp_path / "back", "--to", "titan", "--verify")
    assert code == 0, out + err
    assert (
        CheckpointReader(tmp_path / "back", prefix="model.").dtype("layers.0.moe.experts.w13")
        == torch.bfloat16
    )
    code, out, err = convert(capsys, tmp_path / "back", tmp_path / "b", "--to", "hf", "--quantise", "mxfp4")
    assert code == 0, out + err
    second = load_file(tmp_path / "b" / "model.safetensors")
    assert values(second).keys() == values(first).keys()
    for name, value in values(first).items():
        assert bits(values(second)[name]) == bits(value)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config
    code, out, err = convert(capsys, tmp_path / "back", tmp_path / "c", "--to", "hf")
    assert code == 0, out + err
    assert "quantization_config" not in json.loads((tmp_path / "c" / "config.json").read_text())


def test_an_fp8_folder_has_what_both_readers_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = checkpoint(tmp_path / "step-1", "llama")
    code, out, err = convert(capsys, source, tmp_path / "a", "--to", "hf", "--quantise", "fp8", "--verify")
    assert code == 0, out + err
    assert "not counting the rounding of weights" in out
    written = load_file(tmp_path / "a" / "model.safetensors")
    layer = "model.layers.1"
    assert written[f"{layer}.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert written[f"{layer}.mlp.up_proj.weight_scale_inv"].shape == (2, 1)
    # Keys have 64 rows, and vLLM makes one matrix of them and of queries and values.
    for name in ("q_proj", "k_proj", "v_proj"):
        assert written[f"{layer}.self_attn.{name}.weight"].dtype == torch.bfloat16
    table = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert {"lm_head", f"{layer}.self_attn.q_proj"} <= set(table["modules_to_not_convert"])
    assert f"{layer}.self_attn.o_proj" not in table["modules_to_not_convert"]
    theirs = [tmp_path / "b", "--to", "titan", "--model-component", "hf_causal_lm", "--verify"]
    code, out, err = convert(capsys, tmp_path / "a", *theirs)
    assert code == 0, out + err


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ("llama", ["--to", "hf", "--quantise", "mxfp4"], "only for gpt_oss, and this model is a llama"),
        ("gpt_oss", ["--to", "hf", "--quantise", "fp8"], "has its experts stacked"),
        ("llama", ["--to", "titan", "--quantise", "fp8"], "--quantise cannot be used with --to titan"),
    ],
)  # fmt: skip
def test_what_nobody_would_read_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, options: list[str], words: str
):
    code, _, err = convert(capsys, checkpoint(tmp_path / "step-1", recipe), tmp_path / "a", *options)
    assert code == 2
    assert words in err
    assert not (tmp_path / "a").exists()
