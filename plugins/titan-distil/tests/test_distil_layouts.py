"""The loss inside models: plain torch on all logits, and one rank, on every layout of student and teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
from distil_cases import by_plain_torch, of_losses, of_top, save_teacher
from torch import Tensor

from tests.engine.cases import Layout, small
from tests.ranks import Ranks
from titan_distil import DistilLoss

pytestmark = pytest.mark.ranks
LOSSES = {
    "forward": DistilLoss(),
    "reverse": DistilLoss(divergence="reverse_kl", temperature=2.0),
    "jsd": DistilLoss(divergence="jsd", beta=0.2, sft_weight=0.3),
}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= tolerance * value.norm() + 1e-8, name


@pytest.fixture(scope="module")
def teacher(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranks(1, save_teacher, tmp_path_factory.mktemp("teacher"))[0]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, teacher: Path) -> dict[str, Tensor]:
    return ranks(1, of_losses, teacher, LOSSES, small())[0]


def test_the_loss_is_that_of_plain_torch_on_all_logits(
    ranks: Ranks, teacher: Path, alone: dict[str, Tensor]
) -> None:
    compare(alone, ranks(1, by_plain_torch, teacher, LOSSES)[0], 2e-6)
    for name in LOSSES:
        assert alone[f"{name} evaluated"] == alone[f"{name} loss"]
        assert 0.05 < alone[f"{name} divergence"] < 8


@pytest.mark.parametrize(
    ("count", "layout", "mesh"),
    [
        (1, small(micro_batches=4), None),
        (2, small({"dp_shard": 2}, micro_batches=2), None),
        (2, small({"tp": 2}), None),
        (2, small({"cp": 2}), None),
        (2, small({"tp": 2}), {"cp": 2}),
        (2, small({"cp": 2}), {"tp": 2}),
        (2, small({"dp_shard": 2}), {"dp_replicate": 2}),
        (2, small({"dp_shard": 2}, compile="aot_eager"), None),
        pytest.param(4, small({"dp_shard": 2, "tp": 2}), {"dp_shard": 2, "cp": 2}, marks=pytest.mark.slow),
    ],
    ids=["accumulation", "fsdp", "tp", "cp", "tp, cp", "cp, tp", "fsdp, ddp", "compiled", "fsdp-tp, fsdp-cp"],
)
def test_a_layout_of_student_or_teacher_changes_nothing(
    ranks: Ranks,
    teacher: Path,
    alone: dict[str, Tensor],
    count: int,
    layout: Layout,
    mesh: dict[str, int] | None,
) -> None:
    for found in ranks(count, of_losses, teacher, LOSSES, layout, mesh):
        compare(found, alone, 3e-6)


@pytest.mark.parametrize("name", ["capped", "biased"])
def test_caps_and_biases_of_logits_count(ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder = ranks(1, save_teacher, tmp_path, name)[0]
    expected = ranks(1, by_plain_torch, folder, LOSSES, name)[0]
    compare(ranks(1, of_losses, folder, LOSSES, small(), None, name)[0], expected, 3e-6)
    compare(ranks(2, of_losses, folder, LOSSES, small({"tp": 2}), None, name)[1], expected, 3e-6)


def test_a_layout_changes_nothing_of_what_is_learned_from_the_most_probable_tokens(
    ranks: Ranks, teacher: Path, alone: dict[str, Tensor]
) -> None:
    losses = {name: LOSSES[name] for name in ("forward", "jsd")}
    expected = ranks(1, of_top, teacher, losses, small(), 7)[0]
    for layout in (small({"dp_shard": 2}, micro_batches=2), small({"tp": 2}), small({"cp": 2})):
        for found in ranks(2, of_top, teacher, losses, layout, 7):
            compare(found, expected, 3e-6)
    for name in losses:
        assert 0.2 * alone[f"{name} divergence"] < expected[f"{name} divergence"]
        assert expected[f"{name} divergence"] < alone[f"{name} divergence"]
