"""Keys and configs of other trainers, written where a recipe belongs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titan_migrate.known_keys import KEYS
from titancli.errors import Problem, RecipeError
from titancli.recipe import load_recipe
from titancli.recipe.json_schema import override_keys
from titancli.registry import current
from titancli.registry.component import component_info

DATA = {
    "dataset": {"type": "text_files"},
    "loop": {"type": "grpo", "generator": {"type": "local"}},
    "validation": {},
}


def test_titans_keys_exist() -> None:
    known = set(override_keys(DATA, current()))
    known |= {f"dataset.{name}" for name in ("text",)}
    tops = {key.partition(".")[0] for key in known}
    for said in KEYS.values():
        key = re.match(r"[a-z_]+(\.[a-z_0-9]+)+", said)
        if key:
            assert key.group() in known | {f"{top}.type" for top in tops}, said
        for section in re.findall(r"\[\[?([a-z_]+)", said):
            assert section in tops, said
        for kind in re.findall(r"list-components (\w+)", said):
            assert current().names(kind), said
        for name in re.findall(r'type = "(\w+)"', said):
            assert any(component_info(cls).name == name for _, cls in current().components()), said


def test_no_key_is_titans_own() -> None:
    own = {key.rpartition(".")[2] for key in override_keys(DATA, current())}
    assert own & set(KEYS) <= {"batch_size"}  # loop.generator's


def problem(*overrides: str) -> Problem:
    with pytest.raises(RecipeError) as caught:
        load_recipe("llama3_debug", overrides)
    [found] = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learning_rate=1e-4", "in titan: optimizer.lr=1e-4"),
        ("training.max_grad_norm=0.5", "in titan: training.max_norm=0.5"),
        ("fp16=true", 'in titan: training.mixed_precision_param: "bfloat16", the default, or "float32"'),
        ("training.gradient_accumulation_steps=4", "in titan: training.global_batch_size: rows of a"),
        ("model.lora_r=8", 'in titan: [[converters]] with type = "lora"'),
        ("load_in_4bit=true", 'in titan: [[converters]] with type = "qlora"'),
        ("lr=1e-4", "write optimizer.lr=1e-4"),
        ("training.name=x", "write name=x"),
    ],
)
def test_key_of_another_trainer(override: str, hint: str) -> None:
    found = problem(override)
    assert found.code == "unknown-key" and str(found.hint).startswith(hint)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("base_model: NousResearch/Llama-3.2-1B\nadapter: lora\n", "recipe from-axolotl"),
        ("### model\nmodel_name_or_path: a/b\nstage: sft\n", "recipe from-llamafactory"),
        ("model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\n", "recipe from-torchtune"),
    ],
)
@pytest.mark.parametrize("name", ["config.yml", "config.yaml", "config.toml"])
def test_config_of_another_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, command: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    [found] = caught.value.problems
    assert found.code == "foreign-config" and found.hint == f"convert it: titan {command} {name} OUT.toml"
