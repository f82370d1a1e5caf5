"""What is stored in bfloat16 moves as it would in float32, on average, and alike on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.engine.test_library import TINY, batch
from titancli import Engine
from titancli.engine.dry_run import local
from titancli.models import Llama3
from titancli.optimizers import AdamW
from titancli.optimizers.adamw import MixedAdamW, build
from titancli.optimizers.rounding import indices, place_of, random_halves, store
from titancli.recipe.schema import Training

BF16 = torch.bfloat16


def trained(config: AdamW, dtype: torch.dtype, steps: int, grad: float, count: int = 4096) -> Any:
    """A weight of ones after some steps on a constant gradient, and its state."""
    weight = nn.Parameter(torch.ones(count, dtype=dtype))
    optimizer = build(config, named_parameters=[("w", weight)])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.grad.fill_(grad)
    for _ in range(steps):
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def test_bfloat16_moments_decay_as_true_ones_do() -> None:
    config = AdamW(lr=0.0, beta1=0.99, beta2=0.999, state_dtype="bfloat16")
    _, state = trained(config, torch.float32, 400, grad=0.0)
    for name, beta in (("exp_avg", 0.99), ("exp_avg_sq", 0.999)):
        assert state[name].dtype == BF16
        assert state[name].float().mean().item() == pytest.approx((1 - beta) * beta**400, rel=0.01)


@pytest.mark.slow
def test_a_second_moment_under_5000_steps_without_gradient() -> None:
    _, state = trained(AdamW(lr=0.0, beta2=0.999, state_dtype="bfloat16"), torch.float32, 5000, grad=0.0)
    assert state["exp_avg_sq"].float().mean().item() == pytest.approx(0.001 * 0.999**5000, rel=0.02)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_bfloat16_weights_move_under_a_small_rate_as_float32_ones_do(state: Any) -> None:
    config = AdamW(lr=1e-5, weight_decay=0.1, state_dtype=state)
    found, _ = trained(config, BF16, 300, grad=1.0)
    true, _ = trained(AdamW(lr=1e-5, weight_decay=0.1), torch.float32, 300, grad=1.0)
    assert (1 - true).mean().item() == pytest.approx(3.3e-3, rel=0.01)
    assert (1 - found.float()).mean().item() == pytest.approx((1 - true).mean().item(), rel=0.05)


# ------------------------------------------------------------------------------------------ the rounding


def rounded(values: torch.Tensor, name: int = 5, step: int = 7) -> torch.Tensor:
    into = torch.empty(values.shape, dtype=BF16)
    store(into, values, random_halves(torch.arange(len(values), dtype=torch.int32), name, step))
    return into


@pytest.mark.parametrize("value", [1.0 + 2**-9, -(1.0 + 3 * 2**-9), 3.1415927, 1e-30, -2.5e20])
def test_it_is_right_on_average_and_off_by_one_digit_at_most(value: float) -> None:
    true = torch.full((2**18,), value)
    found = rounded(true).double()
    digit = 2.0 ** (torch.frexp(true[0]).exponent.item() - 8)
    assert abs(found.mean().item() - true[0].double().item()) < digit * 0.005
    assert (found - true.double()).abs().max() < digit
    assert len(found.unique()) == 2


def test_what_bfloat16_holds_stays_and_what_is_not_finite_too() -> None:
    exact = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(BF16).float()
    assert torch.equal(rounded(exact).float(), exact)
    special = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(special).isnan().all()  # a GPU's NaN among them, all of whose digits are set
    infinite = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    assert torch.equal(rounded(infinite).view(torch.int16), infinite.to(BF16).view(torch.int16))


def test_the_bits_are_even_and_others_at_every_step_name_and_use() -> None:
    index = torch.arange(2**16, dtype=torch.int32)
    uses = [x for name, step in ((1, 1), (1, 2), (2, 1)) for x in random_halves(index, name, step)]
    for i, one in enumerate(uses):
        assert one.min() >= 0 and one.max() < 2**16
        for bit in range(16):
            assert (one >> bit & 1).float().mean().item() == pytest.approx(0.5, abs=0.01)
        assert torch.corrcoef(torch.stack((one[:-1], one[1:])).double())[0, 1].abs() < 0.02
        for other in uses[:i]:
            assert torch.corrcoef(torch.stack((one, other)).double())[0, 1].abs() < 0.02


# ------------------------------------------------------------------------------------- layouts and resumes

CUTS: dict[str, list[Any]] = {
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "rows of columns": [Shard(0), Shard(1)],
    "rows of rows": [_StridedShard(0, split_factor=2), Shard(0)],
    "experts": [Shard(1), Shard(0)],
    "the last": [Shard(2), Shard(1)],
}
SHAPES = [(7, 5), (1, 3), (5, 3, 4), (6, 4, 5)]


def stepped(cut: str | None) -> list[torch.Tensor]:
    """Weights and moments after three steps, whole."""
    generator = torch.Generator().manual_seed(0)
    mesh = None if cut is None else init_device_mesh("cpu", (2, 2))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        wanted = [] if cut is None else CUTS[cut]
        if any(getattr(p, "dim", 0) >= tensor.ndim for p in wanted):
            wanted = [Shard(0), Replicate()]
        return tensor if mesh is None else distribute_tensor(tensor, mesh, wanted, src_data_rank=None)

    named = [
        (str(shape), nn.Parameter(place(torch.randn(shape, generator=generator).to(BF16))))
        for shape in SHAPES
    ]
    optimizer = build(AdamW(lr=1e-4, state_dtype="bfloat16"), named_parameters=named)
    for _ in range(3):
        for _, parameter in named:
            parameter.grad = place(torch.randn(parameter.shape, generator=generator).to(BF16))
        optimizer.step()
    found = [p.detach() for _, p in named]
    found += [optimizer.state[p][m] for _, p in named for m in ("exp_avg", "exp_avg_sq")]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in found]


def stepped_on_ranks() -> dict[str, list[torch.Tensor]]:
    return {cut: stepped(cut) for cut in CUTS}


@pytest.mark.ranks
def test_every_layout_rounds_alike(ranks: Any) -> None:
    expected = stepped(None)
    for found in ranks(4, stepped_on_ranks):
        for cut, tensors in found.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True)), cut


def test_a_part_of_a_tensor_knows_its_places_however_it_is_laid_out() -> None:
    """In pieces, as a CPU does it; and of strides of its own."""
    whole = indices(0, 12, 5, None, torch.device("cpu"))
    assert torch.equal(torch.cat([indices(i, 4, 5, None, torch.device("cpu")) for i in (0, 4, 8)]), whole)
    assert place_of(torch.ones(3)) == (0, None)
    values, results = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(BF16), []
    for weight in (nn.Parameter(values.clone()), nn.Parameter(values.t().contiguous().t())):
        optimizer = MixedAdamW([weight], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, state_dtype=BF16)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        results.append(weight.detach().clone())
    assert not torch.equal(results[0], values)
    assert torch.equal(*results)


def test_a_resume_is_bitwise_the_run_that_did_not_stop(tmp_path: Path) -> None:
    parts: dict[str, Any] = dict(
        optimizer=AdamW(state_dtype="bfloat16"), training=Training(steps=4, seq_len=16, dtype="bfloat16")
    )

    def steps(engine: Engine, numbers: range) -> list[torch.Tensor]:
        for number in numbers:
            engine.forward_backward(batch(seed=number))
            engine.optim_step()
        return [local(tensor).clone() for tensor in engine.save_state()[0].values() if tensor.ndim]

    with Engine.of(Llama3(**TINY), **parts) as engine:
        steps(engine, range(2))
        engine.save(tmp_path / "step-2")
        whole = steps(engine, range(2, 4))
    with Engine.of(Llama3(**TINY), **parts) as engine:
        engine.load(tmp_path / "step-2")
        assert all(torch.equal(*pair) for pair in zip(steps(engine, range(2, 4)), whole, strict=True))
