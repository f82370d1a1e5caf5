"""No false alarms: bundled families and components of plugins are right on each layout, or refused by
name."""

from __future__ import annotations

import pytest

from titan_proof.prove.component import recipe_around
from titan_proof.prove.proof import prove, sentence
from titancli.recipe import load_recipe
from titancli.registry import current

RECIPES = [
    *("llama3_debug", "qwen3_debug", "qwen3_moe_debug", "deepseek_v3_debug", "gpt_oss_debug", "llama4_debug"),
    *("mixtral_debug", "olmo3_debug", "glm4_moe_debug", "gemma3_debug", "granite_debug"),
    *("qwen3_next_debug", "hf_causal_lm_debug", "titan-flux:flux_debug", "dpo_debug", "sft_debug"),
]
COMPONENTS = [("optimizer", "muon"), ("converter", "lora"), ("converter", "float8_linear"), ("loss", "gspo")]


def refuse_alarms(loaded):
    proof = prove(loaded, ranks=4)
    assert not proof.wrong, [sentence(cause) for cause in proof.causes]
    right = {result["name"] for result in proof.results if result["status"] == "right"}
    assert right >= {"accumulation", "resume", "export", "dp_shard 2", "dp_shard 4"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RECIPES)
def test_no_false_alarm_over_a_family(name):
    refuse_alarms(load_recipe(name))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "name"), COMPONENTS)
def test_no_false_alarm_over_a_component(kind, name):
    refuse_alarms(recipe_around(current().find(kind, name), []))
