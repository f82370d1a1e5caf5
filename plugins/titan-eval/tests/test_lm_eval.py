"""titan-eval: the real harness on the live engine gives what it gives on the exported checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.ranks import Ranks
from tests.run.conftest import Finished, furnish, here, on_pool, train_here  # noqa: F401 - fixtures
from titan_eval.lm import TitanLM
from titan_testing import check_plugin
from titancli import registry
from titancli.cli import main
from titancli.engine import Engine
from titancli.errors import TitanError
from titancli.registry.component import build

LENGTH = 32
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
{rest}
"""
TASKS = {
    "sums": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}, and more text than there is room for in one row"
metric_list: [{metric: bits_per_byte}]
""",
    "writing": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
}


def test_the_plugin_is_sound() -> None:
    check_plugin("titan-eval")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run `r` of a byte-level tokenizer, its export `hf`, and tasks."""
    folder = furnish(tmp_path_factory.mktemp("made"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(["<|end|>"])
    (folder / "tok").mkdir()
    tokens.save(str(folder / "tok/tokenizer.json"))
    config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tok/tokenizer_config.json").write_text(json.dumps(config))
    rows = [
        {"question": f"{a} plus {b} is ", "choices": [str(a + b), "line", "a text" * (a + 1)]}
        for a in range(3)
        for b in range(3)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, rest in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, rest=rest))
    before = Path.cwd()
    os.chdir(folder)
    try:
        small = ("model.vocab_size=258", 'tokenizer={type="hf", path="tok"}', f"training.seq_len={LENGTH}")
        assert train_here("tiny.toml", "--run-dir", "r", *small, "training.steps=2") == 0
        assert main(["convert-checkpoint", "r", "hf", "--to", "hf"]) == 0
    finally:
        os.chdir(before)
    return folder


def answers(lm: Any, folder: Path, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the answer to each request, by task: log-likelihoods, or a text."""
    tasks = TaskManager(include_defaults=False).load([str(folder / f"{name}.yaml") for name in names])
    for task in tasks["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
    found = evaluate(lm, tasks, bootstrap_iters=0)
    assert found is not None
    return {name: [[r[0] for r in s["resps"]] for s in found["samples"][name]] for name in names}


def on_engine(mesh: dict[str, int], folder: Path, names: tuple[str, ...], rows: int) -> Any:
    overrides = [f"mesh.{name}={degree}" for name, degree in mesh.items()]
    with Engine.frozen(folder / "r", overrides) as engine:
        from titancli.recipe import load_recipe

        lm = TitanLM(engine, build(load_recipe(folder / "r").recipe.tokenizer), batch_size=rows)
        try:
            return answers(lm, folder, names)
        except TitanError as error:
            return str(error)


SCORED = ("sums", "rolling")


@pytest.mark.ranks
def test_each_log_likelihood_is_that_of_the_harness_on_the_export(ranks: Ranks, made: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    hf = HFLM(pretrained=str(made / "hf"), device="cpu", dtype="float32", max_length=LENGTH, batch_size=4)
    expected = answers(hf, made, (*SCORED, "writing"))
    assert len({value for row in expected["sums"] for value, _ in row}) > 20
    layouts: list[tuple[int, dict[str, int], tuple[str, ...]]] = [
        (1, {}, (*SCORED, "writing")),
        (2, {"dp_shard": 2}, (*SCORED, "writing")),
        (2, {"tp": 2}, (*SCORED, "writing")),
        (2, {"pp": 2}, SCORED),
    ]
    for count, mesh, names in layouts:
        for found in ranks(count, on_engine, mesh, made, names, 4):
            for name in names:
                for own, theirs in zip(found[name], expected[name], strict=True):
                    if name == "writing":
                        assert own == theirs, mesh
                        continue
                    if name == "rolling":
                        assert own == pytest.approx(theirs, abs=1e-4, rel=1e-6), mesh
                        continue
                    assert [greedy for _, greedy in own] == [greedy for _, greedy in theirs], mesh
                    values = [value for value, _ in theirs]
                    assert [value for value, _ in own] == pytest.approx(values, abs=1e-5, rel=1e-6), mesh
    for told in ranks(2, on_engine, {"pp": 2}, made, ("writing",), 4):
        assert "mesh.pp" in told


@pytest.fixture
def lm_eval(made: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Callable[..., Finished]:
    """`titan lm-eval ...` inside this process."""
    monkeypatch.chdir(made)

    def run(*arguments: str) -> Finished:
        try:
            return Finished(main(["lm-eval", *arguments]), *capfd.readouterr())
        finally:
            registry.configure()

    return run


@pytest.mark.ranks
def test_the_command_writes_scores_and_answers_beside_the_checkpoint(
    lm_eval: Callable[..., Finished], made: Path, ranks: Ranks
) -> None:
    done = lm_eval("r", "--tasks", "sums.yaml,rolling.yaml", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert (document["schema"], document["step"]) == ("titan.evaluation", 2)
    sums, rolling = document["evaluations"]
    assert sums["name"] == "lm_eval-sums" and 0 <= sums["metrics"]["acc"] <= 1
    kept = json.loads((made / "r/evaluations/step-2/lm_eval-sums.json").read_text())
    assert kept["metrics"] == sums["metrics"] and kept["schema"] == "titan.evaluation"
    lines = (made / "r/evaluations/step-2/lm_eval-sums.jsonl").read_text().splitlines()
    assert len(lines) == 9 and json.loads(lines[0])["doc"]["question"] == "0 plus 0 is "
    done = lm_eval("hf", "--tasks", "rolling", "--include-path", ".", f"training.seq_len={LENGTH}", "--json")
    assert done.code == 0, done.err
    [again] = json.loads(done.out)["evaluations"]
    assert again["file"] is None
    assert again["metrics"]["bits_per_byte"] == pytest.approx(rolling["metrics"]["bits_per_byte"], rel=1e-6)
    done = lm_eval("r", "--tasks", "sums.yaml", "--limit", "3", "--json", *on_pool(ranks, 2))
    assert done.code == 0, done.err
    assert len((made / "r/evaluations/step-2/lm_eval-sums.jsonl").read_text().splitlines()) == 3


def test_scores_that_are_not_finite_are_text(
    lm_eval: Callable[..., Finished], made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [{"resps": [[float("-inf"), False]]}]
    found = {"results": {"x": {"acc,none": float("nan")}}, "n-shot": {"x": 0}, "samples": {"x": samples}}
    monkeypatch.setattr("titan_eval.command.launch", lambda *given, **named: (0, found))
    done = lm_eval("r", "--tasks", "sums.yaml", "--json")
    assert done.code == 0, done.err
    [row] = json.loads(done.out, parse_constant=pytest.fail)["evaluations"]
    assert row["metrics"] == {"acc": "NaN"}
    lines = (made / "r/evaluations/step-2/lm_eval-x.jsonl").read_text()
    assert json.loads(lines, parse_constant=pytest.fail) == {"resps": [["-Infinity", False]]}


def test_what_cannot_be_evaluated_is_refused_by_name(lm_eval: Callable[..., Finished]) -> None:
    cases: dict[tuple[str, ...], tuple[int, str]] = {
        ("r", "--tasks", "gone.yaml"): (2, "--tasks: gone.yaml does not exist"),
        ("r", "--tasks", ","): (2, "--tasks: no task is named"),
        ("r", "r", "--tasks", "x"): (2, "takes one run, checkpoint or folder, not r and r"),
        ("nowhere", "--tasks", "sums.yaml"): (5, "nowhere does not exist"),
        ("r", "--tasks", "nosuch", "--include-path", "."): (5, "the tasks nosuch cannot be loaded: "),
        ("r", "--tasks", "sums.yaml", "loop.add_bos=true"): (1, "add_bos: the tokenizer has no BOS token"),
        ("r", "--tasks", "writing.yaml", "training.seq_len=4"): (
            1,
            "the task asks for 5 new tokens, but rows",
        ),
    }
    for arguments, (code, words) in cases.items():
        done = lm_eval(*arguments)
        assert done.code == code and words in done.err, (arguments, done)
