"""Quantization: errors by type, odd values, and which tensor gets which type."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the gguf package: pip install ./plugins/titan-gguf")
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from titan_gguf.mix import Mix, bytes_of, limit_of, stored, values_of
from titancli.errors import TitanError

KINDS = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q5_0, Type.Q6_K, Type.Q4_K)
RMS = {
    Type.F16: 3e-4,
    Type.BF16: 2.5e-3,
    Type.Q8_0: 0.006,
    Type.Q5_0: 0.045,
    Type.Q6_K: 0.019,
    Type.Q4_K: 0.075,
}
"""Errors of normally distributed weights, relative to them; for llama.cpp's see the README."""


def draw(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def again(x: Tensor, kind: Type) -> Tensor:
    return values_of(stored("x", x, kind), kind, tuple(x.shape))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_errors_are_those_of_the_type(kind: Type) -> None:
    x = draw((96, 512)) * 0.02
    error = again(x, kind) - x
    assert float(error.norm() / x.norm()) <= RMS.get(kind, 0.0)
    assert bool((error.abs() <= limit_of(x, kind)).all())
    assert stored("x", x, kind).nbytes == bytes_of(kind, (96, 512))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 256),
        torch.full((2, 256), 3.0),
        torch.full((2, 256), -3.0),
        -torch.rand(4, 256) - 1,
        torch.eye(256),
        -1000.0 * torch.eye(256) + draw((256, 256)) * 1e-3,
        draw((4, 256)) * 1e-7,
        draw((4, 256)) * 1e4,
        draw((64, 256)) ** 7,
    ],
    ids=[
        "zero",
        "equal",
        "equal, negative",
        "negative",
        "one in a row",
        "outliers",
        "tiny",
        "large",
        "long tails",
    ],
)
def test_odd_values_stay_within_the_limit_of_the_type(x: Tensor, kind: Type) -> None:
    if kind == Type.F16 and float(x.abs().max()) > 65504:
        pytest.skip("float16 has no such values")
    error = (again(x, kind) - x).abs()
    assert bool(error.isfinite().all())
    assert bool((error <= limit_of(x, kind)).all()), float((error / limit_of(x, kind).clamp(min=1e-30)).max())


@pytest.mark.parametrize("kind", (Type.Q4_K, Type.Q6_K), ids=lambda kind: kind.name)
def test_bytes_depend_on_neither_the_split_into_chunks_nor_the_number_of_threads(
    kind: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw((64, 1024))
    expected = stored("x", x, kind)
    monkeypatch.setattr("titan_gguf.mix.CHUNK", 3000)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert np.array_equal(stored("x", x, kind), expected)
    finally:
        torch.set_num_threads(threads)


def test_values_that_a_type_cannot_represent_are_refused_by_name() -> None:
    for value, kind, what in (
        (float("nan"), Type.Q4_K, "blk.0.x has values that are not finite"),
        (float("inf"), Type.F32, "blk.0.x has values that are not finite"),
        (1e5, Type.F16, "blk.0.x has values up to 1e.05, which F16 cannot represent"),
    ):
        x = torch.zeros(2, 256)
        x[1, 3] = value
        with pytest.raises(TitanError, match=what):
            stored("blk.0.x", x, kind)


@pytest.mark.parametrize(
    "layers, meant",
    # The first is what its llama_model_quantize chose; the second follows from its rule.
    [(6, [2, 5]), (16, [0, 1, 4, 7, 10, 13, 14, 15])],
)
def test_the_mix_is_that_of_llama_cpp(layers: int, meant: list[int]) -> None:
    mix = Mix("q4_k_m", layers=layers, experts=0, tied=False)
    for kind in ("attn_v", "ffn_down"):
        types = [mix.type_of(f"blk.{n}.{kind}.weight", (256, 512)) for n in range(layers)]
        assert [n for n in range(layers) if types[n] == Type.Q6_K] == meant
        assert set(types) == {Type.Q4_K, Type.Q6_K}
    for name in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert mix.type_of(f"blk.0.{name}.weight", (256, 256)) == Type.Q4_K
    assert mix.type_of("output.weight", (300, 256)) == Type.Q6_K
    assert mix.type_of("token_embd.weight", (300, 256)) == Type.Q4_K
    assert Mix("q4_k_m", layers, 0, tied=True).type_of("token_embd.weight", (300, 256)) == Type.Q6_K


def test_what_is_small_stays_in_float32_and_odd_rows_get_smaller_blocks() -> None:
    mix = Mix("q4_k_m", layers=4, experts=8, tied=False)
    for name, shape in (
        ("blk.0.attn_norm.weight", (256,)),
        ("blk.0.ffn_gate_inp.weight", (8, 256)),
        ("blk.0.ffn_up_exps.bias", (8, 256)),
        ("rope_freqs.weight", (32,)),
    ):
        assert mix.type_of(name, shape) == Type.F32
    assert mix.type_of("blk.0.ffn_up_exps.weight", (8, 64, 96)) == Type.Q5_0
    assert mix.type_of("blk.0.ffn_down_exps.weight", (8, 64, 256)) == Type.Q4_K
    assert mix.type_of("output.weight", (300, 96)) == Type.Q8_0
    assert mix.type_of("blk.0.ffn_up_exps.weight", (8, 64, 40)) == Type.F16
    assert mix.type_of("blk.0.attn_k.weight", (64, 256)) == Type.Q8_0
    assert mix.type_of("blk.0.attn_output.weight", (64, 256)) == Type.Q6_K
    assert Mix("q8_0", 4, 0, tied=False).type_of("blk.0.attn_k.weight", (64, 96)) == Type.Q8_0
    assert GGML_QUANT_SIZES[Type.Q4_K] == (256, 144)
