"""Rollouts as files; and what a plugin's generator or advantage gives that is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from titan_rl.recorded import Recorder, read, recorded
from titan_rl.rollouts import Rollouts
from titan_rl.sampled import Sampled, sample
from titan_rl.scoring import Score
from titan_rl.steps import Learner
from titancli.distributed.together import Ranks as Together
from titancli.errors import EnvironmentProblem, TitanError
from titancli.protocols.samples import Completion, Prompt, Sample
from titancli.rl.prompts import TokenizedPrompt

ASKED = [TokenizedPrompt(Prompt("a"), [1]), TokenizedPrompt(Prompt("b"), [2])]
ENGINE: Any = SimpleNamespace(
    settings=SimpleNamespace(seed=0),
    step=0,
    version=0,
    mesh=SimpleNamespace(dp_rank=0, dp_group=None, degrees=SimpleNamespace(dp=1)),
)
MADE = Completion("x", [3], [-1.0], "eos")


def test_what_was_written_is_read_whatever_characters_it_has(tmp_path: Path) -> None:
    """At U+2028, U+0085 and their like `str.splitlines` breaks a line, JSON Lines do not."""
    nothing = {"answer": None, "samples": []}
    rows = [{"prompt": "a\u2028b\x85c\x1c\n", **nothing}, {"prompt": "\ud800", **nothing}]
    Recorder(tmp_path).write(3, rows)
    assert read(recorded(tmp_path)[3]) == rows
    recorded(tmp_path)[3].write_text('{"prompt": "a"}\n')
    with pytest.raises(EnvironmentProblem, match="a line has no prompt, answer or samples"):
        read(recorded(tmp_path)[3])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "returned a NoneType that is not a list of lists"),
        ([MADE, MADE], "returned a list that is not a list of lists"),
        ([[MADE, MADE]], r"returned \[2\] completions .* which have \[2, 2\] seeds"),
        ([[MADE, MADE], [MADE]], r"returned \[2, 1\] completions .* which have \[2, 2\] seeds"),
        ([["x", "y"], ["x", "y"]], "returned a str as a completion"),
    ],
)
def test_a_generators_completions_are_counted(made: Any, words: str) -> None:
    generator: Any = SimpleNamespace(sample=lambda *given, greedy: made)
    with pytest.raises(TitanError, match=f"the generator SimpleNamespace {words}"):
        sample(generator, ENGINE, ASKED, 2, 16)


def rollouts() -> Rollouts:
    scores = [[Score(total=1.0), Score(total=0.0)], [Score(total=0.5), Score(failed={"r": "no"})]]
    config: Any = SimpleNamespace(failed_reward="drop", mask_truncated=False)
    return Rollouts(Sampled(ASKED, [[MADE] * 2] * 2), scores, config)


@pytest.mark.parametrize(
    ("advantage", "words"),
    [
        (lambda rewards, counted: None, "NoneType, not a tensor"),
        (lambda rewards, counted: rewards.mean(1), r"\[2\], not a tensor .* which is \[2, 2\]"),
        (lambda rewards, counted: rewards / 0, "a number that is not finite"),
    ],
)
def test_advantages_that_are_none_are_refused(advantage: Any, words: str) -> None:
    with pytest.raises(TitanError, match=f"the advantage <lambda> returned {words}"):
        rollouts().rate(advantage, ENGINE)


def rated() -> str:
    """Return the error on this rank for advantages that are infinite for the prompts of the last rank
    alone."""
    world = dist.get_world_size()
    engine: Any = SimpleNamespace(mesh=SimpleNamespace(dp_group=dist.group.WORLD))

    def of_the_last(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        assert rewards.shape == (2 * world, 2)
        return torch.cat((rewards[:-2], rewards[-2:] + torch.inf))

    with pytest.raises(TitanError) as error:
        rollouts().rate(of_the_last, engine)
    return str(error.value)


@pytest.mark.ranks
def test_an_advantage_that_is_wrong_for_one_rank_is_refused_on_all(ranks: Ranks) -> None:
    found = ranks(2, rated)
    assert all("returned a number that is not finite" in words for words in found), found


def test_advantages_of_tokens_are_of_all_samples() -> None:
    engine: Any = SimpleNamespace(
        loss=SimpleNamespace(needs=(), temperature=1.0),
        forward=lambda samples, **_: [[0.0] * len(one.tokens) for one in samples],
    )
    config: Any = SimpleNamespace(updates=1, passes=1, advantage=SimpleNamespace(needs_reference=False))
    step: Any = SimpleNamespace(rewards=[0.0], samples=lambda first, count: [Sample([1, 2], [0, 1])] * 3)
    run: Any = SimpleNamespace(batch_shape=(1, 8))
    whole: Any = SimpleNamespace(of_tokens=lambda samples, over_ranks: samples)
    (rated,) = Learner(config, engine, run, whole).minibatches(step)
    assert [one.extra["old_values"] for one in rated] == [[0.0, 0.0]] * 3
    fewer: Any = SimpleNamespace(of_tokens=lambda samples, over_ranks: samples[1:])
    with pytest.raises(TitanError, match="the advantage SimpleNamespace returned 2 samples for 3"):
        list(Learner(config, engine, run, fewer).minibatches(step))


def test_an_advantage_that_works_in_place_leaves_the_rewards_alone() -> None:
    made = rollouts()
    made.rate(lambda rewards, counted: rewards.sub_(torch.where(counted, 9.0, torch.nan)), ENGINE)
    assert made.rewards.tolist() == [[1.0, 0.0], [0.5, 0.0]]
    assert made.advantages[:, 0].tolist() == [-8.0, -8.5]


def test_prompts_that_teach_nothing_are_replaced_by_others_that_do() -> None:
    config: Any = SimpleNamespace(failed_reward="zero", mask_truncated=False)

    def of(text: str, *totals: tuple[float, float]) -> Rollouts:
        asked = [TokenizedPrompt(Prompt(f"{text}{number}"), [1]) for number in range(len(totals))]
        made = [[MADE] * 2] * len(totals)
        return Rollouts(Sampled(asked, made), [[Score(total=x) for x in row] for row in totals], config)

    def filled(kept: Rollouts, more: Rollouts) -> Rollouts:
        return kept.filled_up(more, more._sampled.asked, Together())

    kept = filled(of("a", (1, 1), (0, 1), (0, 0)), of("b", (0, 0), (1, 0), (0, 0)))
    assert [asked.prompt.text for asked in kept._sampled.asked] == ["b1", "a1", "a2"]
    assert kept.alike.tolist() == [False, False, True] and kept.resampled == 1
    again = filled(kept, of("c", (0, 0), (1, 0), (0, 3)))
    assert [asked.prompt.text for asked in again._sampled.asked] == ["b1", "a1", "c1"]
    assert not again.alike.any() and again.resampled == 2


@pytest.mark.parametrize("mask", [False, True])
def test_what_ran_out_of_room_is_learned_from_unless_it_is_masked(mask: bool) -> None:
    config: Any = SimpleNamespace(failed_reward="zero", mask_truncated=mask)
    cut = Completion("x", [3], [-1.0], "length")
    made = Rollouts(Sampled(ASKED[:1], [[MADE, cut]]), [[Score(total=1.0), Score(total=0.0)]], config)
    made.rate(lambda rewards, counted: rewards - rewards.mean(1, keepdim=True), ENGINE)
    assert [sample.advantages for sample in made.samples(0, 1)] == ([0.5] if mask else [0.5, -0.5])
