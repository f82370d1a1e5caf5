"""Every policy loss gives the same numbers and gradients on one rank, under FSDP2 and TP, and accumulated."""

from __future__ import annotations

import pytest
import torch

from tests.engine.cases import LENGTH, ROWS, Layout, recipe, small, whole_batch, wholes
from tests.ranks import Ranks
from titan_rl import Cispo, Grpo, Gspo, ImportanceSampling
from titancli.engine import Engine
from titancli.protocols.batch import Batch

LOSSES = {
    "grpo": Grpo(kl_coef=0.1),
    "dapo": Grpo(clip_high=0.28, length_norm="token"),
    "dr. grpo": Grpo(length_norm="constant", constant=9),
    "gspo": Gspo(clip_low=0.05, clip_high=0.05, kl_coef=0.1),
    "cispo": Cispo(clip_high=0.1),
    "grpo entropy": Grpo(entropy_coef=0.1, importance="token_truncate", importance_max=1.1),
    "importance_sampling": ImportanceSampling(),
}


COUNTS = ("tokens", "targets", "padding", "loss_max")
"""Metrics that depend on the layout, or are whole numbers."""


def rollouts() -> Batch:
    """Several samples in most rows, of unequal length, whose ratios are on both sides of every clip."""
    batch = whole_batch(documents=True)
    generator = torch.Generator().manual_seed(11)
    near = -4.2 + 0.4 * torch.randn(3, ROWS, LENGTH, generator=generator)
    advantages = torch.randn(ROWS, LENGTH + 1, generator=generator)
    each = advantages.gather(1, batch["document_ids"].long())  # one a sample
    return Batch(
        {
            **batch,
            "advantages": each,
            "old_logprobs": near[0],
            "reference_logprobs": near[1],
            "sampler_logprobs": near[2],
        }
    )


def gradients(layout: Layout) -> dict[str, torch.Tensor]:
    engine = Engine.build(recipe(layout))
    dp, accumulation = engine.mesh.degrees.dp, engine.settings.accumulation
    pieces = rollouts().split(ROWS // dp // accumulation)
    mine = [pieces[k * dp + engine.mesh.dp_rank] for k in range(accumulation)]
    found: dict[str, torch.Tensor] = {}
    for name, loss in LOSSES.items():
        metrics = engine.forward_backward(mine, loss)
        told = {key: value for key, value in metrics.items() if key not in COUNTS}
        found |= {f"{name} {key}": torch.as_tensor(value).clone() for key, value in told.items()}
        found |= wholes(
            (f"{name} {key}", p.grad / engine.pending.weight) for key, p in engine.named_parameters()
        )
        engine.clear_gradients()
    return found


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, torch.Tensor]:
    return ranks(1, gradients, small())[0]


@pytest.mark.parametrize(
    ("count", "layout"),
    [
        (1, small(micro_batches=2)),
        (1, small(micro_batches=4)),
        (2, small(mesh={"dp_shard": 2}, micro_batches=2)),
        (2, small(mesh={"tp": 2})),
    ],
    ids=["accumulation 2", "accumulation 4", "FSDP2", "TP2"],
)
def test_a_layout_changes_nothing(
    ranks: Ranks, alone: dict[str, torch.Tensor], count: int, layout: Layout
) -> None:
    for found in ranks(count, gradients, layout):
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            assert (found[name] - expected).norm() <= 1e-5 * expected.norm() + 1e-9, name


def test_the_case_tells_losses_apart(alone: dict[str, torch.Tensor]) -> None:
    assert len({alone[f"{name} loss"].item() for name in LOSSES}) == len(LOSSES)
    for name in LOSSES:
        clipped, entropy = alone[f"{name} clip_fraction"].item(), alone[f"{name} entropy"].item()
        assert 0.05 < clipped < 0.95 or name == "importance_sampling"
        assert 3.0 < entropy < 4.2  # of 64 ids
