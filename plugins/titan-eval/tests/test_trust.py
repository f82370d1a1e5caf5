"""Files of tasks are data: what they name that would run code is refused before anything runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Titan, titan  # noqa: F401 - a fixture
from titan_eval import LmEval
from titan_eval.trust import METRICS, TRUST, code_of
from titan_testing import recipe
from titancli.errors import EnvironmentProblem

GOOD = """\
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["."], max_gen_toks: 2}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
HOSTILE = {
    "a function": (
        'doc_to_text: "{{text}}"',
        "doc_to_text: !function own.run",
        ":6: !function own.run is code",
    ),
    "a class": ("task: mine", "task: mine\nclass: !function own.Task", ":2: !function own.Task is code"),
    "a filter": (
        "metric_list",
        "filter_list: [{name: x, filter: [{function: custom, filter_fn: !function own.run}]}]\nmetric_list",
        "!function own.run is code",
    ),
    "a Python object": (
        "task: mine",
        "task: !!python/object/apply:os.system [x]",
        "!!python/object/apply:os",
    ),
    "a metric": ("metric: exact_match", "metric: ./evil", "metric: ./evil is a script"),
    "a metric by an alias": (
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
        "metadata: &x {metric: ./evil}\nmetric_list: [{<<: *x}]",
        "metric: ./evil is a script",
    ),
    "evaluate": ("metric: exact_match", "metric: exact_match, hf_evaluate: true", "hf_evaluate: the library"),
    "a reader": ("dataset_path: json", "dataset_path: pandas", "dataset_path: pandas is a reader of data"),
    "a prompt": ("task: mine", "task: mine\nuse_prompt: other.yaml:x", "other.yaml:x is not a prompt"),
    "what it includes": (
        "task: mine",
        "task: mine\ninclude: [other.yaml]",
        "other.yaml:1: !function own.run",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with code that leaves `canary` when something imports it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TRUST, raising=False)
    code = f"open({str(tmp_path / 'canary')!r}, 'w').close()\ndef run(*x, **y): return ''\nclass Task: pass\n"
    for name in ("own.py", "evil/evil.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "other.yaml").write_text("doc_to_text: !function own.run\nprompts: {x: {doc_to_text: a}}\n")
    return tmp_path


def task(folder: Path, old: str = "", new: str = "") -> str:
    assert old in GOOD
    text = GOOD.replace(old, new).replace("DATA", str(folder / "rows.jsonl"))
    (folder / "mine").mkdir(exist_ok=True)
    file = folder / "mine.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_would_run_code_is_refused_by_validate_and_by_the_loop(
    titan: Titan,  # noqa: F811
    folder: Path,
    what: str,
) -> None:
    from titan_eval.loop import load_tasks

    old, new, words = HOSTILE[what]
    file = task(folder, old, new)
    loop = f'[loop]\ntype = "titan-eval/lm_eval"\ntasks = ["{file}"]'
    done = titan("validate", recipe(folder, loop), "--unset", "dataset")
    assert done.code == 3 and words in done.err and f"{TRUST}=1" in done.err, done
    with pytest.raises(EnvironmentProblem) as caught:
        load_tasks(LmEval(tasks=[file]))
    assert words in caught.value.message
    assert not (folder / "canary").exists()


def test_the_files_of_a_folder_are_looked_at_and_those_of_the_harness_are_its_own(folder: Path) -> None:
    import lm_eval

    file = Path(task(folder, *HOSTILE["a function"][:2]))
    assert [key for key, _ in code_of(["mine"], [folder])] == ["include_path.0"] * 2
    file.rename(folder / "mine.txt")  # the harness takes a file of any name
    assert [key for key, _ in code_of([str(folder / "mine.txt")], [])] == ["tasks.0"]
    (own,) = (Path(lm_eval.__file__).parent / "tasks").glob("gsm8k_platinum/gsm8k-platinum.yaml")
    assert list(code_of([str(own)], [own.parent])) == []


@pytest.mark.parametrize("text", ["", "- 1", "a: &a [*a]", "a: b: c", "include: 1", "include: [gone.yaml]"])
def test_odd_files_are_no_crash(folder: Path, text: str) -> None:
    (folder / "odd.yaml").write_text(text)
    assert all(key == "tasks.0" for key, _ in code_of(["odd.yaml"], []))


def test_a_template_is_rendered_in_a_sandbox(folder: Path) -> None:
    from titan_eval.loop import load_tasks

    attack = "{{ cycler.__init__.__globals__.os.system('touch canary') }}"
    with pytest.raises(EnvironmentProblem, match="SecurityError"):
        load_tasks(LmEval(tasks=[task(folder, 'doc_to_text: "{{text}}"', f'doc_to_text: "{attack}"')]))
    assert not (folder / "canary").exists()
    (found,) = load_tasks(LmEval(tasks=[task(folder)]))["tasks"].values()
    assert found.doc_to_text({"text": "b"}) == "b"


def test_a_person_may_trust_a_file_and_a_recipe_may_not_say_so(
    titan: Titan,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from titan_eval.loop import load_tasks

    file = task(folder, *HOSTILE["a function"][:2])
    loop = f'[loop]\ntype = "titan-eval/lm_eval"\ntasks = ["{file}"]'
    done = titan("validate", recipe(folder, loop), "--unset", "dataset", f"env.{TRUST}='1'")
    assert done.code == 3 and f"a recipe cannot set {TRUST}" in done.err and "is code" in done.err
    monkeypatch.setenv(TRUST, "1")
    assert titan("validate", recipe(folder, loop), "--unset", "dataset").code == 0
    assert not (folder / "canary").exists()  # even then nothing runs before the run
    load_tasks(LmEval(tasks=[file]))
    assert (folder / "canary").exists()


def test_the_metrics_are_those_of_the_harness() -> None:
    import lm_eval.api.metrics  # noqa: F401 - registers them
    from lm_eval.api.registry import metric_registry

    assert sorted(metric_registry) == METRICS


MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
LARGE = {"deep": "a: " + "[" * 100_000, "deep blocks": "- " * 100_000, "merges": MERGES}


@pytest.mark.parametrize("name", LARGE)
def test_a_small_file_that_expands(tmp_path: Path, name: str) -> None:
    """The composer of libyaml ended the process at the first two."""
    (tmp_path / "x.yaml").write_text(LARGE[name])
    [(key, why)] = code_of([str(tmp_path / "x.yaml")], [])
    assert key == "tasks.0" and "x.yaml cannot be read: it " in why
