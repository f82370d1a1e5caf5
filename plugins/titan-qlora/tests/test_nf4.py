"""The codes, scales and values of bitsandbytes, bit for bit; and who computes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_qlora import nf4
from titan_qlora.converter import bytes_of, rounded
from titan_qlora.kernels import dequantise, uses_library
from titancli.errors import EnvironmentProblem

SHAPES = [(64, 64), (1, 64), (33, 64), (7, 320), (96, 192), (512, 1024)]
"""With fewer scales than share one, with whole blocks of them, and with a rest."""
KINDS = ("normal", "zeros", "wide", "integers")


def weight(shape: tuple[int, int], kind: str) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02
    if kind == "zeros":
        made[0] = 0
    if kind == "wide":
        made *= torch.logspace(-30, 3, shape[1])
    if kind == "integers":  # halfway between two levels, and equal blocks
        made = (made * 200).round()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_scales_and_values_are_those_of_bitsandbytes(
    shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs the package bitsandbytes")
    given = weight(shape, kind).to(dtype)
    theirs, state = functional.quantize_4bit(given, compress_statistics=True, quant_type="nf4")
    _, single = functional.quantize_4bit(given, quant_type="nf4")
    codes, largest = nf4.quantise(given)
    scales = nf4.quantise_scales(largest)
    assert torch.equal(codes.flatten(), theirs.flatten())
    assert torch.equal(largest.flatten(), single.absmax)
    assert torch.equal(scales.codes.flatten(), state.absmax)
    assert torch.equal(scales.nested, state.state2.absmax)
    assert torch.equal(scales.offset, state.offset)
    values = functional.dequantize_4bit(theirs, state)
    assert values.dtype == dtype
    whole = nf4.dequantise_scales(scales)
    assert torch.equal(nf4.dequantise(codes, whole, dtype), values)
    assert torch.equal(dequantise(codes, whole, dtype, library=False), values)
    assert torch.equal(dequantise(codes, whole, dtype, library=True), values)
    assert bytes_of(shape) == sum(part.nbytes for part in (codes, *scales))


def test_a_part_has_the_scales_of_the_whole() -> None:
    _, largest = nf4.quantise(weight((96, 512), "normal"))
    scales = nf4.quantise_scales(largest)
    whole = nf4.dequantise_scales(scales)
    part = scales._replace(codes=scales.codes[40:80, 3:6])
    assert torch.equal(nf4.dequantise_scales(part, (40, 3), 8), whole[40:80, 3:6])


def test_each_expert_is_quantized_by_itself() -> None:
    stack = torch.stack([weight((96, 192), kind) for kind in KINDS])
    codes, largest = nf4.quantise(stack)
    scales = nf4.quantise_scales(largest)
    values = nf4.dequantise(codes, nf4.dequantise_scales(scales), torch.float32)
    for number, one in enumerate(stack):
        assert torch.equal(values[number], rounded(one))
    some = scales._replace(codes=scales.codes[1:3])
    found = nf4.dequantise(codes[1:3], nf4.dequantise_scales(some, (1, 0, 0), 3), torch.float32)
    assert torch.equal(found, values[1:3])


def test_a_large_weight_is_dequantized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, largest = nf4.quantise(weight((96, 192), "normal"))
    expected = nf4.dequantise(codes, largest, torch.float32)
    monkeypatch.setattr("titan_qlora.kernels.VALUES", 5 * 192)
    assert torch.equal(dequantise(codes, largest, torch.float32, library=False), expected)


def test_bitsandbytes_is_used_where_it_is_asked_for_or_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("titan_qlora.kernels.find_spec", lambda name: object())
    assert [uses_library("auto", cpu), uses_library("auto", gpu)] == [False, True]
    assert [uses_library("torch", gpu), uses_library("bitsandbytes", cpu)] == [False, True]
    monkeypatch.setattr("titan_qlora.kernels.find_spec", lambda name: None)
    assert not uses_library("auto", gpu)
    with pytest.raises(EnvironmentProblem, match="not installed"):
        uses_library("bitsandbytes", gpu)


def test_tables_of_a_dry_run_are_not_kept() -> None:
    """They are fake: every later product of the process would be, too."""
    made = []

    @nf4.kept
    def table(device: torch.device) -> torch.Tensor:
        made.append(device)
        return torch.ones(3, device=device)

    cpu = torch.device("cpu")
    with FakeTensorMode():
        assert type(table(cpu)) is not torch.Tensor
    assert type(table(cpu)) is torch.Tensor and table(cpu) is table(cpu) and made == [cpu, cpu]
