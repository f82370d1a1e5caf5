"""Pairs: two rows each, targets of the answers alone, prompts in the forms that data sets have, bad rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import global_rows, make
from tests.data.test_chat import lines, said
from titan_preference import Preference
from titancli.data import Chat
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.observe.metrics import collector
from titancli.protocols.batch import IGNORE

USER, GOOD, BAD_ANSWER = said("user", "q"), said("assistant", "yes"), said("assistant", "no!")
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD_ANSWER]},
    "text": {"prompt": "q", "chosen": "yes", "rejected": "no!"},
    "conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD_ANSWER]},
    "conversations, and what was asked": {
        "prompt": "q",
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD_ANSWER],
    },
}


@pytest.fixture(autouse=True)
def nothing_reported():
    collector.drain()
    yield
    collector.drain()


def rows(batch: Any) -> list[tuple[bytes, bytes]]:
    """Inputs and targets of each row, without end markers."""
    return [
        tuple(bytes(i for i in batch[name][row].tolist() if 0 <= i < 256) for name in ("tokens", "targets"))
        for row in range(batch.rows)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_is_two_rows_whatever_the_form(tmp_path: Path, form: str) -> None:
    path = lines(tmp_path / "pairs.jsonl", [FORMS[form]])
    [batch] = list(make(Preference(path=path, repeat=False), seq_len=32, rows=2))
    assert batch.unit == 2
    assert rows(batch) == [(b"user\nqassistant\nyes", b"yes"), (b"user\nqassistant\nno!", b"no!")]
    assert [int(n) for n in (batch["targets"] != IGNORE).sum(1)] == [4, 4]


def test_an_earlier_turn_of_the_assistant_is_prompt(tmp_path: Path) -> None:
    before = [USER, said("assistant", "what?"), said("user", "Q")]
    row = {"chosen": [*before, GOOD], "rejected": [*before, BAD_ANSWER]}
    path = lines(tmp_path / "pairs.jsonl", [row])
    [batch] = list(make(Preference(path=path, repeat=False), seq_len=64, rows=2))
    assert [targets for _, targets in rows(batch)] == [b"yes", b"no!"]


def test_pairs_stay_together_on_any_number_of_ranks_and_over_a_resume() -> None:
    config = Preference(path="titan:sums_pairs")
    alone, _ = global_rows(config, 60, dp_size=1, rows=2, seq_len=64)
    first, state = global_rows(config, 5, dp_size=2, rows=4, seq_len=64)
    rest, _ = global_rows(config, 20, dp_size=1, rows=4, seq_len=64, state=state)
    assert first + rest == alone
    for (chosen, _), (rejected, _) in zip(alone[0::2], alone[1::2], strict=True):
        prompt = chosen.index(256)
        assert chosen[: prompt + 1] == rejected[: prompt + 1] and chosen != rejected


def test_log_probabilities_of_the_reference_come_along(tmp_path: Path) -> None:
    known = {"reference_chosen_logp": -1.5, "reference_rejected_logp": -2}
    path = lines(tmp_path / "pairs.jsonl", [{**FORMS["text"], **known}, FORMS["text"]])
    data = Preference(path=path, repeat=False, shuffle=False, reference_logps=True)
    [batch] = list(make(data, seq_len=32, rows=4))
    assert batch["reference_row_logprobs"].tolist() == [-1.5, -2.0, 0.0, 0.0]
    assert not (batch["targets"][2:] != IGNORE).any()  # the second row lacks them: it is a bad one


BAD = {
    "no rejected": ({"prompt": "q", "chosen": "a"}, "it has no key 'rejected'"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "it has no key 'prompt'"),
    "the same": ({"prompt": "q", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are identical"),
    "no answer": ({"chosen": [USER], "rejected": [USER, GOOD]}, "'chosen' has no assistant message"),
    "two prompts": (
        {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "another"}, GOOD]},
        "'chosen' and 'rejected' have different prompts",
    ),
    "one question more": (
        {"chosen": [USER, GOOD], "rejected": [USER, USER, GOOD]},
        "'chosen' and 'rejected' have different prompts",
    ),
    "too long": (
        {"prompt": "q", "chosen": "a" * 99, "rejected": "b"},
        "'chosen' has 117 tokens, but a row holds 33 (training.seq_len)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_pair_is_told_with_file_line_and_reason(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    row, reason = BAD[name]
    path = lines(tmp_path / "pairs.jsonl", [FORMS["text"], row])
    [batch] = list(make(Preference(path=path, repeat=False), seq_len=32, rows=2))
    assert f"skipped a row: {path}, line 2: {reason}" in caplog.text
    assert batch.rows == 2
    with pytest.raises(EnvironmentProblem, match="line 2"):
        list(make(Preference(path=path, repeat=False, strict=True), seq_len=32, rows=2))


@pytest.mark.parametrize("indexed", [False, True])
def test_rows_are_padded_to_the_longest_of_a_batch_on_demand(tmp_path: Path, indexed: bool) -> None:
    said_ = [3, 50, 2, 60, 1, 120]
    pairs = [{"prompt": "q", "chosen": "a" * n, "rejected": "b"} for n in said_]
    path = lines(tmp_path / "pairs.jsonl", pairs)
    options = {"path": path, "repeat": False, "shuffle": False, "length_index": indexed}
    whole = list(make(Preference(**options), seq_len=150, rows=2))
    cut = list(make(Preference(**options, padding="longest"), seq_len=150, rows=2))
    assert [batch["tokens"].shape[1] for batch in cut] == [64, 128, 64, 128, 64, 150]
    for ours, theirs in zip(cut, whole, strict=True):
        width = ours["tokens"].shape[1]
        assert all((ours[name] == theirs[name][:, :width]).all() for name in theirs)
        assert (theirs["targets"][:, width:] == IGNORE).all()
    # The last batch of a rank that has nothing left.
    batches = list(make(Preference(**options, padding="longest"), seq_len=150, rows=4, dp_rank=1, dp_size=2))
    assert [batch["tokens"].shape[1] for batch in batches] == [128, 64]


def test_an_odd_number_of_rows_is_refused() -> None:
    with pytest.raises(RecipeError, match="a pair consists of two rows"):
        make(Preference(path="titan:sums_pairs"), rows=3)


def test_a_position_in_conversations_is_none_in_pairs() -> None:
    state = make(Chat(path="titan:sums"), seq_len=64).state_dict()
    with pytest.raises(EnvironmentProblem, match="is not the data that the checkpoint was trained on"):
        make(Preference(path="titan:sums"), seq_len=64).load_state_dict(state)
