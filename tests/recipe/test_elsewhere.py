"""Keys of other trainers, and what they are in titan."""

from __future__ import annotations

import re

import pytest

from tests.recipe.conftest import BASE
from titancli.errors import RecipeError
from titancli.recipe import load_recipe
from titancli.recipe.editor import override_keys
from titancli.recipe.elsewhere import MOVED, SYNONYMS
from titancli.registry import current
from titancli.registry.component import component_info

DATA = {
    "dataset": {"type": "text_files"},
    "loop": {"type": "grpo", "generator": {"type": "local"}},
    "validation": {},
}


def test_what_the_table_names_exists() -> None:
    known = set(override_keys(DATA, current()))
    known |= {f"dataset.{name}" for name in ("text",)}
    tops = {key.partition(".")[0] for key in known}
    for said in SYNONYMS.values():
        key = re.match(r"[a-z_]+(\.[a-z_0-9]+)+", said)
        if key:
            assert key.group() in known | {f"{top}.type" for top in tops}, said
        for section in re.findall(r"\[\[?([a-z_]+)", said):
            assert section in tops, said
        for kind in re.findall(r"list-components (\w+)", said):
            assert current().names(kind), said
        for name in re.findall(r'type = "(\w+)"', said):
            assert any(component_info(cls).name == name for _, cls in current().components()), said


def test_no_key_of_titan_is_said_to_be_another_trainers() -> None:
    own = {key.rpartition(".")[2] for key in override_keys(DATA, current())}
    assert own & set(SYNONYMS) <= {"batch_size"}  # loop.generator's
    assert not own & {key for key in MOVED if "." not in key}


@pytest.mark.parametrize(
    ("section", "hint"),
    [
        ("[training]\nlearning_rate = 1e-4", "in titan: optimizer.lr"),
        ("[training]\nper_device_train_batch_size = 4", "in titan: training.local_batch_size"),
        ("[training]\ngradient_accumulation_steps = 4", "in titan: training.global_batch_size: rows of a"),
        ("[training]\nbf16 = true", 'in titan: training.mixed_precision_param: "bfloat16", the default'),
        ("[model]\nlora_r = 8", 'in titan: [[converters]] with type = "lora"'),
        ("[trainer]\nx = 8", "in titan: [training]"),
    ],
)
def test_a_key_of_another_trainer_is_told_as_titan_has_it(problem, section: str, hint: str) -> None:
    head, _, line = section.partition("\n")
    text = BASE.replace(head, f"{head}\n{line}") if head in BASE else f"{BASE}{section}\n"
    found = problem(text)
    assert found.code == "unknown-key" and found.hint.startswith(hint)


def test_the_key_that_it_stands_for_is_not_said_to_be_missing(problem) -> None:
    found = problem(BASE.replace("steps = 1000", "max_steps = 1000"))
    assert (found.message, found.hint) == ("unknown key 'max_steps' in training", "in titan: training.steps")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learning_rate=1e-4", "in titan: optimizer.lr=1e-4"),
        ("training.max_grad_norm=0.5", "in titan: training.max_norm=0.5"),
        ("fp16=true", 'in titan: training.mixed_precision_param: "bfloat16", the default, or "float32"'),
        ("lr=1e-4", "write optimizer.lr=1e-4"),
        ("training.name=x", "write name=x"),
        ("training.lr=1e-4", "write optimizer.lr=1e-4"),
    ],
)
def test_an_override_of_such_a_key_is_told_as_it_is_written(problem, override: str, hint: str) -> None:
    assert problem(BASE, override).hint == hint


def test_a_misspelt_key_with_the_name_of_a_section_is_corrected() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("llama3_debug", ['callbacks=[{type="early_stop",metrics="x"}]'])
    assert caught.value.problems[0].hint == "did you mean 'metric'?"
