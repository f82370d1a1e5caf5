"""The norm of all gradients, which clipping goes by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titancli.engine.grad_clip import total_norm


@pytest.mark.parametrize("shape", [(4096, 4096), (8, 128, 4096), (1000,), (), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_squares_are_added_up_exactly(shape, dtype):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = gradient
    norm = total_norm([parameter], torch.device("cpu"))
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(gradient.double().pow(2).sum().sqrt()), rel=1e-6)
