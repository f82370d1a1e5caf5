"""One layer's products: codes and scales are torchao's bit for bit, products within the rounding of a sum.

The order of a sum depends on the CPU's kernels, so no two implementations of a product have the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchao.float8.float8_utils import to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from titan_float8 import blackwell
from titan_float8.formats import E4M3, Padded, blockwise, mxfp8, nvfp4, turned
from titan_float8.products import grouped_product, product
from titan_float8.scheme import Scheme
from titancli.models.blocks.grouped import grouped_linear

COUNTS = {
    "whole blocks": [64, 32, 96, 64],
    "odd": [3, 70, 0, 33],
    "one has all": [0, 0, 40, 0],
    "none": [0, 0, 0, 0],
}
SCHEMES = {
    "rowwise": Scheme("rowwise"),
    "blockwise": Scheme("blockwise"),
    "mxfp8": Scheme("mxfp8"),
    "mxfp8 floor": Scheme("mxfp8", floor=True),
    "mxfp8, plain gradients of weights": Scheme("mxfp8", plain_grad_weight=True),
    "nvfp4": Scheme("nvfp4"),
    "nvfp4 turned": Scheme("nvfp4", hadamard=True),
}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape, generator=made) * torch.exp(torch.randn(*shape, generator=made))
    return wide.to(dtype)


def all_three(function: Any, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of input and weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = function(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def groups(counts: list[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, matrices, the ends of groups, and the gradient of the output."""
    tokens = sum(counts)
    shapes = (tokens, 256), (len(counts), 128, 256), (tokens, 128)
    x, weight, grad = (drawn(*shape, seed=number, dtype=dtype) for number, shape in enumerate(shapes))
    return x, weight, ends_of(counts), grad


def cast(scheme: Scheme, x: Tensor, *, weight: bool = False) -> Tensor:
    """Return what a whole operand [rows, K] becomes in a product that sums over K."""
    if scheme.format == "rowwise":
        scale = (448 / x.abs().amax(-1, keepdim=True).double().clamp(min=1e-12)).float()
        scale = scale.log2().floor().exp2()
        return to_fp8_saturated(x.float() * scale, E4M3).float() / scale
    if scheme.format == "blockwise":
        return blockwise(x, 128 if weight else 1).dequantized(torch.float32)
    if scheme.format == "mxfp8":
        codes = mxfp8(x, floor=scheme.floor)
        mode = ScaleCalculationMode.FLOOR if scheme.floor else ScaleCalculationMode.RCEIL
        scale, data = to_mx(x, E4M3, 32, mode)
        assert torch.equal(codes.data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(codes.scale.view(torch.uint8), scale.view(torch.uint8))
        return codes.dequantized(torch.float32)
    return nvfp4(x, x.abs().amax(), rows=16 if weight else 1).dequantized(torch.float32)


def operands(scheme: Scheme, x: Tensor, weight: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the two operands of each product of one matrix, cast: [M, K] and [N, K]."""
    over = lambda t: torch.nn.functional.pad(t.t(), (0, -len(t) % scheme.block)).contiguous()  # noqa: E731
    left, right = over(grad), over(x)
    if scheme.hadamard:
        left, right = turned(left), turned(right)
    if not scheme.plain_grad_weight:
        left, right = cast(scheme, left), cast(scheme, right)
    return [
        (cast(scheme, x), cast(scheme, weight, weight=True)),
        (cast(scheme, grad), cast(scheme, weight.t().contiguous(), weight=True)),
        (left, right),
    ]


def by_hand(scheme: Scheme, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the three products of one matrix, in fp64."""
    if not len(x):
        return [x.new_zeros(0, len(weight)), x, torch.zeros_like(weight)]
    pairs = operands(scheme, x, weight, grad)
    return [(left.double() @ right.double().t()).float() for left, right in pairs]


def beyond_rounding(found: Tensor, left: Tensor, right: Tensor) -> bool:
    """Return whether a product differs from that in fp64 by more than fp32 sums in any order, and a result
    rounded to its dtype, can (Higham, Accuracy and Stability of Numerical Algorithms, section 3.5)."""
    left, right = left.double(), right.double().t()
    exact, largest = left @ right, left.abs() @ right.abs()
    unit = torch.finfo(found.dtype).eps / 2
    bound = unit * exact.abs() + (1 + unit) * left.shape[1] * 2**-24 * largest
    return bool(((found.double() - exact).abs() > bound).any())


MXFP8 = [SCHEMES[name] for name in SCHEMES if name.startswith("mxfp8")]


@pytest.mark.parametrize("scheme", MXFP8, ids=str)
@pytest.mark.parametrize("tokens", [64, 41])
def test_mxfp8_linear_equals_torchao(scheme: Scheme, tokens: int) -> None:
    x, weight, grad = drawn(2, tokens, 256, seed=0), drawn(128, 256, seed=1), drawn(2, tokens, 128, seed=2)
    pairs = operands(scheme, x.flatten(0, 1), weight, grad.flatten(0, 1))
    ours = all_three(lambda x, w: product(x, w, scheme), x, weight, grad)
    theirs = all_three(lambda x, w: blackwell.product(x, w, scheme, emulated=True), x, weight, grad)
    for found in (ours, theirs):
        for one, pair in zip(found, pairs, strict=True):
            assert not beyond_rounding(one.reshape(-1, one.shape[-1]), *pair)


@pytest.mark.parametrize("scheme", MXFP8, ids=str)
@pytest.mark.parametrize("counts", [COUNTS["whole blocks"], COUNTS["odd"]], ids=str)
def test_mxfp8_experts_equal_torchao(scheme: Scheme, counts: list[int]) -> None:
    x, weight, ends, grad = groups(counts)
    ours = all_three(lambda x, w: grouped_product(x, w, ends, scheme), x, weight, grad)
    theirs = all_three(
        lambda x, w: blackwell.grouped_product(x, w, ends, scheme, emulated=True), x, weight, grad
    )
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        mine = slice(begin, end)
        pairs = operands(scheme, x[mine], weight[expert], grad[mine]) if end > begin else []
        for out, for_x, for_weight in (ours, theirs):
            for one, pair in zip((out[mine], for_x[mine], for_weight[expert]), pairs, strict=bool(pairs)):
                assert not beyond_rounding(one, *pair)
            assert end > begin or not for_weight[expert].any()
        begin = end


def test_a_wrong_cast_is_beyond_rounding() -> None:
    """The bound tells torchao's two ways to choose a scale apart."""
    x, weight, grad = drawn(41, 256, seed=0), drawn(128, 256, seed=1), drawn(41, 128, seed=2)
    found = all_three(lambda x, w: product(x, w, Scheme("mxfp8")), x, weight, grad)
    for one, pair in zip(found, operands(Scheme("mxfp8", floor=True), x, weight, grad), strict=True):
        assert beyond_rounding(one, *pair)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in ("rowwise", "blockwise")])
def test_each_operand_of_a_linear_layer_is_cast_along_what_is_summed_over(name: str) -> None:
    scheme = SCHEMES[name]
    x, weight, grad = (
        drawn(*shape, seed=number, dtype=torch.float32)
        for number, shape in enumerate([(45, 256), (128, 256), (45, 128)])
    )
    found = all_three(lambda x, w: product(x, w, scheme), x, weight, grad)
    for one, expected in zip(found, by_hand(scheme, x, weight, grad), strict=True):
        assert ((one - expected).norm() / expected.norm()).item() < 1e-6


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_operands_of_an_expert_are_its_own_tokens_alone(name: str, counts: str) -> None:
    """Each expert's products are those of a linear layer with its tokens."""
    scheme = SCHEMES[name]
    x, weight, ends, grad = groups(COUNTS[counts], torch.float32)
    out, for_x, for_weight = all_three(lambda x, w: grouped_product(x, w, ends, scheme), x, weight, grad)
    begin = 0
    for number, end in enumerate(ends.tolist()):
        mine = slice(begin, end)
        expected = by_hand(scheme, x[mine], weight[number], grad[mine])
        for one, other in zip((out[mine], for_x[mine], for_weight[number]), expected, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm()
        begin = end
    assert begin == len(out)


def test_frozen_matrices_have_no_gradient_and_no_work() -> None:
    x, weight, ends, grad = groups(COUNTS["odd"])
    x.requires_grad_()
    for name in SCHEMES:
        out = grouped_product(x, weight, ends, SCHEMES[name])
        (for_x,) = torch.autograd.grad(out, x, grad)
        assert for_x.shape == x.shape and weight.grad is None


def test_places_of_tokens_are_whole_blocks_of_each_group() -> None:
    for counts in COUNTS.values():
        padded = Padded.of(ends_of(counts), sum(counts), 32)
        starts = [0, *padded.ends[:-1].tolist()]
        wanted = [start + at for start, count in zip(starts, counts, strict=True) for at in range(count)]
        assert padded.place.tolist() == wanted
        assert (padded.ends % 32 == 0).all() and padded.rows % 32 == 0
        assert padded.ends[-1] <= padded.rows == len(padded.group)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_rounded_is_close_and_is_rounded(name: str) -> None:
    x, weight, ends, grad = groups(COUNTS["odd"])
    plain = all_three(lambda x, w: grouped_linear(x, w, ends), x, weight, grad)
    found = all_three(lambda x, w: grouped_product(x, w, ends, SCHEMES[name]), x, weight, grad)
    for one, expected in zip(found, plain, strict=True):
        off = ((one - expected).float().norm() / expected.float().norm()).item()
        assert off < (0.3 if "nvfp4" in name else 0.08)
    assert not torch.equal(found[0], plain[0])
