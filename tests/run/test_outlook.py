"""What is said of a run before it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from titancli.recipe import load_recipe
from titancli.run.outlook import outlook


def said(*overrides: str, recipe: str = "llama3_debug", world: int = 1, start_step: int = 0) -> list[str]:
    plan: Any = SimpleNamespace(loaded=load_recipe(recipe, overrides), checkpoint=None, start_step=start_step)
    return list(outlook(plan, world))


def test_tokens_are_those_of_all_ranks_and_of_what_is_left() -> None:
    assert said(world=2, start_step=40) == [
        "model:     llama3, random weights",
        "data:      python_stdlib, 4,096 tokens per step, 245,760 in 60 steps",
        "saves:     every 50 steps and at the end, the last 2 are kept",
    ]
    accumulated = said("training.global_batch_size=32")
    assert "8,192 tokens per step" in accumulated[1]


def test_weights_and_what_is_evaluated_are_named(tmp_path: Path) -> None:
    lines = said(f"weights={tmp_path}", "checkpoint.enable=false", recipe="sft_debug")
    assert lines[0] == f"model:     llama3, weights from {tmp_path}"
    assert lines[2] == "saves:     nothing; evaluates held_out every 20"


def test_a_loop_with_prompts_of_its_own_has_no_data_line() -> None:
    assert [line.split()[0] for line in said(recipe="grpo_digit")] == ["model:", "saves:"]
