"""What those who come from elsewhere type, and what they are told to type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import absent
from tests.cli.conftest import Titan
from titancli.cli.group import PLACES
from titancli.cli.override_hints import COMMANDS
from titancli.registry import first_party
from titancli.terminal import own_command

REPOSITORY = "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["llama3_debug", "--lr", "1e-3"], "an override has no dashes: optimizer.lr=1e-3"),
        (["--steps=5", "llama3_debug"], "an override has no dashes: training.steps=5"),
        (["llama3_debug", "--steps"], "an override has no dashes: training.steps=VALUE"),
        (["--enable", "llama3_debug"], "usage: "),  # compile's, or checkpoint's
        (["--deterministic", "llama3_debug"], "an override has no dashes: debug.deterministic=VALUE"),
        (["llama3_debug", "--optimizer", "muon"], "an override has no dashes: optimizer=muon"),
        (["llama3_debug", "--name", "a b"], "an override has no dashes: 'name=a b'"),
        (["llama3_debug", "--learning-rate", "1e-3"], "in titan: optimizer.lr=1e-3"),
        (["llama3_debug", "--bf16"], 'in titan: training.mixed_precision_param: "bfloat16", the default'),
        (["no_such_recipe", "--lr", "1e-3"], "an override has no dashes: optimizer.lr=1e-3"),
        (["llama3_debug", "--zzz", "1"], "usage: "),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["train", "validate"])
def test_an_option_that_is_a_key_is_told_as_an_override(
    titan: Titan, command: str, words: list[str], hint: str
) -> None:
    if hint.startswith("in titan"):
        absent.need("titan-migrate")  # which knows other trainers' keys
    done = titan(command, *words)
    assert done.code == 2 and f"\n {hint}" in done.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["export", "runs/a b"], "in titan: titan convert-checkpoint 'runs/a b' OUT --to hf"),
        (["merge_lora"], "in titan: titan convert-checkpoint RUN OUT --to hf"),
        (["finetune", "--model", "x"], "in titan: titan recipe new my.toml --from-hf FOLDER --sft DATA"),
        (["chat", "--fast", "runs/a"], 'in titan: titan generate runs/a --chat "PROMPT"'),
        (["serve", "runs/a"], "in titan: titan convert-checkpoint runs/a OUT --to hf; vLLM"),
        (["eval", "runs/a", "--tasks", "mmlu"], "lm-evaluation-harness: titan lm-eval runs/a --tasks mmlu"),
        (["eval", "--tasks=a,b", "runs/a"], "lm-evaluation-harness: titan lm-eval runs/a --tasks a,b"),
        (["train", "--config", "a.toml"], "the recipe has no option before it: titan train a.toml"),
    ],
)
def test_words_of_other_tools(titan: Titan, words: list[str], hint: str) -> None:
    done = titan(*words)
    assert done.code == 2 and hint in done.err.replace(own_command(), "titan")


def test_formats_of_plugins_are_listed(titan: Titan) -> None:
    assert "--to [hf|titan|peft|gguf]" in titan("convert-checkpoint", "--help").out
    done = titan("convert-checkpoint", "a", "b", "--to", "onnx")
    assert done.code == 2 and "'onnx' is not one of 'hf', 'titan', 'peft', 'gguf'" in done.err


def test_commands_of_other_tools_are_not_titans() -> None:
    assert not COMMANDS.keys() & {*PLACES, *first_party.COMMANDS}


def test_an_option_of_a_command_without_overrides_is_no_key(titan: Titan) -> None:
    done = titan("runs", "list", "--steps", "5")
    assert done.code == 2 and "override" not in done.err


def test_a_key_and_its_value_in_two_words_are_told_as_one(titan: Titan) -> None:
    done = titan("train", "llama3_debug", "training.steps", "5")
    assert done.code == 2 and "an override is one word: training.steps=5" in done.err
    done = titan("train", "llama3_debug", "training.steps")
    assert "an override is one word: training.steps=VALUE" in done.err


@pytest.mark.parametrize("name", [*PLACES, "runs list", ""])
def test_h_is_help(titan: Titan, name: str) -> None:
    done = titan(*name.split(), "-h")
    assert done.code == 0 and done.out == titan(*name.split(), "--help").out
    assert done.out.startswith("Usage: titan")


def test_the_help_of_train_says_what_an_override_is_and_where_keys_are_found(titan: Titan) -> None:
    words = " ".join(titan("train", "--help").out.split())
    assert "KEY=VALUE overrides a value of the recipe" in words and "`titan recipe show RECIPE`" in words


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("weights", "weights: path\n    Initial weights: a Hugging Face folder"),
        ("training.steps", "training.steps: int > 0 (required)\n    Total number of optimizer steps"),
        ("training.dataloader.num_workers", "training.dataloader.num_workers: int >= 0 = 0\n"),
        ("optimizer.lr", "optimizer.lr: float >= 0 = 0.0008\n"),
        ("optimizer", "`titan show optimizer/NAME` shows its fields"),
        ("converters", "One of: lora"),
    ],
)
def test_show_of_a_key(titan: Titan, key: str, words: str) -> None:
    done = titan("show", key)
    assert done.code == 0 and words in done.out


def test_show_of_a_key_as_json_is_of_one_field(titan: Titan) -> None:
    row = json.loads(titan("show", "weights", "--json").out)["component"]
    assert (row["kind"], row["name"], [field["name"] for field in row["fields"]]) == (
        "key",
        "weights",
        ["weights"],
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("training.stesp", "did you mean training.steps?"),
        ("training.zzzz", "`titan show training` lists its keys"),
        ("model.dim", "`titan show model/NAME` lists the keys of one"),
        ("name.x", "`titan show name` lists its keys"),
    ],
)
def test_show_of_no_key(titan: Titan, key: str, hint: str) -> None:
    done = titan("show", key)
    assert done.code == 2 and hint in done.err


@pytest.mark.parametrize(
    "words",
    [
        ["recipe", "new", "x.toml", "--from-hf", REPOSITORY],
        ["generate", REPOSITORY, "a prompt"],
        ["eval", REPOSITORY],
        ["convert-checkpoint", REPOSITORY, "out", "--to", "titan"],
    ],
    ids=" ".join,
)
def test_a_repository_in_place_of_a_folder_is_downloaded_first(
    titan: Titan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = titan(*words)
    assert done.code == 5
    assert "titan download Qwen/Qwen3-0.6B --weights, then give assets/Qwen3-0.6B" in done.err
    Path("Qwen").mkdir()
    assert "download" not in titan(*words).err  # a path with a mistake in it
