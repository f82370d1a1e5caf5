"""Each recipe for fine-tuning, made small as its debug twin says: it trains, resumes, and exports."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rows import rows
from tests.run.conftest import Finished, in_this_process
from titancli.observe.events import read_events
from titancli.recipe import bundled_folder

pytestmark = pytest.mark.e2e

PLUGINS = Path(__file__).parents[2] / "plugins"
OF_PLUGINS = {"distil": "titan-distil", "qlora": "titan-qlora"}
FILES = [
    *(bundled_folder() / "finetune").glob("*.toml"),
    *(file for name in OF_PLUGINS.values() for file in PLUGINS.glob(f"{name}/*/recipes/*.toml")),
]
BY_NAME = {file.stem: file for file in sorted(FILES)}
TWINS = [name for name in BY_NAME if name.endswith("_debug")]
REAL = [name for name in BY_NAME if name not in TWINS]
QUICK = (
    *("sft_qwen3_8b", "lora_gpt_oss_20b", "dpo_llama3_3b", "grpo_qwen3_8b", "distil_qwen3_0.6b"),
    "qlora_gpt_oss_20b",
)
"""One of each method, and of most families."""
SMALLER = ("model.n_layers=2", "training.seq_len=64")
Titan = Callable[..., Finished]


@pytest.fixture
def titan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Titan:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITAN_RUNS", raising=False)
    return in_this_process(capfd)


def needs_its_plugin(name: str) -> None:
    if (plugin := OF_PLUGINS.get(name.partition("_")[0])) is not None:
        pytest.importorskip(plugin.replace("-", "_"))


def commands(twin: Path) -> list[list[str]]:
    """The words of the commands that a twin names: for what it starts from, and for itself."""
    return [shlex.split(line) for line in re.findall(r"^# titan (.*)$", twin.read_text(), re.MULTILINE)]


def twin_of(name: str) -> Path:
    method, model = name.split("_", 1)
    return BY_NAME[f"{method}_{model.rpartition('_')[0]}_debug"]


def goes_on_and_exports(titan: Titan, steps: int) -> None:
    done = titan("train", "run", "--resume", f"training.steps={steps}")
    assert done.code == 0, done.err
    ended = [event for event in read_events(Path("run/events.jsonl")) if event["event"] == "step"]
    assert [event["step"] for event in ended] == [*range(1, steps + 1)]
    assert all(math.isfinite(event["metrics"]["loss"]) for event in ended)
    assert Path(f"run/exports/step-{steps}-hf/config.json").is_file()


@pytest.mark.parametrize("name", rows(REAL, slow=set(REAL) - set(QUICK)))
def test_a_recipe_made_small_trains_resumes_and_exports(titan: Titan, name: str) -> None:
    needs_its_plugin(name)
    twin = twin_of(name)
    text = re.sub(r'^extends = ".*"', f'extends = "{BY_NAME[name]}"', twin.read_text(), flags=re.MULTILINE)
    Path("twin.toml").write_text(text.replace("recipe:", f"{twin.parent}/"))
    begin, _ = commands(twin)
    smaller = [*SMALLER, *(["loop.teacher.model.n_layers=2"] if name.startswith("distil") else [])]
    if name.startswith("grpo"):
        smaller[1:] = ["training.seq_len=512", "loop.samples=2", "loop.generator.max_new_tokens=4"]
    done = titan(*begin, *SMALLER, "training.local_batch_size=1")
    assert done.code == 0, done.err
    done = titan("train", "twin.toml", *smaller, "training.steps=1", "--run-dir", "run")
    assert done.code == 0, done.err
    goes_on_and_exports(titan, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_runs_by_the_commands_in_it(titan: Titan, name: str) -> None:
    needs_its_plugin(name)
    begin, own = commands(BY_NAME[name])
    assert own[1].rpartition(":")[2] == name
    for words in (begin, [*own, "--run-dir", "run"]):
        done = titan(*words)
        assert done.code == 0, done.err
    goes_on_and_exports(titan, 3 if name.startswith("grpo") else 11)
