"""Rewards: what each is worth, and that one which fails ends nothing."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from titan_rl import PATIENCE, ExactMatch, JsonSchema, Length, Numeric, Prompts, Regex
from titan_rl.numbers import last_number
from titan_rl.scoring import Scorer
from titancli.data import ByteTokenizer
from titancli.errors import RecipeError, TitanError
from titancli.protocols.samples import Completion, Prompt
from titancli.registry.component import build
from titancli.rl.prompts import PromptSource

HANGS = 60


def said(text: str, tokens: int = 1) -> Completion:
    return Completion(text, [0] * tokens, [0.0] * tokens, "eos")


SCHEMA = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("config", "answer", "text", "reward"),
    [
        (ExactMatch(), "Paris", " Paris\n", 1),
        (ExactMatch(), "Paris", "paris", 0),
        (ExactMatch(ignore_case=True), "Paris", "paris", 1),
        (Regex(pattern=r"a\db"), None, "xx a7b yy", 1),
        (Regex(pattern=r"a\db", whole=True), None, "xx a7b yy", 0),
        (Regex(pattern=r"#### (?P<answer>\d+)"), "42", "so #### 42.", 1),
        (Regex(pattern=r"#### (?P<answer>\d+)"), "42", "so #### 43.", 0),
        (Numeric(), "so it is #### 1,234.5", "first 3, then -1234.5e0 or +1234.5", 1),
        (Numeric(), "7", "it is 7 or 8", 0),
        (Numeric(), "7", "none", 0),
        (Numeric(), "4", "(3,4)", 1),
        (Numeric(), "3", "one of 1,2,3", 1),
        (Numeric(), "1234567", "is 1,234,567.", 1),
        (Numeric(), "-4", "x = \u22124", 1),
        (Numeric(after="####"), "7", "8 #### 7", 1),
        (Numeric(after="####"), "7", "7", 0),
        (Numeric(tolerance=0.1), "100", "109.9", 1),
        (Numeric(), "3/4", "It is 0.75.", 1),
        (Numeric(), "3/4", "It is 4.", 0),
        (Numeric(), r"\frac{3}{4}", r"so $\boxed{\dfrac34}$.", 1),
        (Numeric(), r"\boxed{\frac{3}{4}}", "4", 0),
        (Numeric(), "1/3", "0.3333", 0),
        (Numeric(tolerance=1e-3), "1/3", "0.3333", 1),
        (Numeric(), "12/4 of them", "12/4 = 3", 1),
        (JsonSchema(schema=SCHEMA), None, '{"age": 3}', 1),
        (JsonSchema(schema=SCHEMA), None, '```json\n{"age": 3}\n```', 1),
        (JsonSchema(schema=SCHEMA), None, '{"age": "3"}', 0),
        (JsonSchema(schema=SCHEMA), None, "age 3", 0),
    ],
)
def test_a_reward(config: Any, answer: str | None, text: str, reward: float) -> None:
    assert build(config)(Prompt("?", answer), said(text)) == reward


@pytest.mark.parametrize(
    ("text", "value"),
    {
        "3/4": "3/4",
        "-3/4": "-3/4",
        "\u22123 / 4": "-3/4",
        "3\u20444": "3/4",
        "1 1/2": "3/2",
        "-1 1/2": "-3/2",
        "step 2 5/3": "5/3",
        r"\frac{3}{4}": "3/4",
        r"-\frac{3}{4}": "-3/4",
        r"\frac{-3}{4}": "-3/4",
        r"\dfrac34": "3/4",
        r"\tfrac { 1.5 } { 2 }": "3/4",
        r"2\frac{1}{2}": "5/2",
        r"\frac{1,000}{3}": "1000/3",
        "1\u00bd cups": "3/2",
        "\u2153": "1/3",
        "1,234.50": "1234.5",
        "12{,}345": "12345",
        r"12\,345": "12345",
        "1.5e3": "1500",
        ".5": "1/2",
        "75%": "75",
        r"75\%": "75",
        "$5": "5",
        "5 km/h": "5",
        r"90^\circ": "90",
        r"\boxed{72}": "72",
        r"5\text{ cm}": "5",
        "48/2 = <<48/2=24>>24 clips\n#### 72": "72",
        "**Answer: 5**": "5",
        "- 5": "5",
        "x = -5": "-5",
        "1/2 and then 7": "7",
    }.items(),
)
def test_numbers_are_exact(text: str, value: str) -> None:
    assert last_number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        *(
            r"\sqrt{2}",
            r"2\sqrt{3}",
            r"\frac{\pi}{4}",
            r"\frac{x}{2}",
            "10^5",
            "2^{10}",
            r"5\pi",
            "3x",
            "2x+3",
        ),
        *("5 + 7", "x - 7", r"\frac{1}{0}", "1/0", "3/4/2024", "1e999999999", "9" * 5000, "none", "", "3/x"),
        *("\u221a2", r"3 \times 10^5", r"\sqrt[3]{7}", "a_1"),
    ],
)
def test_expressions_are_no_numbers(text: str) -> None:
    reward = build(Numeric())
    assert last_number(text) is None and reward(Prompt("?", "2"), said(text)) == 0.0
    assert "does not end with a number" in reward.refuses(Prompt("?", text))
    with pytest.raises(ValueError, match="does not end with a number"):
        reward(Prompt("?", text), said("2"))


def test_rows_without_a_value_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are named and counted, and end a run only if the task is strict, or nothing is left."""
    answers = ["3/4", r"\sqrt{2}", "7", r"\pi"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "answer": one}) + "\n" for one in answers))
    task = build(Prompts(path=str(path), shuffle=False), seed=0)
    scorer = Scorer([Numeric(), Length(free=1, limit=2)], 1.0)

    def source(strict: bool = False) -> PromptSource:
        found = PromptSource(task, build(ByteTokenizer()), longest=9)
        found.require(scorer.refuses, strict=strict)
        return found

    prompts = source()
    assert [one.prompt.answer for one in prompts.take(3)] == ["3/4", "7", "3/4"] and prompts.rejected == 2
    assert caplog.text.count("skipped prompt 1: the reward numeric cannot rate it: the prompt's answer") == 1
    with pytest.raises(TitanError, match="prompt 1: the reward numeric cannot rate it"):
        source(strict=True).take(3)
    path.write_text(json.dumps({"prompt": "a"}) + "\n")
    task = build(Prompts(path=str(path)), seed=0)
    with pytest.raises(TitanError, match=r"were skipped; of the last one: the reward numeric .* no answer"):
        source().take(1)


def test_length_costs_more_and_more() -> None:
    reward = build(Length(free=10, limit=20))
    assert [reward(Prompt("?"), said("", n)) for n in (3, 10, 15, 20, 90)] == [0, 0, -0.5, -1, -1]


def test_what_is_no_schema_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="invalid JSON Schema"):
        build(JsonSchema(schema={"type": "nothing"}))


def test_a_schema_fetches_no_other_document(tmp_path: Path) -> None:
    other = tmp_path / "any.json"
    other.write_text("true")
    [(key, why)] = JsonSchema(schema={"items": [{"$ref": other.as_uri()}]}).check(None)  # type: ignore[arg-type]
    assert key == "schema" and "refers to another document, which would be fetched" in why
    local = {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}
    assert list(JsonSchema(schema=local).check(None)) == []  # type: ignore[arg-type]
    assert build(JsonSchema(schema=local))(Prompt("?"), said("[1]")) == 1
    with pytest.raises(Exception, match="Unresolvable"):
        build(JsonSchema(schema={"$ref": other.as_uri()}))(Prompt("?"), said("1"))


def scorer(*rewards: Any, seconds: float = 0.2) -> Scorer:
    """With functions in place of the last rewards."""
    made = Scorer([ExactMatch(weight=0.5)] * (1 + len(rewards)), seconds)
    for number, function in enumerate(rewards, start=1):
        made._rewards[number] = made._rewards[number]._replace(
            name=f"own{number}", reward=function, weight=2.0
        )
    return made


def test_rewards_are_weighted_and_two_of_a_name_are_told_apart() -> None:
    made = Scorer([ExactMatch(weight=0.5), ExactMatch(weight=2.0, ignore_case=True)], 1.0)
    ((score,),) = made.score([(Prompt("?", "A"), [said("a")])])
    assert score.rewards == {"exact_match": 0.0, "exact_match_2": 1.0}
    assert score.total == 2.0 and made.names == ["exact_match", "exact_match_2"]


def stubborn(prompt: Prompt, completion: Completion) -> float:
    while True:
        try:
            time.sleep(HANGS)
        except Exception:  # what hangs often catches everything, and tries again
            continue


def hungry(prompt: Prompt, completion: Completion) -> float:
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))


def raises(prompt: Prompt, completion: Completion) -> float:
    raise KeyError("no such row")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, r"KeyError: 'no such row' \(.*test_rl_scoring.py:\d+\)"),
        (lambda p, c: float("nan"), "it returned nan"),
        (lambda p, c: 10**400 * 1.0, "OverflowError"),
        (lambda p, c: None, "it returned None, which is not a number"),
        (lambda p, c: "0.5", "it returned '0.5', which is not a number"),
        (lambda p, c: exit(3), "SystemExit: 3"),
        (stubborn, "took longer than 0.2 s"),
        (hungry, "took longer than 0.2 s"),
    ],
)
def test_a_reward_that_fails_is_told_and_counts_nothing(
    function: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    ((first, second),) = scorer(function).score([(Prompt("?", "A"), [said("A"), said("B")])])
    assert first.rewards == {"exact_match": 1.0} and first.total == 0.5 and second.total == 0.0
    assert re.search(words, first.failed["own1"]) and second.failed.keys() == {"own1"}
    assert len([r for r in caplog.records if "the reward own1 failed" in r.message]) == 1
    assert time.monotonic() - began < HANGS


def test_a_reward_that_keeps_time_itself_leaves_no_alarm_that_ends_the_process() -> None:
    calls = []

    def own_alarm(prompt: Prompt, completion: Completion) -> float:
        calls.append(completion)
        if len(calls) == 1:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # SIG_DFL would end the test, not fail it
        else:
            time.sleep(HANGS)
        return 1.0

    began = time.monotonic()
    ((first, second),) = scorer(own_alarm).score([(Prompt("?", "A"), [said("A"), said("B")])])
    assert first.rewards["own1"] == 1.0 and second.failed["own1"] == "took longer than 0.2 s"
    assert time.monotonic() - began < HANGS


def test_one_that_hangs_is_not_asked_for_ever() -> None:
    asked = []

    def hangs(prompt: Prompt, completion: Completion) -> float:
        asked.append(completion)
        time.sleep(HANGS)
        return 1.0

    own = scorer(hangs, seconds=0.05)
    for step in (1, 2):
        ((*_, last),) = own.score([(Prompt("?", "A"), [said("A")] * 50)])
        assert "skipped: timed out" in last.failed["own1"] and last.rewards == {"exact_match": 1.0}
        assert len(asked) == step * PATIENCE


def asked(count: int) -> list[tuple[Prompt, list[Completion]]]:
    return [(Prompt("?", "A"), [said(f"A{number}")]) for number in range(count)]


def test_rewards_that_wait_do_so_side_by_side() -> None:
    under_way, most = 0, 0

    async def judge(prompt: Prompt, completion: Completion) -> float:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return float(completion.text[1:])

    own = scorer(judge, seconds=20)
    own._concurrency = 7
    for _ in range(2):  # a second step has the same event loop
        scores = own.score(asked(20))
        assert [score.rewards["own1"] for (score,) in scores] == list(range(20))
        assert [score.total for (score,) in scores] == [2.0 * number for number in range(20)]
    assert most == 7


async def waits(prompt: Prompt, completion: Completion) -> float:
    await asyncio.sleep(HANGS)
    return 1.0


async def blocks(prompt: Prompt, completion: Completion) -> float:
    await asyncio.sleep(0)
    time.sleep(HANGS)
    return 1.0


async def refuses_to_end(prompt: Prompt, completion: Completion) -> float:
    try:
        await asyncio.sleep(HANGS)
    except asyncio.CancelledError:
        time.sleep(HANGS)
    return 1.0


async def is_late_itself(prompt: Prompt, completion: Completion) -> float:
    await asyncio.sleep(0)
    raise TimeoutError("the judge is busy")


async def says_nothing(prompt: Prompt, completion: Completion) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (waits, "took longer than 0.2 s"),
        (blocks, "took longer than 0.2 s"),
        (refuses_to_end, "took longer than 0.2 s"),
        (is_late_itself, r"TimeoutError: the judge is busy \(.*test_rl_scoring.py:\d+\)"),
        (says_nothing, "it returned None, which is not a number"),
    ],
)
def test_one_that_waits_fails_alone(function: Any, words: str) -> None:
    async def good(prompt: Prompt, completion: Completion) -> float:
        await asyncio.sleep(0.01)
        return 1.0

    began = time.monotonic()
    ((score,),) = scorer(function, good).score(asked(1))
    assert re.search(words, score.failed["own1"]), score.failed
    if function is not blocks:  # meanwhile the time of others runs, too
        assert score.rewards["own2"] == 1.0 and score.total == 2.0
    assert time.monotonic() - began < HANGS


def test_one_that_always_waits_too_long_is_skipped_in_the_rest_of_the_step() -> None:
    own = scorer(waits, seconds=0.05)
    own._concurrency = 1
    scores = [score for (score,) in own.score(asked(12))]
    assert sum("skipped" in score.failed["own1"] for score in scores) == 12 - PATIENCE
