"""docs/coming-from-hf-trainer.md: arguments have a place or a reason, the examples train alike."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import ROOT, blocks
from titan_migrate.known_keys import KEYS
from titancli.cli import main
from titancli.converters import LoRA
from titancli.observe.events import read_events
from titancli.recipe import load_recipe
from titancli.recipe.schema import Recipe
from titancli.registry import current
from titancli.registry.component import component_info
from titancli.registry.fields import fields_of, nested_fields

sys.path.append(str(ROOT / "benchmarks"))

PAGE = ROOT / "docs" / "coming-from-hf-trainer.md"
SECTIONS = dict(re.findall(r"\n## ([^\n]+)\n(.*?)(?=\n## |\Z)", PAGE.read_text(), re.DOTALL))
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`")


def rows(section: str) -> Iterator[tuple[list[str], str]]:
    """The names in the first column of a table, and the last one."""
    for line in re.findall(r"^\| (`.*) \|$", SECTIONS[section], re.MULTILINE):
        first, _, last = line.partition(" | ")
        yield re.findall(r"`(\w+)`", first), last


def keys() -> set[str]:
    """Every key that a recipe may have, with any component."""
    found = set(fields_of(Recipe))
    for name, field in fields_of(Recipe).items():
        for table in field.type.tables:
            found |= {f"{name}.{one.name}" for one in nested_fields(table)}
    slots = {"model", "tokenizer", "dataset", "optimizer", "loss", "loop", "parallelize", "lr_scheduler"}
    for _, entry in current().components():
        kind = component_info(entry).kind
        slot = {"schedule": "lr_scheduler", "advantage": "loop.advantage", "generator": "loop.generator"}
        where = slot.get(kind, kind)
        if where in slots or where.startswith("loop."):
            found |= {f"{where}.{one.name}" for one in nested_fields(entry)} | {f"{where}.type"}
    return found


def names(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def test_every_training_argument_has_a_place_or_a_reason() -> None:
    from transformers import TrainingArguments

    told = [name for found, _ in rows("TrainingArguments") for name in found]
    assert len(told) == len(set(told))
    assert set(told) == names(TrainingArguments)


@pytest.mark.parametrize("section", ["TRL", "peft"])
def test_what_is_told_of_trl_and_peft_is_there(section: str) -> None:
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    from transformers import TrainingArguments

    configs = (peft.LoraConfig,) if section == "peft" else (trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig)
    told = [name for found, _ in rows(section) for name in found]
    assert len(told) == len(set(told)) > 10
    assert set(told) <= set().union(*map(names, configs)) - names(TrainingArguments)


@pytest.mark.parametrize("section", ["TrainingArguments", "TRL", "peft"])
def test_a_row_leads_to_what_is_there_or_gives_a_reason(section: str) -> None:
    known = keys()
    for found, last in rows(section):
        for key in KEY.findall(last):
            assert key in known | {"layers.0", "chat_template.jinja"}, f"{found}: a recipe has no {key}"
        if last.startswith("none"):
            assert len(last.removeprefix("none: ").split()) >= 2, f"{found}: no reason"
        else:
            assert "`" in last, f"{found}: {last}"


def test_hints_for_unknown_keys_name_what_the_page_names() -> None:
    """`titan validate` of a recipe with a Trainer's key; where it has none, the page says what to do."""
    told = {
        name: last
        for section in ("TrainingArguments", "TRL")
        for found, last in rows(section)
        for name in found
    }
    for name in told.keys() & KEYS.keys():
        key = re.match(r"[a-z_]+\.[a-z_.]+[a-z]", KEYS[name])
        if key is not None and not told[name].startswith("none"):
            assert key[0].partition(":")[0] in told[name], f"{name}: {KEYS[name]}"


def test_defaults_that_differ_are_as_told() -> None:
    peft, trl = pytest.importorskip("peft"), pytest.importorskip("trl")
    from transformers import TrainingArguments

    theirs: dict[str, Any] = {}
    for config in (peft.LoraConfig, trl.SFTConfig, TrainingArguments):
        theirs |= {field.name: field.default for field in dataclasses.fields(config)}
    recipe = load_recipe(
        "llama3_debug",
        ["dataset={type='chat', path='titan:sums'}"],
        unset=[
            *("optimizer.lr", "lr_scheduler.warmup_steps", "training.seq_len", "training.local_batch_size"),
            *("metrics.log_freq", "training.mixed_precision_param"),
        ],
    ).recipe
    pairs = re.findall(
        r"`(\w+)` = ([\w.-]+) \| .*?`([a-z_.]+)` = ([\w.-]+)", SECTIONS["Defaults that differ"]
    )
    assert len(pairs) == 9
    for name, value, key, own in pairs:
        assert str(theirs[name]).lower() in (value, f"{value}.0") or theirs[name] == float(value), name
        found: Any = recipe
        for part in key.split(".") if key != "alpha" else ():
            found = getattr(found, part)
        if key == "alpha":
            found = LoRA().alpha
        assert found == json.loads(own), key


@pytest.mark.slow
def test_the_script_and_the_recipe_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses agree to the four digits that the Trainer logs, for two epochs with accumulation."""
    import beside_trl
    import transformers

    beside_trl.prepare(tmp_path, steps=1, layers=2)
    words = Path(json.__file__).read_text().split()
    texts = [" ".join(words[first : first + 3 + first % 29]) for first in range(0, 480, 20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = {block.value: block.text for block in blocks(PAGE) if block.mark == "file"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    logged: list[float] = []

    def log(self: Any, logs: dict[str, float], *more: Any) -> None:
        logged.extend([logs["loss"]] if "loss" in logs else [])

    monkeypatch.setattr(transformers.Trainer, "log", log)
    runpy.run_path("with_trainer.py")
    assert main(["train", "with_titan.toml", "--run-dir", "with-titan"]) == 0
    found = [
        one["metrics"]["loss"]
        for one in read_events(tmp_path / "with-titan/events.jsonl")
        if one["event"] == "step"
    ]
    assert len(found) == len(logged) == 6
    assert found == pytest.approx(logged, abs=1e-4)
    assert found[-1] < found[0] - 0.5
