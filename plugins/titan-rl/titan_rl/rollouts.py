"""What the GRPO loop learns from: the completions of a step's prompts, over ranks, and their scores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.recorded import packed_routes
from titan_rl.sampled import Sampled, check_routes, sample
from titancli import phase
from titancli.distributed.together import Ranks
from titancli.errors import TitanError
from titancli.protocols.samples import Completion, Sample
from titancli.rl.prompts import PromptSource, TokenizedPrompt

if TYPE_CHECKING:
    from titan_rl import GrpoLoop
    from titan_rl.recorded import Recorder
    from titan_rl.scoring import Score, Scorer
    from titancli.engine import Engine
    from titancli.protocols import Advantage, Generator

REASONS = {
    "masked": "ran out of room (loop.mask_truncated = true)",
    "failed": 'have a failed reward (loop.failed_reward = "drop")',
    "mute": "have no token",
}
"""Why nothing is learned from a completion."""
ROUNDING = 1e-9
"""Sums of weighted rewards that differ by less are equal."""


class Stopwatch:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def start(self) -> None:
        self.seconds, self._since = {}, time.perf_counter()

    def lap(self, name: str, *, after: Tensor | None = None, more: bool = False) -> None:
        """Take the time since the last lap, or add it; `after` is waited for, where a device works on its
        own."""
        if after is not None:
            after.item()
        now = time.perf_counter()
        before = self.seconds.get(name, 0.0) if more else 0.0
        self.seconds[name], self._since = before + now - self._since, now


def collect(
    config: GrpoLoop,
    engine: Engine,
    data: PromptSource,
    generator: Generator,
    scorer: Scorer,
    seq_len: int,
    clock: Stopwatch,
) -> Rollouts:
    """Sample completions of a step's prompts and score them; with `resample_zero_std` do so again for those
    whose completions all have the same reward. Collective."""

    def collected(asked: list[TokenizedPrompt], times: int) -> Rollouts:
        with phase("sample"):
            sampled = sample(generator, engine, asked, config.samples, seq_len, times * config.prompts)
        if config.moe_replay != "none":
            check_routes(sampled, type(generator).__name__)
        clock.lap("sample_seconds", more=True)
        with phase("reward"):
            found = Rollouts(sampled, scorer.score(sampled.pairs), config)
        clock.lap("reward_seconds", more=True)
        return found

    kept, ranks = collected(data.take(config.prompts), 0), Ranks(engine.mesh.dp_group)
    for times in range(1, 1 + config.resample_zero_std):
        if not summed({"alike": float(kept.alike.any())}, engine)["alike"]:
            break
        asked = data.take(config.prompts)
        kept = kept.filled_up(collected(asked, times), asked, ranks)
    return kept


class Rollouts:
    """The samples of this rank in a step, with their scores."""

    def __init__(self, sampled: Sampled, scores: list[list[Score]], config: GrpoLoop) -> None:
        self._sampled, self._scores, self._config = sampled, scores, config
        self.rewards = torch.tensor([[one.total for one in row] for row in scores], dtype=torch.float64)
        """[prompts, samples], float64, on the CPU."""
        self.counted = torch.tensor([[counts(one, config) for one in row] for row in scores])
        """[prompts, samples] bool: what the policy for failed rewards leaves in."""
        self.alike = torch.tensor(
            [_all_alike(row) for row in torch.where(self.counted, self.rewards, torch.nan)]
        )
        """[prompts] bool: all rewards that count are equal, so that nothing can be learned."""
        self.resampled = 0
        """Prompts of this rank that others replace."""
        self.advantages = torch.zeros_like(self.rewards)
        self.worked: dict[str, int] = {}
        """By reward, how often it gave a number, over all ranks; `metrics` counts."""
        self.failing: set[str] = set()
        """Rewards that failed on some rank; `metrics` counts."""
        self.all_empty = False
        """True if no completion of any rank says anything; `metrics` counts."""
        self.left_out: dict[str, int] = {}
        """If no sample of any rank is left to learn from, how many are left out by what; `metrics` counts."""
        self.flat = False
        """True if the rewards of all ranks leave nothing to learn; `rate` compares them."""

    def filled_up(self, more: Rollouts, prompts: Sequence[TokenizedPrompt], ranks: Ranks) -> Rollouts:
        """Return these with prompts of `more` that can be learned from in place of those that cannot.
        Collective.

        Both are numbered over all ranks, so that the result does not depend on how many there are.

        Args:
            prompts: those of `more` on all ranks.
        """
        share = len(self.alike)
        alike, others = zip(*ranks.gather((self.alike.tolist(), more.alike.tolist())), strict=True)
        places = [number for number, flag in enumerate(chain(*alike)) if flag]
        better = [number for number, flag in enumerate(chain(*others)) if not flag]
        moves = dict(zip(places, better, strict=False))
        first = ranks.rank * share
        own = {
            first + at: (more._sampled.completions[at], more._scores[at])
            for at in range(share)
            if first + at in moves.values()
        }
        given = {number: row for rows in ranks.gather(own) for number, row in rows.items()}
        sampled, scores = self._sampled, list(self._scores)
        asked, completions = list(sampled.asked), list(sampled.completions)
        mine = {place - first: other for place, other in moves.items() if 0 <= place - first < share}
        for place, other in mine.items():
            asked[place] = prompts[other]
            completions[place], scores[place] = given[other]
        kept = Rollouts(Sampled(asked, completions, sampled.version), scores, self._config)
        kept.resampled = self.resampled + len(mine)
        return kept

    def rate(self, advantage: Advantage, engine: Engine) -> None:
        """Take the advantages of the rewards, which are given those of all ranks. Collective.

        Raises:
            TitanError: they are not one finite number for each sample.
        """
        ranks = Ranks(engine.mesh.dp_group)
        rewards, counted = map(torch.cat, zip(*ranks.gather((self.rewards, self.counted)), strict=True))
        found = advantage(rewards.clone(), counted.clone())
        name = getattr(advantage, "__name__", type(advantage).__name__)
        wanted = list(rewards.shape)
        if not isinstance(found, Tensor) or list(found.shape) != wanted:
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise TitanError(
                f"the advantage {name} returned {what}, not a tensor [prompts, samples], which is {wanted}"
            )
        # Of all ranks: one that raised alone would leave the others waiting.
        if not bool(torch.where(counted, found, 0.0).isfinite().all()):
            raise TitanError(f"the advantage {name} returned a number that is not finite")
        self.advantages = found.split(len(self.rewards))[ranks.rank]
        alike = _all_alike(torch.where(counted, rewards, torch.nan).flatten())
        self.flat = bool(counted.any()) and (alike or not bool((found[counted].abs() >= ROUNDING).any()))

    def samples(self, first: int, count: int) -> list[Sample]:
        """Return the samples of `count` prompts to learn from; those with an advantage of 0 count in averages
        too."""
        found = []
        for number in range(first, first + count):
            asked, made = self._sampled.asked[number], self._sampled.completions[number]
            for place, completion in enumerate(made):
                if self.counted[number, place] and not self._masks(completion):
                    advantage = float(self.advantages[number, place])
                    found.append(Sample.of(asked.tokens, completion, advantage))
        return found

    def _masks(self, completion: Completion) -> bool:
        return self._config.mask_truncated and completion.finish == "length"

    def _left(self) -> dict[str, float]:
        """Return how many completions of this rank are left to learn from, and how many are not, and why."""
        count = dict.fromkeys(("left", *REASONS), 0.0)
        for own, made in zip(self.counted.tolist(), self._sampled.completions, strict=True):
            for counted, one in zip(own, made, strict=True):
                why = "failed" if not counted else "masked" if self._masks(one) else "left"
                count["mute" if why == "left" and not one.tokens else why] += 1
        return count

    def metrics(self, engine: Engine, names: Sequence[str]) -> dict[str, float]:
        """Over all ranks."""
        made = [completion for row in self._sampled.completions for completion in row]
        scores = [score for row in self._scores for score in row]
        counted = self.counted.double()
        rewards = self.rewards * counted
        sums: dict[str, float] = {
            "counted": counted.sum().item(),
            "reward": rewards.sum().item(),
            "square": rewards.square().sum().item(),
            "solved": (self.counted & (self.rewards >= self._config.solved - ROUNDING)).double().sum().item(),
            "groups": float(len(self.rewards)),
            "zero_std_groups": float(self.alike.sum()),
            "resampled": float(self.resampled),
            "made": float(len(made)),
            "response_length": float(sum(len(completion.tokens) for completion in made)),
            "truncated": float(sum(completion.finish == "length" for completion in made)),
            "reward_failed": float(sum(len(score.failed) for score in scores)),
            "not_empty": float(sum(not _is_empty(completion) for completion in made)),
            **self._left(),
        }
        for name in names:
            found = [score.rewards[name] for score in scores if name in score.rewards]
            sums |= {f"reward/{name}": float(sum(found)), f"count {name}": float(len(found))}
        sums = summed(sums, engine)
        self.worked = {name: round(sums[f"count {name}"]) for name in names}
        self.failing = {name for name in names if sums[f"count {name}"] < sums["made"]}
        self.all_empty = not sums["not_empty"]
        if not sums["left"]:
            self.left_out = {words: round(sums[name]) for name, words in REASONS.items() if sums[name]}
        averages = _averages(sums, names)
        return averages | ({"resampled": sums["resampled"]} if self._config.resample_zero_std else {})

    def save(self, recorder: Recorder, step: int, engine: Engine) -> None:
        """Save the samples of all ranks, on rank 0. Collective."""
        mine = [self._row(step, number) for number in range(len(self.rewards))]
        everyones = Ranks(engine.mesh.dp_group).gather(mine)
        if dist.get_rank() == 0:
            recorder.write(step, [row for rows in everyones for row in rows])

    def _row(self, step: int, number: int) -> dict[str, Any]:
        asked = self._sampled.asked[number]
        samples = [
            {
                "text": completion.text,
                "tokens": len(completion.tokens),
                "ids": completion.tokens,
                "logprobs": completion.logprobs,
                **({} if completion.routes is None else {"routes": packed_routes(completion.routes)}),
                "finish": completion.finish,
                "reward": score.total,
                "rewards": score.rewards,
                "failed": score.failed,
                "counted": bool(self.counted[number, i]),
                "advantage": float(self.advantages[number, i]),
            }
            for i, (completion, score) in enumerate(
                zip(self._sampled.completions[number], self._scores[number], strict=True)
            )
        ]
        return {
            "step": step,
            "version": self._sampled.version,
            "prompt": asked.prompt.text,
            "prompt_ids": asked.tokens,
            "answer": asked.prompt.answer,
            "samples": samples,
        }


def counts(score: Score, config: GrpoLoop) -> bool:
    """Return whether the policy for failed rewards keeps a completion."""
    return config.failed_reward == "zero" or not score.failed


def _is_empty(completion: Completion) -> bool:
    """Return whether a completion is nothing, or an end marker alone."""
    return len(completion.tokens) <= (completion.finish == "eos")


def _all_alike(row: Tensor) -> bool:
    kept = row[~row.isnan()]
    return len(kept) == 0 or bool(kept.max() - kept.min() < ROUNDING)


def summed(sums: dict[str, float], engine: Engine) -> dict[str, float]:
    """Over all data-parallel ranks."""
    if engine.mesh.degrees.dp == 1:
        return sums
    values = torch.tensor(list(sums.values()), dtype=torch.float64, device=engine.device)
    dist.all_reduce(values, group=engine.mesh.dp_group)
    return dict(zip(sums, values.tolist(), strict=True))


def _averages(sums: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    counted, made = max(sums["counted"], 1.0), max(sums["made"], 1.0)
    mean = sums["reward"] / counted
    found = {
        "reward": mean,
        "reward_std": max(0.0, sums["square"] / counted - mean**2) ** 0.5,
        "solved": sums["solved"] / counted,
        "zero_std_groups": sums["zero_std_groups"] / max(sums["groups"], 1.0),
        "response_length": sums["response_length"] / made,
        "truncated": sums["truncated"] / made,
        "reward_failed": sums["reward_failed"],
    }
    return found | {f"reward/{n}": sums[f"reward/{n}"] / max(sums[f"count {n}"], 1.0) for n in names}
