"""All rows of several datasets: each once in an epoch, from any place, on any ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.data.helpers import global_rows, make
from titancli.data import Chat, Concat, HFDataset, JsonLines, TextFiles
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols.batch import IGNORE
from titancli.recipe import load_recipe
from titancli.worker.epochs import steps_of

SIZES = {"many": 23, "few": 5, "one": 1}


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Chat]:
    """Conversations, one a row, told apart by what they say."""
    for name, count in SIZES.items():
        talks = [
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{name} {number}"}]
            for number in range(count)
        ]
        lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    return {name: Chat(path=str(tmp_path / f"{name}.jsonl"), pack=False) for name in SIZES}


def answers(rows: list[tuple[list[int], list[int]]]) -> list[str]:
    """Return the answer of each row, and nothing for a row that fills up."""
    return [bytes(t for t in targets if t not in (IGNORE, 256)).decode() for _, targets in rows]


EVERYTHING = Counter(f"{name} {number}" for name, count in SIZES.items() for number in range(count))


def test_each_row_once_in_each_epoch(parts: dict[str, Chat]) -> None:
    rows, state = global_rows(Concat(datasets=parts), 29 * 3, dp_size=1, rows=1, seq_len=64)
    said = answers(rows)
    for epoch in range(3):
        assert Counter(said[29 * epoch : 29 * (epoch + 1)]) == EVERYTHING
    assert said[:29] != said[29:58], "shuffled anew"
    for size in range(1, 30):
        assert abs(sum(one.startswith("few") for one in said[:size]) - size * 5 / 29) < 2, "mixed evenly"
    assert state["epoch"] == 2


@pytest.mark.parametrize("cut", [1, 4, 7, 8, 12])
def test_any_place_and_other_ranks(parts: dict[str, Chat], cut: int) -> None:
    config = Concat(datasets=parts)
    whole, _ = global_rows(config, 20, dp_size=2, rows=2, seq_len=64)
    first, state = global_rows(config, cut, dp_size=2, rows=2, seq_len=64)
    rest, _ = global_rows(
        config, 80 - 4 * cut, dp_size=1, rows=1, seq_len=64, state=json.loads(json.dumps(state))
    )
    assert first + rest == whole


def test_skipped_rows_are_those_that_would_come(parts: dict[str, Chat]) -> None:
    config = Concat(datasets=parts)
    whole, _ = global_rows(config, 60, dp_size=1, rows=1, seq_len=64)
    dataset = make(config, rows=1, seq_len=64)
    assert dataset.skip(33) == 33
    assert global_rows(config, 27, dp_size=1, rows=1, seq_len=64, state=dataset.state_dict())[0] == whole[33:]


def test_without_repeat_it_ends_after_an_epoch(parts: dict[str, Chat]) -> None:
    rows, _ = global_rows(Concat(datasets=parts, repeat=False), 99, dp_size=2, rows=3, seq_len=64)
    assert len(rows) == 30 and Counter(answers(rows)) == EVERYTHING + Counter([""])


def test_epochs_of_text(tmp_path: Path) -> None:
    """Each token is a target as often as there are epochs, but for the very first."""
    (tmp_path / "a.txt").write_text("a" * 1000)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": "b" * (5 + n)}) + "\n" for n in range(40)))
    texts = {"a": TextFiles(paths=[tmp_path / "a.txt"]), "b": JsonLines(paths=[tmp_path / "b.jsonl"])}
    dataset = make(Concat(datasets=texts), rows=2, seq_len=16)
    assert dataset.rows_left(3) == sum(make(one, rows=1, seq_len=16).rows_left(3) for one in texts.values())
    dataset.end_after(3)
    targets = Counter(int(t) for batch in dataset for t in batch["targets"].flatten() if t != IGNORE)
    assert targets[ord("a")] == 3 * 1000 - 1
    assert targets[ord("b")] == 3 * sum(5 + n for n in range(40)) - 1
    assert dataset.rows_left(3) == 0


def test_steps_of_epochs(parts: dict[str, Chat], tmp_path: Path) -> None:
    tables = "".join(
        f'[dataset.datasets.{name}]\ntype = "chat"\npath = "{part.path}"\npack = false\n'
        for name, part in parts.items()
    )
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'extends = "titan:sft_debug"\n[dataset]\ntype = "concat"\n'
        + tables
        + "[training]\nepochs = 2\nlocal_batch_size = 4\nseq_len = 64\n"
    )
    loaded = load_recipe(recipe, unset=["training.steps", "training.global_batch_size"]).recipe
    assert steps_of(loaded, 1) == 15  # 58 rows


def test_what_has_no_epochs_is_refused(parts: dict[str, Chat], tmp_path: Path) -> None:
    def problems(part: str) -> str:
        recipe = tmp_path / "r.toml"
        recipe.write_text(
            'extends = "titan:llama3_debug"\n[dataset]\ntype = "concat"\n[dataset.datasets.a]\n' + part
        )
        with pytest.raises(RecipeError) as told:
            load_recipe(recipe)
        return " ".join(problem.message for problem in told.value.problems)

    assert "no known length" in problems('type = "hf"\npath = "a/b"\nstreaming = true\n')
    assert "set dataset.repeat instead" in problems('type = "python_stdlib"\nrepeat = false\n')
    nested = 'type = "mix"\nweights = { b = 1 }\n[dataset.datasets.a.datasets.b]\ntype = "python_stdlib"\n'
    assert "made of datasets itself" in problems(nested)
    assert HFDataset(path="a/b", streaming=True).uncountable


def test_other_data_is_refused_on_resume(parts: dict[str, Chat]) -> None:
    _, state = global_rows(Concat(datasets=parts), 4, dp_size=1, rows=1, seq_len=64)
    fewer = Concat(datasets={name: parts[name] for name in ("many", "few")})
    with pytest.raises(EnvironmentProblem, match="dataset concat"):
        make(fewer, rows=1, seq_len=64).load_state_dict(state)
    with pytest.raises(EnvironmentProblem, match=r"datasets\.one"):
        other = {**parts, "one": parts["few"]}
        make(Concat(datasets=other), rows=1, seq_len=64).load_state_dict(state)
