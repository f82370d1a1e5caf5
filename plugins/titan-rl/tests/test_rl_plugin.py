"""The plugin is sound by the kit's rules; without it, what needs it says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_testing import check_plugin, run_cli
from titancli import registry


@pytest.fixture(autouse=True)
def all_plugins_again() -> Iterator[None]:
    """Plugins that a command has blocked are blocked in this process."""
    yield
    registry.configure()


def test_the_plugin_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(64)))
    check_plugin(
        "titan-rl",
        configs={
            "task/prompts": {"path": str(path)},
            "reward/regex": {"pattern": "a"},
            "reward/json_schema": {"schema": {"type": "object"}},
            "reward/length": {"free": 1, "limit": 4},
        },
        seq_len=48,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("validate", "grpo_digit"), "titan-rl"),
        (("validate", "llama3_debug", "loop=grpo"), "loop 'grpo' comes with titan-rl"),
        (("validate", "llama3_debug", "loss=cispo"), "loss 'cispo' comes with titan-rl"),
        (("rollouts", "."), "titan rollouts comes with titan-rl"),
        (("recipe", "new", "a.toml", "--from-hf", "hf", "--grpo", "q.jsonl"), "titan-rl"),
    ],
)
def test_without_it_what_needs_it_names_it(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.jsonl").write_text('{"prompt": "3 + 4?", "answer": "7"}\n')
    Path("hf").mkdir()
    Path("hf/config.json").write_text('{"model_type": "llama"}')
    Path("hf/tokenizer.json").write_text("{}")
    done = run_cli(*arguments, "-p", "no:titan-rl", cwd=tmp_path)
    assert done.code in (3, 4) and said in done.stderr + done.stdout
    assert not Path("a.toml").exists()
