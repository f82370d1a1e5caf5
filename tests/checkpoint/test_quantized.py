"""Quantized folders are read as bf16, bit for bit as transformers does; where it does not, as NumPy does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint.tensors import bits
from titancli.checkpoint.hf.folder import HFReader, read_hf
from titancli.checkpoint.hf.lazy_tensor import Virtual
from titancli.errors import EnvironmentProblem
from titancli.models.blocks.hf import DecoderHF
from titancli.models.gpt_oss import GptOss
from titancli.protocols import HFFormDefaults

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
}


class Same(HFFormDefaults):
    """A form of tensors that are the parameters."""

    model_type = "same"

    def sources(self, name: str) -> list[str]:
        return [name]

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        return tensors[0]

    def to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return [(name, tensor)]

    def ignored(self, hf_name: str) -> bool:
        return False

    def config_json(self) -> dict[str, Any]:
        return {}


def folder(path: Path, tensors: dict[str, Tensor], how: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "same", "quantization_config": how}))
    return path


def opened(path: Path, tensors: dict[str, Tensor], how: Any) -> HFReader:
    return read_hf(folder(path, tensors, how), Same())  # type: ignore[arg-type]


def random(*shape: int, dtype: torch.dtype, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def e4m3(*shape: int) -> Tensor:
    """Every value but NaN."""
    codes = random(*shape, dtype=torch.uint8)
    return torch.where(codes % 128 == 127, 5, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def same(reader: HFReader, name: str, wanted: Tensor) -> None:
    """Whole and in parts that no block's edge divides."""
    reader.check({name: tuple(wanted.shape)})
    assert reader.dtype(name) == torch.bfloat16
    assert bits(reader.parameter(name)) == bits(wanted)
    virtual = reader.virtual(name)
    assert isinstance(virtual, Virtual)
    region = tuple(range(size // 3, size - size // 4, 1 + dim % 2) for dim, size in enumerate(wanted.shape))
    part = wanted[tuple(slice(r.start, r.stop, r.step) for r in region)]
    assert bits(virtual.read(tuple(range(r[0], r[-1] + 1, r.step) for r in region))) == bits(part)


# ------------------------------------------------------------------------------------------------- the values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
def test_block_fp8_is_what_transformers_makes_of_it(tmp_path: Path, dtype: torch.dtype):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)).div(100).to(torch.float32)
    if dtype.itemsize == 1:
        scales = random(3, 2, dtype=torch.uint8, low=100, high=130).view(dtype)
    scales, values = scales.to(dtype) if dtype.itemsize > 1 else scales, e4m3(48, 32)
    reader = opened(tmp_path, {"x.weight": values, "x.weight_scale_inv": scales}, FP8)
    same(reader, "x.weight", Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16))


def test_the_scales_of_ragged_blocks_are_those_of_whole_ones(tmp_path: Path):
    """576 rows with 5 scales, as in DeepSeek-V3, which transformers does not dequantize."""
    values, scales = e4m3(576, 200), torch.rand(5, 2, generator=torch.Generator().manual_seed(1))
    how = {**FP8, "weight_block_size": [128, 128]}
    reader = opened(tmp_path, {"x.weight": values, "x.weight_scale_inv": scales}, how)
    codes = values.view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    numbers = np.where(codes > 127, -size, size).astype(np.float32)
    wide = scales.numpy().repeat(128, 0)[:576].repeat(128, 1)[:, :200]
    product = (numbers * wide).view(np.uint32)
    rounded = (product + 0x7FFF + (product >> 16 & 1)) >> 16  # to the nearest, ties to even
    same(reader, "x.weight", torch.from_numpy(rounded.astype(np.uint16)).view(torch.bfloat16))


def test_one_scale_may_be_for_a_whole_tensor(tmp_path: Path):
    values, scale = e4m3(8, 6), torch.tensor(0.37)
    tensors = {"x.weight": values, "x.weight_scale_inv": scale, "x.activation_scale": torch.ones(())}
    reader = opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": None})
    same(reader, "x.weight", (values.float() * 0.37).bfloat16())


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = {
        "x_blocks": random(3, 40, 4, 16, dtype=torch.uint8),
        "x_scales": random(3, 40, 4, dtype=torch.uint8, low=0, high=255),
    }
    reader = opened(tmp_path, tensors, MXFP4)
    wanted = convert_moe_packed_tensors(tensors["x_blocks"], tensors["x_scales"])
    assert wanted.shape == (3, 128, 40)
    same(reader, "x", wanted)


@pytest.mark.parametrize(("dtype", "groups"), [(torch.bfloat16, 4), (torch.float32, 4), (torch.float16, 1)])
def test_packed_int4_is_what_numpy_makes_of_it(tmp_path: Path, dtype: torch.dtype, groups: int):
    """As Kimi K2 Thinking has it: eight values an int32, the first one's bits lowest, 8 the zero."""
    codes = random(6, 128, dtype=torch.int64, high=16)
    packed = sum(codes.numpy()[:, i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    scales = torch.rand(6, groups, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors = {
        "x.weight_packed": torch.from_numpy(packed.view(np.int32)),  # type: ignore[union-attr]
        "x.weight_scale": scales,
        "x.weight_shape": torch.tensor([6, 128]),
    }
    how = INT4 if groups > 1 else _with_weights(strategy="channel", group_size=None)
    reader = opened(tmp_path, tensors, how)
    same(reader, "x.weight", ((codes - 8).to(dtype) * scales.repeat_interleave(128 // groups, 1)).bfloat16())


def test_gpt_oss_reads_its_own_release_through_its_form(tmp_path: Path):
    """A layer's experts, turned and with gate and up in turn, as transformers loads the same folder."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes: dict[str, Any] = dict(vocab_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    values: dict[str, Any] = dict(sizes, hidden_size=64, intermediate_size=32, num_key_value_heads=1)
    config = GptOssConfig(**values, num_local_experts=3, num_experts_per_tok=2, layer_types=None)
    tensors = {k: v.bfloat16() for k, v in GptOssForCausalLM(config).state_dict().items()}
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        many, inner, outer = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = random(many, outer, inner // 32, 16, dtype=torch.uint8)
        tensors[f"{key}_scales"] = random(many, outer, inner // 32, dtype=torch.uint8, low=115, high=125)
    path = folder(tmp_path, tensors, MXFP4)
    keys = {**config.to_dict(), "quantization_config": MXFP4}
    (path / "config.json").write_text(json.dumps(keys))
    theirs = GptOssForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    from titancli.checkpoint.hf.detect_model import model_of, parameter_shapes

    _, _, model = model_of(path, None)
    assert isinstance(model, GptOss)
    form = DecoderHF(model)
    reader = read_hf(path, form)
    reader.check(parameter_shapes(model))
    for name in parameter_shapes(model):
        assert bits(reader.parameter(name)) == bits(
            form.from_hf(name, [theirs[source] for source in form.sources(name)])
        )


# -------------------------------------------------------------------------------------------- what is refused

GOOD: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "fp8": (FP8, {"x.weight": e4m3(20, 16), "x.weight_scale_inv": torch.ones(2, 1)}),
    "mxfp4": (
        MXFP4,
        {
            "x_blocks": random(1, 2, 1, 16, dtype=torch.uint8),
            "x_scales": random(1, 2, 1, dtype=torch.uint8, low=120, high=130),
        },
    ),
    "int4": (
        INT4,
        {
            "x.weight_packed": random(2, 4, dtype=torch.int32),
            "x.weight_scale": torch.ones(2, 1, dtype=torch.bfloat16),
            "x.weight_shape": torch.tensor([2, 32]),
        },
    ),
}


@pytest.mark.parametrize(
    ("way", "change", "words"),
    [
        ("fp8", {"x.weight_scale_inv": None}, r"x.weight \(F8_E4M3\) has no x.weight_scale_inv"),
        ("fp8", {"x.weight": None}, r"x.weight_scale_inv \(F32\) has no x.weight"),
        ("fp8", {"x.weight": torch.ones(20, 16)}, "has no x.weight that is quantized: it is F32"),
        ("fp8", {"x.weight_scale_inv": torch.ones(1, 1)}, r"F32 \[1, 1\], but .* needs .* \[2, 1\]"),
        ("fp8", {"x.weight_scale_inv": torch.ones(2, 1).int()}, r"I32 \[2, 1\], but"),
        ("fp8", {"x.weight": e4m3(20), "x.weight_scale_inv": torch.ones(2)}, "has no blocks"),
        ("mxfp4", {"x_scales": None}, r"x_blocks \(U8\) has no x_scales"),
        ("mxfp4", {"x_blocks": None}, r"x_scales \(U8\) has no x_blocks"),
        ("mxfp4", {"x_scales": random(1, 2, 2, dtype=torch.uint8)}, r"needs U8 scales .* \[1, 2, 1\]"),
        ("mxfp4", {"x_blocks": random(1, 2, 1, 8, dtype=torch.uint8)}, r"not U8 \[..., 16\]"),
        ("int4", {"x.weight_shape": None}, "x.weight_scale .* has no x.weight_shape"),
        ("int4", {"x.weight_scale": torch.ones(2, 3)}, r"needs scales of the shape \[2, groups\]"),
        ("int4", {"x.weight_scale": torch.ones(2, 2)}, r"F32 \[2, 2\], but .* one for each 32 values"),
        ("int4", {"x.weight_packed": random(2, 4, dtype=torch.int64)}, "I64 .* not I32"),
    ],
)  # fmt: skip
def test_malformed_folders_are_refused_with_file_and_tensor(
    tmp_path: Path, way: str, change: dict[str, Tensor | None], words: str
):
    how, good = GOOD[way]
    tensors = {name: tensor for name, tensor in {**good, **change}.items() if tensor is not None}
    with pytest.raises(EnvironmentProblem, match=rf"model.safetensors: .*{words}") as caught:
        opened(tmp_path, tensors, how)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("way", "change", "words"),
    [
        ("fp8", {"x.weight_scale_inv": torch.tensor([[1.0], [torch.nan]])}, "weight_scale_inv holds a scale"),
        ("fp8", {"x.weight_scale_inv": torch.tensor([[1.0], [torch.inf]])}, "weight_scale_inv holds a scale"),
        ("mxfp4", {"x_scales": torch.full((1, 2, 1), 255, dtype=torch.uint8)}, "x_scales holds a scale"),
        ("int4", {"x.weight_scale": torch.full((2, 1), torch.nan)}, "x.weight_scale holds a scale"),
        ("int4", {"x.weight_shape": torch.tensor([2, 31])}, r"says \[2, 31\], but .* holds \[2, 32\]"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_file_and_tensor(
    tmp_path: Path, way: str, change: dict[str, Tensor], words: str
):
    how, good = GOOD[way]
    reader = opened(tmp_path, {**good, **change}, how)
    with pytest.raises(EnvironmentProblem, match=rf"model.safetensors: .*{words}"):
        reader.parameter("x" if way == "mxfp4" else "x.weight")


def _with_weights(**keys: Any) -> dict[str, Any]:
    return {**INT4, "config_groups": {"group_0": {"weights": {**WEIGHTS, **keys}}}}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantized with 'awq'; read are fp8"),
        ({"bits": 4}, "quantized with 'unknown'"),
        ("int8", "quantized with 'unknown'"),
        ({**FP8, "fmt": "e5m2"}, "'fp8', with fmt = 'e5m2'"),
        ({**FP8, "expert_dtype": "fp4"}, "'fp8', with expert_dtype = 'fp4'"),
        ({**FP8, "weight_block_size": [128]}, "'fp8', with a malformed table"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size = \[0, 128\]"),
        ({**INT4, "format": "float-quantized"}, "'compressed-tensors', with format = 'float-quantized'"),
        (_with_weights(num_bits=8), "num_bits = 8 in group_0"),
        (_with_weights(symmetric=False), "symmetric = False in group_0"),
        (_with_weights(actorder="group"), "actorder = 'group' in group_0"),
        (_with_weights(group_size=None), "group_size = None in group_0"),
        ({**INT4, "config_groups": None}, "malformed table"),
        ({**INT4, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "a transform_config"),
    ],
)
def test_other_ways_are_refused_by_name_with_those_that_are_read(tmp_path: Path, how: Any, words: str):
    with pytest.raises(EnvironmentProblem, match=words) as caught:
        opened(tmp_path, GOOD["fp8"][1], how)
    assert "mxfp4" in caught.value.message
    assert caught.value.hint


def test_a_zero_point_is_refused_by_name(tmp_path: Path):
    more = {"x.weight_zero_point": torch.ones(1, dtype=torch.int32)}
    reader = opened(tmp_path, {**GOOD["int4"][1], **more}, INT4)
    with pytest.raises(EnvironmentProblem, match=r"quantized: x\.weight_zero_point is I32"):
        reader.check({"x.weight": (2, 32)})


def test_a_type_of_less_than_a_byte_is_no_damage_and_is_refused_by_name(tmp_path: Path):
    header = {"x": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    reader = read_hf(tmp_path, Same())  # type: ignore[arg-type]
    with pytest.raises(EnvironmentProblem, match="quantized: x is F4"):
        reader.check({"x": (2, 8)})
