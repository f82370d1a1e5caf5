"""docs/interfaces.md says what is so: exit codes, and the keys of every JSON document."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import titancli
from tests import absent
from tests.checkpoint.tensors import save
from tests.cli.run_folders import attempt, began, ended, event, make, step
from tests.run.conftest import trained
from titancli.cli import main
from titancli.errors import ExitCode
from titancli.observe import events

TEXT = (Path(__file__).parents[2] / "docs" / "interfaces.md").read_text(encoding="utf-8")
DOCUMENTS = dict(re.findall(r"### titan\.([\w-]+)\n(.*?)(?=\n###? |\Z)", TEXT, re.DOTALL))
LATER = {"generation", "replay", "profile", "evaluation", "proof", "job", "cancelled-job"}
"""Need a trained model, a run under way, or Slurm; their own tests read them."""


def test_every_exit_code_is_told() -> None:
    told = re.findall(r"^\| (\d+) \| `([A-Z]+)` \|", TEXT, re.MULTILINE)
    assert told == [(str(code.value), code.name) for code in ExitCode]


def test_every_document_is_told() -> None:
    own = Path(titancli.__file__).parent
    files = [*own.rglob("*.py"), *(own.parent / "plugins").glob("*/titan_*/**/*.py")]
    sources = "".join(file.read_text() for file in files)
    printed = set(re.findall(r'print_json\(\s*"([\w-]+)"', sources))
    assert printed <= set(DOCUMENTS) if absent.ABSENT else printed == set(DOCUMENTS)


def test_every_event_is_told() -> None:
    section = TEXT.partition("## Events")[2]
    written = set(re.findall(r'\.write\(\s*"(\w+)"', Path(events.__file__).read_text()))
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == written


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name not in LATER])
def test_a_document_has_the_keys_that_are_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    body = DOCUMENTS[name]
    (command,) = re.findall(r"^`titan (.*)`$", body, re.MULTILINE)
    absent.need_command(command)
    told = {
        key for row in re.findall(r"^\| (`.*?) \|", body, re.MULTILINE) for key in re.findall("`(.*?)`", row)
    }
    if name in ("checkpoints", "checkpoint", "verification"):
        save(tmp_path / "RUN" / "checkpoints" / "step-500")
    if name == "rollouts":
        write_rollouts(tmp_path / "RUN")
    if name in ("runs", "run", "removed-runs", "logs"):
        folder = make(tmp_path / "RUN", [began(), step(5, 5)], [attempt(ended("failed", 5))])
        (folder / "logs" / "rank-0.log").touch()
    if name in ("comparison", "report", "reproduction", "reproduction-files", "bisection"):
        told_of = [
            event("checkpoint", 5, step=5, path="step-5"),
            event("log", 5, level="warning", message="x"),
        ]
        make(tmp_path / "RUN", [began(), step(5, 5), *told_of])
        make(tmp_path / "OTHER", [began(), step(5, 6)], [], lock="[training]\nsteps = 7\n")
    if name == "extension":
        trained(tmp_path, "--run-dir", "RUN", "training.steps=2")
        capsys.readouterr()
    if name in ("tokenization", "token-shards", "document", "shard-verification"):
        (tmp_path / "CORPUS").mkdir()
        (tmp_path / "CORPUS" / "a.txt").write_text("a text")
    if name in ("token-shards", "document", "shard-verification"):
        main(["data", "tokenize", "CORPUS", "OUT", "--tokenizer", "byte", "--workers", "1"])
        capsys.readouterr()
    main(shlex.split(command))
    document = json.loads(capsys.readouterr().out)
    assert (document.pop("schema"), document.pop("version")) == (f"titan.{name}", 1)
    for key in keys(document):
        assert any(key == known or key.startswith(f"{known}.") for known in told), f"{key} is not told"
    roots = {re.split(r"[.\[]", key)[0] for key in told}
    assert roots == set(document)


def write_rollouts(run: Path) -> None:
    sample = {"text": "5", "tokens": 1, "finish": "eos", "reward": 1.0, "rewards": {"exact_match": 1.0}}
    sample |= {"failed": {}, "counted": True, "advantage": 0.5}
    (run / "rollouts").mkdir(parents=True)
    (run / "recipe.lock.toml").touch()
    row = {"step": 7, "prompt": "2+3=", "answer": "5", "samples": [sample]}
    (run / "rollouts" / "step-7.jsonl").write_text(json.dumps(row) + "\n")


def keys(value: Any, at: str = "") -> Iterator[str]:
    """The dotted keys of everything in a document that is no table and no array of tables."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from keys(below, f"{at}.{key}" if at else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for below in value:
            yield from keys(below, f"{at}[]")
    elif value not in ([], {}):
        yield at


def test_the_problems_of_a_recipe_have_the_keys_that_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "llama3_debug", "training.stepz=1", "--format", "json"]) == 3
    (problem,) = json.loads(capsys.readouterr().out)["recipes"][0]["problems"]
    told = set(re.findall(r"`recipes\[\]\.problems\[\]\.(\w+)`", DOCUMENTS["validation"]))
    assert set(problem) == told
