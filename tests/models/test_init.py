"""Initial values: their distributions, and that each rank computes its own shard alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from titancli.models.blocks import init

DRAWS: dict[str, Callable[..., None]] = {
    "normal": init.normal_,
    "truncated": init.trunc_normal_,
    "uniform": init.uniform_,
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(draw: str, *shape: int, size: float = 1.0, seed: int = 0) -> Tensor:
    found = torch.empty(shape)
    DRAWS[draw](found, size, seeded(seed))
    return found


# ------------------------------------------------------------------------------------------- distributions


def test_the_random_words_are_those_of_splitmix64() -> None:
    """Its published first numbers for the seed 1234567 (https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    counters = [1234567 + (place + 1) * init._GAMMA for place in range(4)]
    assert [init._mixed(counter) for counter in counters] == published
    words = init._words(torch.tensor([init._int64(counter) for counter in counters]))
    assert words.tolist() == [init._int64(number) >> 32 for number in published]


@pytest.mark.parametrize("draw", DRAWS)
def test_distributions_are_torchs(draw: str) -> None:
    """Kolmogorov's and Smirnov's test; and moments, which weigh the tails more."""
    std, count = 0.02, 1 << 19
    theirs = torch.empty(count)
    {
        "normal": lambda: theirs.normal_(0, std, generator=seeded()),
        "truncated": lambda: torch.nn.init.trunc_normal_(
            theirs, 0, std, -3 * std, 3 * std, generator=seeded()
        ),
        "uniform": lambda: theirs.uniform_(-std, std, generator=seeded()),
    }[draw]()
    ours = values(draw, 512, count // 512, size=std).flatten()
    joined = torch.cat((ours, theirs)).argsort()
    walk = torch.where(joined < count, 1.0, -1.0).double().cumsum(0)
    assert walk.abs().max() / count < 1.95 * math.sqrt(2 / count)  # one seed in a thousand is above
    for power, sample in ((1, 1.0), (2, 3.0), (3, 15.0), (4, 105.0)):
        moments = [((x.double() / std) ** power).mean().item() for x in (ours, theirs)]
        assert moments[0] == pytest.approx(moments[1], abs=5 * math.sqrt(2 * sample / count)), power
    limit = {"normal": math.inf, "truncated": 3, "uniform": 1}[draw] * std
    assert ours.abs().max() <= limit * (1 + 1e-6)
    assert draw == "normal" or ours.abs().max() > 0.99 * limit


def test_neighbours_rows_names_and_uses_are_independent() -> None:
    generator = seeded()
    first, again, other = torch.empty(256, 256), torch.empty(256, 256), values("normal", 256, 256, seed=1)
    init.normal_(first, 1.0, generator)
    init.normal_(again, 1.0, generator)  # as torch's own, a generator goes on
    assert torch.equal(first, values("normal", 256, 256))
    flat = first.flatten()
    for one, two in (
        (first, again),
        (first, other),
        (flat[1:], flat[:-1]),
        (first[1:], first[:-1]),
        (first, first.T),
    ):
        assert torch.corrcoef(torch.stack((one.flatten(), two.flatten())))[0, 1].abs() < 0.02


def test_normal_values_are_those_of_the_inverse_distribution_function() -> None:
    from statistics import NormalDist

    words = torch.tensor([0, -1, 1, -7, 2**10, -(2**20), 2**27, -(2**29), 2**30, 3 * 2**29, 2**31 - 2**20])
    found = init._normal(words.int(), math.inf).tolist()
    for word, z in zip(words.tolist(), found, strict=True):
        tail = ((word if word >= 0 else ~word) + 0.5) / 2**31
        wanted = math.copysign(NormalDist().inv_cdf(1 - tail / 2) if tail > 1e-6 else 0, word)
        if not wanted:  # 1 - tail / 2 has too few digits there
            wanted = math.copysign(-NormalDist().inv_cdf(tail / 2), word)
        assert z == pytest.approx(wanted, rel=5e-6, abs=2e-7)


RECORDED = {
    "normal": [3202651783, 3221437223, 1067440317, 3213657630, 3208904051, 1061313305],
    "truncated": [3202608553, 3221328667, 1067391697, 3213619987, 3208861774, 1061271522],
    "uniform": [3207053154, 3173327799, 1046008269, 3196807028, 3202566611, 1055210763],
}


def test_bits_are_the_same_everywhere() -> None:
    """On every CPU and version of torch: runs that were reported can be repeated."""
    for draw, bits in RECORDED.items():
        assert values(draw, 2, 3, seed=5).flatten().numpy().view(np.uint32).tolist() == bits, draw


# ------------------------------------------------------------------------------------------------- layouts

PLACEMENTS: dict[str, list[Any]] = {
    "whole": [Replicate(), Replicate()],
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "rows of columns": [Shard(0), Shard(1)],
    "rows of rows": [_StridedShard(0, split_factor=2), Shard(0)],
    "experts by columns": [Shard(1), Shard(0)],
    "last by middle": [Shard(2), Shard(1)],
}
SHAPES = [(7, 5), (1, 3), (70,), (5, 3, 4), (2, 40, 3)]


def shards() -> list[str]:
    """What is wrong on a rank."""
    mesh, wrong, before = init_device_mesh("cpu", (2, 2)), [], (init._AT_A_TIME, init._words)
    drawn: list[int] = []

    def words(counters: Tensor) -> Tensor:
        drawn.append(counters.numel())
        return before[1](counters)

    init._words = words
    try:
        for shape in SHAPES:
            init._AT_A_TIME = before[0]
            whole = values("truncated", *shape)
            init._AT_A_TIME = 16
            for place, placements in PLACEMENTS.items():
                if any(getattr(p, "dim", 0) >= len(shape) for p in placements):
                    continue
                wanted = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                mine = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
                drawn.clear()
                init.trunc_normal_(mine, 1.0, seeded())
                if not torch.equal(mine.to_local(), wanted):
                    wrong.append(f"{place} of {shape}: other values")
                if sum(drawn) != wanted.numel() or max(drawn) > 16:
                    wrong.append(f"{place} of {shape}: {drawn} drawn for {wanted.numel()}")
    finally:
        init._AT_A_TIME, init._words = before
    return wrong


@pytest.mark.ranks
def test_every_layout_has_the_same_values_and_draws_its_shard_alone(ranks: Any) -> None:
    assert ranks(4, shards) == [[]] * 4


def peak(placements: list[Any]) -> tuple[int, int]:
    """How much more memory than before initial values take, and the bytes of the shard that they fill."""
    from tests.checkpoint.partial import _status

    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.ones(2048 if placements[1].is_replicate() else 1024, 2048)
    mine = DTensor.from_local(local, mesh, placements, run_check=False)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    init.trunc_normal_(mine, 0.02, seeded())
    return _status("VmHWM") - before, local.nbytes


@pytest.mark.ranks
def test_memory_grows_with_neither_the_tensor_nor_the_shard(ranks: Any) -> None:
    for used, _ in ranks(4, peak, [Shard(0), Shard(1)]):
        assert used < 24 * 2**20  # the whole is 32 MiB, of which torch's function makes three more


@pytest.mark.ranks
def test_a_plugins_own_function_fills_the_whole(ranks: Any) -> None:
    for found in ranks(4, filled):
        assert found


def filled() -> bool:
    mesh = init_device_mesh("cpu", (2, 2))
    whole, mine = torch.empty(6, 4), distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0), Shard(1)])
    for tensor in (whole, mine):
        init.fill(tensor, lambda t: torch.nn.init.orthogonal_(t, generator=seeded()))
    return torch.equal(mine.full_tensor(), whole) and bool(whole.any())  # type: ignore[attr-defined]
