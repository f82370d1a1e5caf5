"""What each field of a recipe that takes text may name; and that a check starts nothing, whatever it says.

A new field of this kind stands in CLASSES, or a test fails: say what its value may name, and if it is more
than text, what must be refused.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EVERYTHING = ["*"]
CLASSES: dict[str, tuple[list[str], str]] = {
    # what is shown, compared or handed on, and means nothing else
    "text": (
        [],
        """
        callback/titan/best.metric callback/titan/early_stop.metric
        description tokenizer/titan/hf.eos dataset/titan/*.fim.* dataset/titan*.name dataset/titan*.revision
        dataset/titan*.split dataset/titan/*.text dataset/titan*.fields dataset/titan*.roles
        logger/titan-trackio/* logger/titan-wandb/* task/titan-rl/prompts.name
        task/titan-rl/prompts.revision task/titan-rl/prompts.split
        task/titan-rl/prompts.prompt task/titan-rl/prompts.answer task/titan-rl/prompts.system
        generator/titan/local.stop loop/titan-eval/lm_eval.system_instruction reward/titan-rl/numeric.after
        loss/titan-heads/classification.classes dataset/titan-heads/labelled.classes
        """,
    ),
    # a name, a glob or a regular expression that names or texts are matched with
    "pattern": (
        [],
        """
        callback/titan-proof/probe.layers
        converter/titan-float8/*.skip converter/titan/lora.targets
        converter/titan-qlora/qlora.skip converter/titan-qlora/qlora.targets
        optimizer/titan-optimizers/by_name.groups.*
        optimizer/titan-muon/muon.exclude checkpoint.exclude_from_loading
        optimizer/titan/adamw.no_decay reward/titan-rl/regex.pattern pipeline.module_fqns_per_model_part
        """,
    ),
    # files that are read as data when the run starts, or a repository on the Hub of which data alone is read
    "path": (
        [],
        """
        weights tokenizer/titan/hf.path dataset/titan-flux/* dataset/titan-grain/* dataset/titan/*.path
        dataset/titan-preference/*.path
        dataset/titan/*.paths dataset/titan-heads/*.path reward/titan-heads/reward_model.checkpoint
        loop/titan-eval/lm_eval.checkpoint loop/titan/evaluate.checkpoint
        loop/titan-distil/*.teacher.*
        task/titan-rl/prompts.path model/titan-transformers/hf_causal_lm.config
        """,
    ),
    # a folder in memory that is written into
    "folder": ([], "copies/titan-peers/peers.folder"),
    # a store or a server
    "url": (["", "../../x", "a/b", "$(touch CANARY)"], "checkpoint.remote"),
    # the name of a repository on the Hub
    "repository": (["../../x", "/tmp/x", "$(touch CANARY)", "http://127.0.0.1:9/x"], "assets"),
    # the name of a file or folder in the run folder, or the beginning of it
    "name": (
        ["../../x", "/tmp/x", "a/b", "{}", "$(touch CANARY)", "\x1b]0;x\x07"],
        "name profiling.save_* logger/titan/csv.file validation.datasets callback/titan-optimizers/ema.name",
    ),
    # one of a few words or names
    "member": (
        ["canary_module:run", "$(touch CANARY)", "../../x"],
        """
        activation_checkpoint.selective_ac_option checkpoint.model_differs
        requires.titan requires.plugins dataset/titan/concat.datasets dataset/titan/mix.datasets
        dataset/titan/mix.weights dataset/titan/mix.stages.0.weights
        """,
    ),
    # what torch, or a package that is installed, has registered under this name
    "installed": ([], "compile.backend"),
    # words for a scheduler
    "words": (["a\n#SBATCH --wrap=x", "", "\x1b]0;x\x07"], "launcher/titan-slurm/slurm.[paqt]*"),
    # tables whose keys are on a list of what chooses neither code nor a program nor a file
    "listed": (EVERYTHING, "env launcher/titan-slurm/slurm.sbatch"),
    # settings of sections that choose neither code nor a program nor a file
    "settings": (EVERYTHING, "callback/titan-proof/probe.overrides"),
    # tasks of the harness, and files of them, which are data
    "tasks": (["evil.yaml", "./evil.yaml"], "loop/titan-eval/lm_eval.tasks"),
    # folders of such files
    "task folders": (["."], "loop/titan-eval/lm_eval.include_path"),
    # a JSON Schema that refers to no other document
    "schema": ([], "reward/titan-rl/json_schema.schema"),
}
"""For each class the values that `validate` refuses, and the fields."""


def class_of(name: str) -> list[str]:
    """The classes of a field: one, if it is listed."""
    return [
        cls for cls, (_, fields) in CLASSES.items() if any(fnmatch(name, field) for field in fields.split())
    ]


class Payload:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch CANARY",)


VALUES = [
    "$(touch CANARY)", "`touch CANARY`", "canary_module:run", "canary_module.py",
    "!function canary_module.run", "evil.yaml", "./evil.yaml", "./canary.pkl", "canary.pt", "python://canary_module",
    "reference::file://canary.pkl",
    "http://127.0.0.1:9/x", "hf://owner/canary", "$HOME/${HOME}", "{0.__class__.__init__.__globals__}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}", "__import__('os').system('touch CANARY')",
    "../../x", "/tmp/x", "a/b", "{}", "", ".", "a\n#SBATCH --wrap=x", "\x1b]0;x\x07",
]  # fmt: skip


def try_fields(folder: Path, values: list[str], **env: str) -> dict[str, Any]:
    """What a process finds that loads a recipe with each of the values in each field."""
    (folder / "values.json").write_text(json.dumps(values))
    home = {"HOME": str(folder / "canary-home"), "PYTHONDONTWRITEBYTECODE": "1"}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), **home, **env}
    command = [sys.executable, "-m", "tests.security.try_fields", str(folder)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tried")
    (folder / "canary_module.py").write_text("open('CANARY', 'w').close()\ndef run(*x): return x\n")
    (folder / "evil.yaml").write_text("task: x\ndoc_to_text: !function canary_module.run\n")
    for name in ("canary.pkl", "canary.pt"):
        (folder / name).write_bytes(pickle.dumps(Payload()))
    return folder


@pytest.fixture(scope="module")
def tried(folder: Path) -> dict[str, Any]:
    return try_fields(folder, VALUES)


def test_each_field_that_takes_text_has_one_class(tried: dict[str, Any]) -> None:
    assert {name: class_of(name) for name in tried if len(class_of(name)) != 1} == {}
    idle = [field for _, fields in CLASSES.values() for field in fields.split() if not any_of(tried, field)]
    assert idle == []


def any_of(tried: dict[str, Any], field: str) -> bool:
    return any(fnmatch(name, field) for name in tried)


def test_checking_a_recipe_starts_nothing(folder: Path, tried: dict[str, Any]) -> None:
    assert {name: row["base"] for name, row in tried.items() if row["base"]} == {}  # or less would be checked
    assert {name: row["events"] for name, row in tried.items() if row["events"]} == {}
    assert not list(folder.rglob("CANARY"))


def test_no_variable_is_filled_in(tried: dict[str, Any]) -> None:
    assert [(name, value) for name, row in tried.items() for value, home in row["taken"] if home] == []


def test_what_a_class_may_not_name_is_refused(tried: dict[str, Any]) -> None:
    wrong = [
        (name, value)
        for name, row in tried.items()
        for value, _ in row["taken"]
        if {"*", value} & set(CLASSES[class_of(name)[0]][0])
    ]
    assert wrong == []


RUNS = '''
import os
from titancli import component, hookimpl


@component("loss", "runs", target="runs:Runs")
class Runs:
    """A component whose check does what its value says."""

    text: str = ""

    def check(self, recipe):
        os.system(self.text.removeprefix("$(").removesuffix(")"))
        os.path.expandvars(self.text)
        return ()


@hookimpl
def titan_components():
    return [Runs]
'''


def test_a_field_that_starts_something_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "runs.py").write_text(RUNS)
    info = tmp_path / "runs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: runs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[titancli]\nruns = runs\n")
    row = try_fields(tmp_path, ["$(touch CANARY)"], TITAN_PLUGINS="runs")["loss/runs/runs.text"]
    assert any(event.startswith("os.system") for event in row["events"])
    assert (tmp_path / "CANARY").exists() and class_of("loss/runs/runs.text") == []
