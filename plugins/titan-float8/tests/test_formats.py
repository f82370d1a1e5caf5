"""Codes, scales and values are torchao's, bit for bit."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.moe_training.nvfp4_grouped_mm import _nvfp4_dequantize
from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix
from torchao.prototype.moe_training.utils import torch_to_float8_per_group_rowwise
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from titan_float8.formats import E4M3, SIGNS, Codes, blockwise, mxfp8, nvfp4, rowwise, turned

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def blockwise_references() -> dict[str, Any]:
    """torchao's references in plain torch, out of a module that imports triton, which CPUs have not."""
    spec = importlib.util.find_spec("torchao")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "prototype" / "blockwise_fp8_training" / "kernels.py"
    tree = ast.parse(path.read_text())
    wanted = [
        one
        for one in tree.body
        if isinstance(one, ast.FunctionDef) and one.name.startswith("torch_blockwise")
    ]
    found: dict[str, Any] = {
        "torch": torch,
        "Tuple": tuple,
        "EPS": 1e-12,
        "e4m3_dtype": E4M3,
        "FP8_E4M3_DTYPES": [E4M3],
    }
    exec(compile(ast.Module(wanted, []), str(path), "exec"), found)
    return found


BLOCKWISE = blockwise_references()


def numbers(kind: str, dtype: torch.dtype, shape: tuple[int, ...] = (256, 256)) -> Tensor:
    """Tensors on which casts may go wrong."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, generator=made)
    if kind == "outliers":
        x *= torch.exp2(torch.randint(-20, 20, shape, generator=made))
    elif kind == "ties":  # halfway between two codes, and on both sides of the largest
        x = torch.randint(-56, 57, shape, generator=made) / 8
    elif kind == "zeros":
        x[: shape[0] // 2] = 0.0
        x[0] = -0.0
    elif kind == "tiny":
        x *= 1e-38
    elif kind == "huge":
        x *= 1e37
    elif kind == "not finite":
        x[3, 5], x[100, 7] = float("nan"), float("inf")
    return x.to(dtype)


KINDS = pytest.mark.parametrize("kind", ["usual", "outliers", "ties", "zeros", "tiny", "huge", "not finite"])


def same(found: Tensor, expected: Tensor) -> None:
    """Check bit for bit, where both are numbers; and that they are not in the same places."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if found.dtype.is_floating_point:
        odd, also = found.float().isnan(), expected.float().isnan()
        assert torch.equal(odd, also)
        found, expected = (one.float().masked_fill(odd, 0.0) for one in (found, expected))
        assert torch.equal(found.signbit(), expected.signbit())
    assert torch.equal(found, expected)


@DTYPES
@KINDS
def test_float8_rowwise(kind: str, dtype: torch.dtype) -> None:
    x = numbers(kind, dtype)
    scale = tensor_to_scale(
        x,
        E4M3,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    data = to_fp8_saturated(x.float() * scale, E4M3)
    found = rowwise(x)
    same(found.data, data)
    same(found.scale, scale.reciprocal())
    same(found.dequantized(torch.float32), data.float() / scale)


@DTYPES
@KINDS
def test_float8_rowwise_of_groups(kind: str, dtype: torch.dtype) -> None:
    x, ends = numbers(kind, dtype), torch.tensor([32, 80, 208, 256], dtype=torch.int32)
    data, scale = torch_to_float8_per_group_rowwise(x, ends, E4M3, round_scales_to_power_of_2=True)
    group = torch.searchsorted(ends, torch.arange(256, dtype=torch.int32), right=True)
    found = rowwise(x, group, 4)
    same(found.data, data)
    same(found.scale.t().contiguous(), scale.view(4, -1).reciprocal())


def test_a_group_without_columns_has_a_finite_scale() -> None:
    found = rowwise(torch.ones(4, 8), torch.tensor([0, 0, 0, 0, 2, 2, 2, 2]), 3)
    assert bool(found.scale.isfinite().all())
    assert torch.equal(found.dequantized(torch.float32), torch.ones(4, 8))


@DTYPES
@KINDS
def test_float8_blockwise(kind: str, dtype: torch.dtype) -> None:
    x = numbers(kind, dtype)
    for found, (data, scale) in (
        (blockwise(x), BLOCKWISE["torch_blockwise_scale_act_quant_lhs"](x)),
        (blockwise(x, 128), BLOCKWISE["torch_blockwise_scale_weight_quant"](x)),
    ):
        same(found.data, data)
        same(found.scale, scale.contiguous())
    data, scale = BLOCKWISE["torch_blockwise_scale_act_quant_rhs"](x[:, :128].contiguous())
    found = blockwise(x[:, :128].t().contiguous())
    same(found.data.t(), data)
    # Of columns it takes the smallest maximum in x's dtype; of rows, as we do, in float64.
    kept = (scale > 1e-14).all(0)
    same(found.scale.t()[:, kept], scale[:, kept])


@DTYPES
@KINDS
@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_mxfp8(kind: str, dtype: torch.dtype, mode: str) -> None:
    x = numbers(kind, dtype)
    scale, data = to_mx(x, E4M3, 32, ScaleCalculationMode[mode.upper()])
    found = mxfp8(x, floor=mode == "floor")
    same(found.data, data)
    same(found.scale.view(torch.uint8), scale.view(torch.uint8))
    same(found.dequantized(dtype), to_dtype(data, scale, E4M3, 32, dtype))


@DTYPES
@KINDS
def test_nvfp4(kind: str, dtype: torch.dtype) -> None:
    x = numbers(kind, dtype)
    whole = per_tensor_amax_to_scale(x.abs().amax())
    scale, data = nvfp4_quantize(x, 16, whole)
    found = nvfp4(x, x.abs().amax())
    if kind == "tiny":  # its factor is infinite, and zeros times that have arbitrary codes
        found, data = found._replace(data=unpacked(found.data)[x != 0]), unpacked(data)[x != 0]
    if kind != "not finite":  # codes of NaN are arbitrary: its scales are NaN
        same(found.data, data)
    same(found.scale, scale.view(256, 16))
    if kind not in ("not finite", "tiny"):
        values = _nvfp4_dequantize(data, scale.view(256, 16), per_tensor_scale=whole, output_dtype=dtype)
        same(found.dequantized(dtype), values)


def unpacked(codes: Tensor) -> Tensor:
    return torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)


def test_nvfp4_of_experts_has_a_factor_of_each() -> None:
    x = torch.stack([numbers("usual", torch.float32), numbers("outliers", torch.float32)])
    found = nvfp4(x, x.abs().amax((1, 2), keepdim=True))
    for number, one in enumerate(x):
        alone = nvfp4(one, one.abs().amax())
        assert torch.equal(found.data[number], alone.data)
        assert torch.equal(found.dequantized(torch.float32)[number], alone.dequantized(torch.float32))


def test_nvfp4_of_weights_has_a_scale_for_16_rows_too() -> None:
    """The same numbers for the product with the weight, and with its transpose."""
    x = numbers("outliers", torch.float32)
    found, across = nvfp4(x, x.abs().amax(), rows=16), nvfp4(x.t().contiguous(), x.abs().amax(), rows=16)
    assert found.scale.shape == (16, 16)
    assert torch.equal(found.dequantized(torch.float32), across.dequantized(torch.float32).t())
    # Where the sixteen rows of a tile are one row's numbers in another order, as of single rows.
    like = numbers("usual", torch.float32)[::16].repeat_interleave(16, 0)
    tiles, rows = nvfp4(like, like.abs().amax(), rows=16), nvfp4(like, like.abs().amax())
    assert torch.equal(tiles.data, rows.data)


@pytest.mark.parametrize("kind", ["usual", "not finite"])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(kind: str) -> None:
    """A step with such gradients must be seen, and skipped."""
    x = torch.zeros(256, 256)
    if kind == "not finite":
        x[3, 5], x[100, 7] = float("nan"), float("inf")
    for found in (rowwise(x), blockwise(x), blockwise(x, 128), mxfp8(x), mxfp8(x, floor=True)):
        values = found.dequantized(torch.float32)
        assert (values == 0).all() if kind == "usual" else not values[3].isfinite().all()
        assert kind == "usual" or not values[100].isfinite().all()
    values = nvfp4(x, x.abs().amax()).dequantized(torch.float32)
    assert (values == 0).all() if kind == "usual" else not values[3].isfinite().all()


def test_stochastic_rounding_goes_to_neighbours_and_is_right_on_average() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-6, 6, 4096).view(16, 256)
    x[:, ::16] = 6.0  # each block's scale is the same
    near = nvfp4(x, x.abs().amax()).dequantized(torch.float32)
    drawn = torch.stack(
        [nvfp4(x, x.abs().amax(), noise=torch.rand_like(x)).dequantized(torch.float32) for _ in range(1000)]
    )
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat((grid, -grid)).unique()
    assert (
        torch.isin((2 * drawn).round() / 2, grid).all()
        and ((2 * drawn).round() - 2 * drawn).abs().max() < 1e-5
    )
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    assert ((drawn - x).abs() < step + 1e-5).all()
    # The mean of 1000 draws with a deviation of at most half a step.
    assert ((drawn.mean(0) - x).abs() <= 5 * step / 2 / 1000**0.5).all()
    assert (drawn.mean(0) - x).abs().mean() < 0.1 * (near - x).abs().mean()


def test_the_transform_is_torchaos_and_orthogonal() -> None:
    x = numbers("usual", torch.bfloat16)
    matrix = get_rht_matrix(SIGNS, torch.device("cpu"), torch.bfloat16, 16)
    assert torch.equal(turned(x), (x.view(-1, 16) @ matrix).view_as(x))
    a, b = torch.randn(8, 64).double(), torch.randn(4, 64).double()
    torch.testing.assert_close(turned(a) @ turned(b).t(), a @ b.t())


@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (3, 5, 128)])
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    x = torch.ones(*shape)
    casts: list[Any] = [rowwise(x), blockwise(x), mxfp8(x), nvfp4(x, torch.ones(()))]
    for one in casts:
        assert isinstance(one, Codes)
        torch.testing.assert_close(one.dequantized(torch.float32), x)
