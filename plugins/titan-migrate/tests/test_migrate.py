"""Configs of axolotl, LLaMA-Factory and torchtune become recipes, and whatever does not is reported."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import migrate_configs as configs
import pytest
import survey
import tomli
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_migrate import FromZero, translate
from titan_migrate.account import Translation
from titan_migrate.config import Asked
from titan_migrate.document import read
from titan_migrate.parts import held_out
from titan_testing import check_plugin, run_cli
from titancli import build
from titancli.errors import RecipeError
from titancli.recipe import Loaded, load_recipe
from titancli.registry import current
from titancli.terminal import own_command

TOOLS = sorted(configs.ALL)
each_tool = pytest.mark.parametrize("tool", TOOLS)
CHECKOUTS = {"axolotl": "TITAN_AXOLOTL", "llamafactory": "TITAN_LLAMAFACTORY", "torchtune": "TITAN_TORCHTUNE"}
"""Environment variables with the folder of each project's checkout."""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    survey.stand_in(tmp_path / "base")
    return tmp_path


@pytest.fixture
def made(at: Path) -> Callable[..., Translation]:
    """`made(tool, text)`: the translation of a config, for a small model."""

    def of(tool: str, text: str, gpus: int = 1) -> Translation:
        Path("config.yaml").write_text(text, encoding="utf-8")
        asked = Asked("./base", gpus)
        return translate.translate(tool, Path("config.yaml"), "mine", current(), asked)

    return of


def loaded(found: Translation) -> Loaded:
    Path("mine.toml").write_text(found.text, encoding="utf-8")
    return load_recipe("./mine.toml")


def names(remarks: list[Any]) -> set[str]:
    return {remark.name for remark in remarks}


def lr(recipe: Any, steps: int) -> list[float]:
    factor = build(recipe.lr_scheduler, steps=steps)
    return [recipe.optimizer.lr * factor(step) for step in range(steps)]


def schedule(name: str, peak: float, warmup: int, steps: int, **more: Any) -> list[float]:
    """Return the rates of transformers' schedule, step by step."""
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=more or None)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_plugin_is_sound() -> None:
    check_plugin("titan-migrate")


@each_tool
def test_a_config_becomes_a_recipe_and_an_account(at: Path, tool: str) -> None:
    Path("config.yaml").write_text(configs.ALL[tool])
    done = run_cli("recipe", f"from-{tool}", "config.yaml", "mine.toml", "--model", "./base")
    assert done.code == 0, done.stderr
    assert "keys carried over" in done.stderr and "next:" in done.stderr
    assert run_cli("validate", "mine.toml", "--recipe-only").code == 0
    lines = done.stdout.splitlines()
    told = [f"# {line}\n" for line in lines]
    assert all(line in Path("mine.toml").read_text() for line in told)
    again = run_cli("recipe", f"from-{tool}", "config.yaml", "mine.toml")
    assert again.code == 2 and "exists" in again.stderr


@each_tool
def test_a_model_that_is_not_there_is_told_and_the_rest_is_written(at: Path, tool: str) -> None:
    Path("config.yaml").write_text(configs.ALL[tool])
    done = run_cli("recipe", f"from-{tool}", "config.yaml", "mine.toml")
    fetch = "titan download someone/Small-1B --weights --dir models/Small-1B"
    if tool == "torchtune":  # names a folder alone
        assert done.code == 3 and "is not valid yet" in done.stderr
    else:
        assert done.code == 0 and f"download it: {fetch}" in done.stderr.replace(own_command(), "titan")
        assert fetch in done.stdout
    assert tomli.loads(Path("mine.toml").read_text())["training"]["local_batch_size"] > 0


def test_null_section_is_no_unknown_key(made: Callable[..., Translation]) -> None:
    found = made("axolotl", configs.ALL["axolotl"] + "\nfsdp_config:\npeft:\n")
    assert {remark.name for remark in found.unset} >= {"fsdp_config", "peft"}
    assert not {remark.name for remark in found.lost} & {"fsdp_config", "peft"}


def test_axolotls_numbers_are_those_of_its_rules(made: Callable[..., Translation]) -> None:
    found = made("axolotl", configs.AXOLOTL, gpus=4)
    recipe = loaded(found).recipe
    assert recipe.training.steps == 50  # max_steps comes first
    # the warm-up is int(0.1 * 50) steps
    assert lr(recipe, 50) == pytest.approx(schedule("cosine", 2e-4, 5, 50), abs=1e-12)
    assert recipe.training.local_batch_size == 2 and recipe.training.global_batch_size == 2 * 4 * 4
    [adapters] = recipe.converters
    assert adapters.alpha / adapters.rank == 0.5 and adapters.targets is None
    optimizer, training = recipe.optimizer, recipe.training
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay) == (0.9, 0.999, 1e-8, 0)
    assert training.max_norm == 1.0 and training.seed == 42 and training.dtype == "float32"
    assert recipe.dataset.format == "sharegpt" and recipe.dataset.pack and recipe.dataset.too_long == "skip"
    assert (recipe.dataset.split, recipe.validation.datasets["validation"].split) == (
        "train[:19%]",
        "train[19%:20%]",
    )
    assert recipe.checkpoint.interval == 25 and recipe.validation.freq == 5
    assert recipe.activation_checkpoint.mode == "full"
    assert "lora_dropout" in names(found.lost) or recipe.converters[0].dropout == 0.05
    assert {"flash_attention", "output_dir"} <= names(found.idle) and names(found.unset) == {"wandb_project"}


def test_llamafactorys_numbers_are_those_of_its_rules(made: Callable[..., Translation], at: Path) -> None:
    (at / "data").mkdir()
    info = {"talks": {"file_name": "talks.json", "formatting": "sharegpt", "tags": {"user_tag": "me"}}}
    (at / "data" / "dataset_info.json").write_text(json.dumps(info))
    (at / "data" / "talks.json").write_text(json.dumps([{"conversations": []}] * 500))
    found = made("llamafactory", configs.LLAMAFACTORY)
    recipe = loaded(found).recipe
    assert recipe.training.epochs == 3.0 and recipe.training.global_batch_size == 8
    steps = 38  # of any run: transformers rounds the warm-up up
    assert lr(recipe, steps) == pytest.approx(schedule("cosine", 1e-4, 4, steps), abs=1e-12)
    assert recipe.converters[0].alpha / recipe.converters[0].rank == 2.0
    assert recipe.converters[0].targets == ["wq", "wv"]
    assert recipe.optimizer.beta2 == 0.999 and recipe.training.dtype == "float32"
    assert recipe.dataset.split == "train[:100]" and recipe.dataset.path.endswith("data/talks.json")
    assert recipe.dataset.roles == {"me": "user"} and not recipe.dataset.pack


def test_torchtunes_numbers_are_those_of_its_rules(made: Callable[..., Translation]) -> None:
    recipe = loaded(made("torchtune", configs.TORCHTUNE)).recipe
    assert recipe.training.steps == 40
    assert lr(recipe, 40) == pytest.approx(schedule("cosine", 3e-4, 10, 40), abs=1e-12)
    assert recipe.training.local_batch_size == 2 and recipe.training.global_batch_size == 16
    assert recipe.converters[0].alpha / recipe.converters[0].rank == 2.0
    assert recipe.converters[0].targets == ["wq", "wv"]
    assert recipe.optimizer.weight_decay == 0.01 and recipe.optimizer.beta2 == 0.999  # torch's own
    assert recipe.training.max_norm == 0 and recipe.training.dtype == "bfloat16"
    assert recipe.dataset.train_on == "all" and recipe.dataset.pack  # torchtune's default for Alpaca
    assert recipe.training.seed == 7 and recipe.training.seq_len == 512


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("name", "more", "own"),
    [
        ("linear", {}, {"shape": "linear"}),
        ("cosine", {}, {"shape": "cosine"}),
        ("constant_with_warmup", {}, {"shape": "constant"}),
        ("inverse_sqrt", {}, {"shape": "inverse_sqrt"}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"shape": "cosine", "min_lr_factor": 0.1}),
    ],
)
def test_rates_are_those_of_transformers(
    name: str, more: dict[str, Any], own: dict[str, Any], warmup: int
) -> None:
    factor = build(FromZero(warmup_steps=warmup, **own), steps=30)
    expected = schedule(name, 1.0, warmup, 30, **more)
    assert [factor(step) for step in range(30)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 19, 20, 95, 10_000])
def test_a_warm_up_in_proportion_is_rounded_as_the_tools_do(steps: int) -> None:
    up = FromZero(warmup_ratio=0.1)
    assert up.warmup(steps) == -(-steps // 10)
    down = FromZero(warmup_ratio=0.03, warmup_rounding="down", warmup_limit=100)
    expected = min(int(0.03 * steps), 100)
    assert down.warmup(steps) == (2 if expected == 1 else expected)


def test_several_data_sets(made: Callable[..., Translation], at: Path) -> None:
    """They are concatenated, with epochs; in given shares they are a mixture, with steps."""
    (at / "data").mkdir()
    info = {name: {"file_name": f"{name}.jsonl"} for name in ("small", "large")}
    (at / "data" / "dataset_info.json").write_text(json.dumps(info))
    (at / "data" / "small.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 20)
    (at / "data" / "large.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 500)
    text = configs.LLAMAFACTORY.replace("dataset: talks", "dataset: small,large")
    recipe = loaded(made("llamafactory", text)).recipe
    assert list(recipe.dataset.datasets) == ["rows0", "rows1"] and not hasattr(recipe.dataset, "weights")
    assert (recipe.training.steps, recipe.training.epochs) == (0, 3.0)
    recipe = loaded(made("llamafactory", text + "interleave_probs: 0.25,0.75\n")).recipe
    assert list(recipe.dataset.weights.values()) == [0.25, 0.75] and recipe.training.epochs is None


def test_data_sets_of_unknown_size_have_epochs(made: Callable[..., Translation]) -> None:
    found = made("axolotl", "base_model: x\nlearning_rate: 1e-4\nnum_epochs: 2\ndatasets:\n"
                 "  - {path: a/b, type: alpaca}\n  - {path: c/d, type: alpaca}\n")  # fmt: skip
    assert loaded(found).recipe.training.epochs == 2
    assert not [remark for remark in found.lost if remark.name == "num_epochs"]


PAIRS = "stage: dpo\npref_loss: {0}\ndataset: pairs\nmodel_name_or_path: x\nper_device_train_batch_size: 2\n"


@pytest.mark.parametrize(("theirs", "ours"), [("sigmoid", "DPO"), ("orpo", "ORPO"), ("simpo", "SimPO")])
def test_pairs_take_two_rows_each(made: Callable[..., Translation], theirs: str, ours: str) -> None:
    recipe = loaded(made("llamafactory", PAIRS.format(theirs))).recipe
    assert type(recipe.loss).__name__.upper() == ours.upper() and recipe.training.local_batch_size == 4
    assert recipe.loss.beta == 0.1


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory"])
def test_other_methods_become_their_loops(made: Callable[..., Translation], tool: str) -> None:
    text = {
        "axolotl": "base_model: x\nrl: kto\nlearning_rate: 1e-5\nkto_undesirable_weight: 0.5\n"
        "datasets: [{path: a/b, type: llama3.ultra}]\n",
        "llamafactory": PAIRS.format("sigmoid").replace("stage: dpo", "stage: kto\nkto_rejected_weight: 0.5"),
    }[tool]
    recipe = loaded(made(tool, text)).recipe
    assert type(recipe.loop).__name__ == "KtoLoop"
    assert recipe.loss.undesirable_weight == 0.5


@pytest.mark.parametrize(
    ("tool", "keys"),
    [
        ("axolotl", "peft_use_rslora: true\npeft_use_dora: true\nload_in_4bit: true\n"),
        ("llamafactory", "use_rslora: true\nuse_dora: true\nquantization_bit: 4\n"),
    ],
)
def test_the_forms_of_adapters_are_carried_over(
    made: Callable[..., Translation], tool: str, keys: str
) -> None:
    text = configs.ALL[tool].replace("load_in_4bit: false\n", "") + keys
    found = made(tool, text)
    [adapters] = loaded(found).recipe.converters
    assert type(adapters).__name__ == "QLoRA" and adapters.rslora and adapters.dora
    assert adapters.alpha == 16  # as it is there: the scale is the converter's
    told = names(found.lost) | names(found.changed) | names(found.idle)
    assert not told & {line.partition(":")[0] for line in keys.splitlines()}


def test_the_output_and_the_embedding_are_adapted_unless_they_are_one(
    made: Callable[..., Translation], at: Path
) -> None:
    text = configs.LLAMAFACTORY.replace("q_proj,v_proj", "q_proj,lm_head,embed_tokens")
    tied = made("llamafactory", text + "use_dora: true\n")
    assert loaded(tied).recipe.converters[0].targets == ["wq"]
    assert any("share a weight" in row.text for row in tied.changed)
    (at / "base" / "config.json").write_text(json.dumps(survey.CONFIG | {"tie_word_embeddings": False}))
    apart = made("llamafactory", text + "use_dora: true\nloraplus_lr_ratio: 16\n")
    recipe = loaded(apart).recipe
    assert recipe.converters[0].targets == ["wq", "output", "tok_embeddings"]
    assert not recipe.converters[0].dora and "use_dora" in names(apart.lost)
    words, rest = recipe.optimizer.groups
    assert words.match == ["tok_embeddings.lora_*"] and words.lr_factor == pytest.approx(1e-6 / 1e-4)
    assert rest.match == ["*.lora_b"] and rest.lr_factor == 16
    tuned = configs.TORCHTUNE.replace("lora_rank: 16", "lora_rank: 16\n  apply_lora_to_output: True")
    assert loaded(made("torchtune", tuned)).recipe.converters[0].targets == ["wq", "wv", "output"]


def test_lora_plus_is_of_adapters(made: Callable[..., Translation]) -> None:
    keys = "loraplus_lr_ratio: 8\nloraplus_lr_embedding: 1e-5\n"
    found = made("llamafactory", configs.LLAMAFACTORY + keys + "use_dora: true\n")
    assert loaded(found).recipe.optimizer.groups[0].match == ["*.lora_b", "*.lora_magnitude"]
    assert "loraplus_lr_embedding" in names(found.idle)
    whole = made(
        "llamafactory", configs.LLAMAFACTORY.replace("finetuning_type: lora", "finetuning_type: full") + keys
    )
    assert type(loaded(whole).recipe.optimizer).__name__ == "AdamW"
    assert {"loraplus_lr_ratio", "loraplus_lr_embedding"} <= names(whole.idle)


@pytest.mark.parametrize(("value", "told"), [(None, True), (0, False), (0.5, True)])
def test_the_cross_entropy_that_trl_adds_to_simpo_is_told(
    made: Callable[..., Translation], value: float | None, told: bool
) -> None:
    keys = "" if value is None else f"cpo_alpha: {value}\n"
    text = "base_model: x\nrl: simpo\nrl_beta: 2.0\nsimpo_gamma: 1.0\nlearning_rate: 1e-5\n" + keys
    found = made("axolotl", text + "datasets: [{path: a/b, type: chat_template.default}]\n")
    assert ("cpo_alpha" in names(found.lost)) == told
    loss = loaded(found).recipe.loss
    assert (loss.beta, loss.gamma) == (2.0, 1.0)
    config = pytest.importorskip("trl.experimental.cpo.cpo_config", reason="trl is not installed")
    assert config.CPOConfig.__dataclass_fields__["cpo_alpha"].default == 1.0


def test_eight_bit_optimizers_have_weights_in_float32(made: Callable[..., Translation]) -> None:
    text = "base_model: x\nlearning_rate: 1e-5\nbf16: true\noptimizer: adamw_bnb_8bit\n" \
           "datasets: [{path: a/b, type: alpaca}]\n"  # fmt: skip
    found = made("axolotl", text)
    recipe = loaded(found).recipe
    assert type(recipe.optimizer).__name__ == "AdamW8bit" and recipe.training.dtype == "float32"
    assert any(row.name == "optimizer" and "float32" in row.text for row in found.changed)


@pytest.mark.parametrize(
    ("split", "size", "expected"),
    [
        ("train", 0.05, ("train[:95%]", "train[95%:]")),
        ("train[:20%]", 0.05, ("train[:19%]", "train[19%:20%]")),
        ("train[10%:20%]", 0.5, ("train[10%:15%]", "train[15%:20%]")),
        ("train", 100, ("train[:-100]", "train[-100:]")),
        ("train[:1000]", 100, ("train[:900]", "train[900:1000]")),
        ("train[:1%]", 0.05, None),
        ("train", 0.001, None),
        ("train[:50]", 100, None),
        ("train+test", 0.1, None),
    ],
)
def test_rows_are_held_out_where_datasets_can_cut(
    split: str, size: float, expected: tuple[str, str] | None
) -> None:
    assert held_out(split, size) == expected


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", None, "is empty"),
        ("# nothing\n", None, "is empty"),
        ("- a\n- b\n", None, "holds no keys"),
        ("a: 1\n\tb: 2\n", 2, "not with tabs"),
        ("a: 1\nb: [1\n", 3, "is not YAML"),
        ("a: 1\nb: 2\na: 3\n", 3, "set twice: in line 1"),
        ("a: {b: 1, b: 2}\n", 1, "set twice"),
        ("a: *other\n", 1, "before its aliases"),
        ("a: &a\n  b: *a\n", 1, "holds itself"),
        ("a: !!python/object/apply:os.system ['true']\n", 1, "makes no objects"),
        ("a: 1\n---\nb: 2\n", None, "several documents"),
        ("? [1, 2]\n: 3\n", 1, "a key is a list"),
        ("a: 1\nb: 2\n", None, "is not a config of axolotl"),
        ("compute_environment: X\ndistributed_type: FSDP\n", None, "accelerate"),
        ("model: x\ntrain_dataset: y\n", None, "v1 engine"),
        (configs.TORCHTUNE, None, "is a config of torchtune, not of axolotl"),
        (configs.LLAMAFACTORY, None, "is a config of LLaMA-Factory, not of axolotl"),
    ],
)
def test_a_file_that_is_no_config_is_refused_at_its_line(
    made: Callable[..., Translation], text: str, line: int | None, words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        made("axolotl", text)
    problem = caught.value.problems[0] if caught.value.problems else None
    assert words in f"{caught.value} {problem and problem.hint}"
    assert (problem.location.line if problem and problem.location else None) == line


def test_aliases_and_merged_tables_are_read(made: Callable[..., Translation], at: Path) -> None:
    Path("c.yaml").write_text("base: &b {x: 1, y: 2}\nall:\n  <<: *b\n  y: 3\nmore: *b\n")
    found = {leaf.name: leaf.value for leaf in read(Path("c.yaml"))}
    assert found == {"base.x": 1, "base.y": 2, "all.x": 1, "all.y": 3, "more.x": 1, "more.y": 2}


def test_aliases_of_aliases_end(at: Path) -> None:
    lines = ["a0: &a0 {x: 1, y: 1}"]
    lines += [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)]
    Path("c.yaml").write_text("\n".join(lines))
    with pytest.raises(RecipeError, match="aliases are written out"):
        read(Path("c.yaml"))


def test_merges_of_merges_end(at: Path) -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)]
    Path("c.yaml").write_text("\n".join(lines))
    with pytest.raises(RecipeError, match="aliases are written out"):
        read(Path("c.yaml"))


SCALARS = [
    *("0x_", "0b_", "!!int", "!!int abc", "!!float", "!!float abc", "!!float 1:2:x", "!!bool abc"),
    *(
        "!!timestamp abc",
        "!!timestamp 2001-99-01",
        r'"\ud800"',
        r'{"\ud800": 1}',
        r'"\U99999999"',
        "[!!int x]",
    ),
    *("9" * 5000, f"[0x{'f' * 6000}]"),
]


@pytest.mark.parametrize("text", SCALARS)
def test_a_scalar_that_is_none_is_told(at: Path, text: str) -> None:
    Path("c.yaml").write_text(f"base_model: x\nrank: {text}\n")
    with pytest.raises(RecipeError) as caught:
        read(Path("c.yaml"))
    [problem] = caught.value.problems
    assert problem.code == "syntax" and "c.yaml" in str(problem.location or problem.message)


@pytest.mark.parametrize(
    ("tool", "key", "value"),
    [
        ("axolotl", "num_epochs", "0"),
        ("llamafactory", "dataset", ".nan"),
        ("llamafactory", "dataset", "x" * 5000),
    ],
)
def test_odd_values_are_no_crash(made: Callable[..., Translation], tool: str, key: str, value: str) -> None:
    tomli.loads(made(tool, re.sub(rf"(?m)^{key}:.*$", f"{key}: {value}", configs.ALL[tool])).text)


@pytest.mark.parametrize("raw", [b"a: \xff\n", b"a: \x00\n", b"x" * (1 << 21)])
def test_bytes_that_are_no_text_are_refused(at: Path, raw: bytes) -> None:
    Path("c.yaml").write_bytes(raw)
    with pytest.raises(RecipeError):
        read(Path("c.yaml"))


def test_values_of_another_type_are_told_at_their_lines(made: Callable[..., Translation]) -> None:
    found = made("axolotl", configs.AXOLOTL.replace("sequence_len: 1024", "sequence_len: long"))
    [remark] = [row for row in found.lost if row.name == "sequence_len"]
    assert remark.line == 17 and "expects a whole number" in remark.text


def test_a_misspelt_key_is_told_with_the_right_one(made: Callable[..., Translation]) -> None:
    found = made("llamafactory", configs.LLAMAFACTORY + "lora_rnak: 4\n")
    [remark] = [row for row in found.lost if row.name == "lora_rnak"]
    assert "did you mean 'lora_rank'?" in remark.text


@pytest.mark.parametrize(
    ("value", "words"),
    [("${nothing}", "is not set"), ("${eval:'1 + 1'}", "computed"), ("${output_dir}", "refers to itself")],
)
def test_references_that_lead_nowhere_are_told(
    made: Callable[..., Translation], value: str, words: str
) -> None:
    found = made("torchtune", configs.TORCHTUNE.replace("output_dir: /tmp/tuned", f"output_dir: {value}"))
    remarks = [row for row in found.lost if row.name == "output_dir"]
    assert remarks and words in remarks[0].text and remarks[0].line == 1


def test_references_of_references_are_bounded(made: Callable[..., Translation]) -> None:
    chain = "".join(f"k{n}: ${{k{n + 1}}}\n" for n in range(100)) + "k100: 1\n"
    found = made("torchtune", configs.TORCHTUNE + chain)
    assert any(row.name == "k0" and "more than 50 references" in row.text for row in found.lost)
    for double in ("${%d}${%d}", "['${%d}', '${%d}']"):
        lines = [f"a{n}: {double.replace('%d', f'a{n - 1}')}\n" for n in range(1, 41)]
        try:
            made("torchtune", configs.TORCHTUNE + "a0: xx\n" + "".join(lines))
        except RecipeError as error:
            assert "references are more than" in str(error)


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("axolotl", "base_model:\nlearning_rate: 1e-4\n"),
        ("llamafactory", "model_name_or_path:\ndataset: x\n"),
        ("torchtune", "optimizer: {_component_: torch.optim.AdamW}\n"),
    ],
)
def test_a_config_that_names_no_model_says_so(at: Path, tool: str, text: str) -> None:
    Path("config.yaml").write_text(text)
    done = run_cli("recipe", f"from-{tool}", "config.yaml", "mine.toml")
    assert done.code == 3 and "no model is named: set weights" in done.stdout
    assert "None" not in Path("mine.toml").read_text()


@pytest.mark.parametrize(
    ("tool", "text", "words"),
    [
        ("llamafactory", "model_name_or_path: x\nexport_dir: y\n", "exports"),
        ("llamafactory", "model_name_or_path: x\ninfer_backend: y\n", "trains on no data set"),
        ("torchtune", "model: {_component_: x}\ntasks: [a]\n", "evaluates"),
        ("torchtune", "model: {_component_: x}\nprompt: {user: a}\n", "generates"),
        ("torchtune", "model: {_component_: x}\nquantizer: {_component_: y}\n", "no optimizer"),
    ],
)
def test_configs_that_train_nothing_are_refused(
    made: Callable[..., Translation], tool: str, text: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        made(tool, text)


@pytest.mark.parametrize("file", ["out.txt", "no/such/folder.toml"])
def test_a_file_that_cannot_be_written_is_refused_first(at: Path, file: str) -> None:
    Path("config.yaml").write_text(configs.AXOLOTL)
    done = run_cli("recipe", "from-axolotl", "config.yaml", file)
    assert done.code in (2, 5) and not done.stdout
    assert run_cli("recipe", "from-axolotl", "missing.yaml", "out.toml").code == 3
    assert not Path("out.toml").exists()


# -------------------------------------------------------------------------------------------------- anything

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3000),
    st.floats(allow_nan=False, width=16),
    st.sampled_from(
        ["", "auto", "cosine", "a/b", "x.jsonl", "lora", "dpo", "\x7f", "${a}", "[", "train[:9%]"]
    ),
    st.lists(st.sampled_from(["q_proj", "lm_head", "", "1"]), max_size=2),
)


@st.composite
def anything(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    tool = draw(st.sampled_from(TOOLS))
    known = [key.replace("*", "0") for key in translate.TOOLS[tool].keys]
    return tool, draw(st.dictionaries(st.sampled_from([*known, "other.key"]), ODD, max_size=12))


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Values by dotted names as tables; a name within another's value is left out."""
    data: dict[str, Any] = {}
    for name, value in values.items():
        table = data
        *above, last = name.split(".")
        for part in above:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                break
        else:
            table.setdefault(last, value)
    return data


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(anything())
def test_every_key_of_any_config_is_accounted_for(tmp_path: Path, drawn: tuple[str, dict[str, Any]]) -> None:
    tool, values = drawn
    base = survey.stand_in(tmp_path / "base")
    start = {
        "axolotl": {"base_model": "x"},
        "llamafactory": {"model_name_or_path": "x", "dataset": "y"},
        "torchtune": {"optimizer": {"_component_": "torch.optim.AdamW"}},
    }[tool]
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(nested(values) | start), encoding="utf-8")
    try:
        found = translate.translate(tool, path, "mine", current(), Asked(str(base)))
    except RecipeError as error:
        assert str(error)
        return
    told = names([*found.lost, *found.changed, *found.idle, *found.unset]) | set(found.moved)
    assert {leaf.name for leaf in read(path)} <= told
    tomli.loads(found.text)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_config_of_the_project_is_accounted_for(tool: str, tmp_path: Path) -> None:
    checkout = os.environ.get(CHECKOUTS[tool])
    if not checkout:
        pytest.skip(f"{CHECKOUTS[tool]} names no checkout of the project")
    rows = list(survey.survey(tool, Path(checkout), survey.stand_in(tmp_path / "base")))
    done = [row for row in rows if row.counts]
    assert len(done) >= 20
    assert sum(not row.invalid for row in done) >= 0.95 * len(done)


@pytest.mark.parametrize(
    ("tool", "line", "name"),
    [
        ("axolotl", "activation_offloading: true\n", "activation_offloading"),
        ("axolotl", "gradient_checkpointing: offload\n", "gradient_checkpointing"),
        ("torchtune", "enable_activation_offloading: true\n", "enable_activation_offloading"),
    ],
)
def test_offloaded_activations_become_a_callback(
    made: Callable[..., Translation], tool: str, line: str, name: str
) -> None:
    text = configs.ALL[tool].replace(f"{name}: true\n", "").replace(f"{name}: false\n", "") + line
    found = made(tool, text)
    data = tomli.loads(found.text)
    assert data["callbacks"] == [{"type": "activation_offload"}] and name in found.moved
    assert "titan-offload" in data["requires"]["plugins"]
    assert "callbacks" not in tomli.loads(made(tool, text.replace(line, "")).text)
