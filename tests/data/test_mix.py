"""Mixtures: shares are exact, rows are those of the datasets alone, and any position leads back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.helpers import global_rows, make, rows_of
from titancli.cli import main
from titancli.data import Chat, JsonLines, Mix, MixStage, TextFiles, TokenShards
from titancli.data.mix import _Source
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.observe.metrics import collector
from titancli.protocols.batch import IGNORE, Batch


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Any]:
    """Three datasets, told apart by their letters."""
    (tmp_path / "a.txt").write_text("a" * 3001)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": "b" * (5 + n)}) + "\n" for n in range(40)))
    (tmp_path / "c.bin").write_bytes(b"c" * 2000)
    return {
        "a": TextFiles(paths=[tmp_path / "a.txt"]),
        "b": JsonLines(paths=[tmp_path / "b.jsonl"]),
        "c": TokenShards(paths=[tmp_path / "c.bin"], format="raw", dtype="uint8"),
    }


def letters(rows: list[tuple[list[int], list[int]]]) -> str:
    """Which dataset each row is from; `-` for a row that fills up."""
    return "".join(
        "-" if set(targets) == {IGNORE} else next(chr(t) for t in tokens if t < 256)
        for tokens, targets in rows
    )


def test_shares_are_exact_to_a_row_and_rows_are_those_of_the_datasets(parts: dict[str, Any]) -> None:
    config = Mix(datasets=parts, weights={"a": 5, "b": 3, "c": 2})
    rows, state = global_rows(config, 50, dp_size=1, rows=2)
    order = letters(rows)
    for size in range(1, 101):
        for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
            assert abs(order[:size].count(name) - share * size) < 1.001
    assert state["rows"] == {"a": 50, "b": 30, "c": 20}
    for name, part in parts.items():
        alone, _ = global_rows(part, 50, dp_size=1, rows=1)
        mixed = [row for row, letter in zip(rows, order, strict=True) if letter == name]
        assert mixed == alone[: len(mixed)]
    readings = collector.drain()
    assert readings["mix/b/rows"].value == 30


@pytest.mark.parametrize("exhausted", ["end", "continue"])
def test_ranks_and_stops_change_nothing(parts: dict[str, Any], exhausted: Any) -> None:
    ending = JsonLines(paths=parts["b"].paths, repeat=False)
    config = Mix(datasets={**parts, "b": ending}, weights={"a": 1, "b": 4, "c": 1.5}, exhausted=exhausted)
    whole, _ = global_rows(config, 150, dp_size=1, rows=1)
    got: list[Any] = []
    state = None
    for dp_size, rows, batches in [(1, 3, 2), (3, 1, 1), (2, 2, 5), (1, 1, 3), (4, 2, 1), (1, 7, 1)] * 3:
        part, state = global_rows(config, batches, dp_size=dp_size, rows=rows, state=state)
        state = json.loads(json.dumps(state))
        got += part
    filled = letters(got).rstrip("-")
    if exhausted == "end":
        assert len(whole) < 150 and filled == letters(whole)
    else:
        assert letters(whole)[-20:].count("b") == 0 and len(got) > 100
    assert got[: len(filled)] == whole[: len(filled)]


def test_weights_change_at_a_step(parts: dict[str, Any]) -> None:
    stages = [MixStage(from_step=5, weights={"b": 1.0}), MixStage(from_step=7, weights={"b": 1, "c": 3})]
    config = Mix(datasets=parts, weights={"a": 1.0}, stages=stages)
    dataset = make(config, rows=2)
    with pytest.raises(RecipeError, match="stages are for training alone"):
        next(iter(dataset))
    dataset.rows_per_step = 4
    batches = iter(dataset)
    found = [next(batches) for _ in range(12)]
    state = dataset.state_dict()
    again = make(config, rows=4)
    again.load_state_dict(json.loads(json.dumps(state)))
    again.rows_per_step = 8  # twice the batch from here on: steps are counted, not rows
    found += [batch for _, batch in zip(range(6), again, strict=False)]
    order = letters(rows_of(found))
    assert order[:32] == "a" * 20 + "b" * 12
    assert sorted(order[32:40]) == list("bbcccccc")


def test_text_and_conversations_are_mixed(parts: dict[str, Any], tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "z"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    chat = Chat(path=str(tmp_path / "talk.jsonl"))
    config = Mix(datasets={"text": parts["a"], "chat": chat}, weights={"text": 1.0, "chat": 1.0})
    assert config.document_mask
    alone = next(iter(make(chat, rows=1, seq_len=64)))
    batch = next(iter(make(config, rows=4, seq_len=64)))
    assert set(batch) == {"tokens", "targets", "positions", "document_ids", "mix/text", "mix/chat"}
    assert batch["mix/chat"].tolist() == [0, 1, 0, 1]
    for row in (1, 3):
        assert all(torch.equal(batch[name][row], alone[name][0]) for name in alone)
    assert batch["document_ids"][0].tolist() == [0] * 64
    assert (batch["targets"][0] != IGNORE).all()


def test_other_data_or_weights_are_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    config = Mix(datasets=parts, weights={"a": 1.0, "b": 1.0})
    state = make(config).state_dict()
    with pytest.raises(EnvironmentProblem, match="weights was"):
        make(Mix(datasets=parts, weights={"a": 2.0, "b": 1.0})).load_state_dict(state)
    (tmp_path / "c.bin").write_bytes(b"d" * 2000)
    with pytest.raises(EnvironmentProblem, match=r"datasets\.c: .* contents was"):
        make(config).load_state_dict(state)
    with pytest.raises(EnvironmentProblem, match="does not belong to dataset mix"):
        make(config).load_state_dict(make(parts["a"]).state_dict())


@pytest.mark.parametrize("exhausted", ["end", "continue"])
def test_it_says_whether_it_ends(parts: dict[str, Any], exhausted: Any) -> None:
    """Or an evaluation on it would never end."""
    parts["b"] = JsonLines(paths=parts["b"].paths, repeat=False)
    for weights, ends in (
        ({"a": 1, "b": 1}, exhausted == "end"),
        ({"b": 1}, True),
        ({"a": 1, "b": 0}, False),
    ):
        config = Mix(datasets=parts, weights=weights, exhausted=exhausted)
        assert config.repeat is not ends
        batches = sum(1 for _ in zip(range(300), make(config, rows=2), strict=False))
        assert (batches < 300) is ends


def test_datasets_may_have_any_name(parts: dict[str, Any]) -> None:
    config = Mix(datasets={"weights": parts["a"], "datasets": parts["b"]}, weights={"weights": 1.0})
    state = json.loads(json.dumps(make(config).state_dict()))
    make(config).load_state_dict(state)
    assert {"datasets.weights", "datasets.datasets"} < set(state["data"])


def test_what_cannot_be_read_is_named(parts: dict[str, Any], tmp_path: Path) -> None:
    config = Mix(datasets=parts, weights={"a": 1.0, "c": 1.0})
    (tmp_path / "c.bin").write_bytes(b"c" * 2000 + b"\xff" * 20)
    dataset = make(config)
    (tmp_path / "c.bin").write_bytes(b"")
    with pytest.raises(EnvironmentProblem, match=r"c\.bin has changed since .* now 0 bytes"):
        list(dataset)


def test_a_recipe_with_a_wrong_mix_is_told_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from titancli.cli import main

    (tmp_path / "r.toml").write_text(
        'extends = "titan:llama3_debug"\n[dataset]\ntype = "mix"\nweights = { web = 1.0, books = 1 }\n'
        '[dataset.datasets]\nweb = { type = "python_stdlib" }\n'
        'pairs = { type = "preference", path = "titan:sums_pairs" }\n'
        'inner = { type = "mix", weights = { x = 1.0 }, datasets.x = { type = "python_stdlib" } }\n'
        "[[dataset.stages]]\nfrom_step = 5\nweights = { web = 0.0 }\n"
        "[[dataset.stages]]\nfrom_step = 5\nweights = { web = 1.0 }\n"
    )
    assert main(["validate", str(tmp_path / "r.toml")]) == 3
    said = capsys.readouterr()
    for what in (
        "there is no dataset 'books': they are web, pairs, inner",
        "it is made of datasets itself",
        "preference pairs cannot be mixed",
        "at least one weight must be above 0",
        "the stages must be in the order of from_step",
    ):
        assert what in said.out + said.err


def test_bad_rows_are_summed_and_waste_is_of_all_rows(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 9}]
    for name, bad in (("one", 3), ("two", 2)):
        rows = [*([{"messages": said}] * 20), *(["bad"] * bad)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "text.bin").write_bytes(b"c" * 2000)
    chat = {n: Chat(path=str(tmp_path / f"{n}.jsonl"), shuffle=False) for n in ("one", "two")}
    text = TokenShards(paths=[tmp_path / "text.bin"], format="raw", dtype="uint8")
    config = Mix(datasets={**chat, "text": text}, weights={"one": 1, "two": 1, "text": 2})
    mixed = iter(make(config, seq_len=48, rows=4))
    for _ in range(4):
        next(mixed)
    readings = collector.drain()
    alone = iter(make(chat["one"], seq_len=48))
    next(alone)
    share = collector.drain()["wasted_tokens"].value
    assert readings["bad_rows"].value == 5
    assert 0 < readings["wasted_tokens"].value == pytest.approx(share / 2)


def test_stages_in_a_validation_are_refused_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    held = "[validation]\nsteps = 1\n[validation.datasets.held]\ntype = 'mix'\nweights = {a = 1}\n"
    held += "datasets = {a = {type = 'python_stdlib'}}\nstages = [{from_step = 3, weights = {a = 1}}]\n"
    recipe.write_text('extends = "titan:llama3_debug"\n' + held)
    assert main(["validate", str(recipe)]) == 3
    assert "an evaluation has no steps: remove them" in "".join(capsys.readouterr())


def test_rows_of_a_dataset_that_fills_the_same_memory_again_are_not_overwritten() -> None:
    memory = torch.zeros(1, 2, dtype=torch.int64)

    def rows() -> Any:
        for number in range(3):
            yield Batch({"tokens": memory.fill_(number)})

    class Refilled:
        def __iter__(self) -> Any:
            return rows()

    source: Any = _Source("x", Refilled())  # type: ignore[arg-type]
    found = [source.next() for _ in range(4)]
    assert [None if row is None else row["tokens"].tolist() for row in found] == [
        [[n, n]] for n in range(3)
    ] + [None]
