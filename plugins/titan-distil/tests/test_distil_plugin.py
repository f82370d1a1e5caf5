"""The plugin is sound by the kit's rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from distil_cases import save_teacher

from titan_testing import check_plugin
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import Estimate, estimate
from titancli.recipe import load_recipe


def test_the_plugin_is_sound(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path)
    loss = ["backward", "metrics", "accumulation", "nothing left", "chunks", "engine"]  # it has a teacher
    check_plugin(
        "titan-distil",
        configs={
            "loop/distil": {"teacher": {"weights": str(folder)}},
            "loop/distil_on_policy": {"teacher": {"weights": str(folder)}, "task": {"type": "titan-rl/sum"}},
        },
        skip={"loss/distil": loss},
    )


def planned(*overrides: str) -> Estimate:
    recipe = load_recipe("titan-distil:distil_qwen3_0.6b", ["model.n_layers=2", *overrides]).recipe
    found = estimate(recipe, recipe.degrees(1), DEVICES["H100"])
    assert found is not None
    return found


def test_it_can_be_planned_without_its_teacher_whose_logits_share_the_chunks_of_the_loss() -> None:
    alone, both = (one.worst.classes["loss"] for one in (planned("loop=sft", "loss=sft"), planned()))
    assert both == pytest.approx(alone, rel=0.2)
