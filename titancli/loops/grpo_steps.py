"""The steps of the GRPO loop: sampling over ranks, what is measured, and micro-batches to learn from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titancli.distributed.together import Ranks
from titancli.engine.rng import derive
from titancli.errors import RecipeError, TitanError
from titancli.loops.reference import Reference
from titancli.observe.phases import phase
from titancli.protocols import LossDefaults
from titancli.protocols.batch import Batch
from titancli.protocols.samples import Completion
from titancli.registry.component import build
from titancli.registry.defaults import with_defaults
from titancli.rl.packing import Sample, pack, rows_of
from titancli.rl.prompts import Asked, PromptSource

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.loops import Grpo
    from titancli.loops.run import Run
    from titancli.protocols import Advantage, Generator
    from titancli.protocols.samples import Prompt
    from titancli.rl.rollouts import Recorder
    from titancli.rl.scoring import Score, Scorer

ROUNDING = 1e-9
"""Sums of weighted rewards that differ by less are equal."""


def check_fits(config: Grpo, dp: int) -> None:
    """
    Raises:
        RecipeError: the prompts of a step cannot be dealt evenly, to the ranks and to the updates of each.
    """
    parts = dp * config.updates
    if config.prompts % parts:
        raise RecipeError(
            f"loop.prompts = {config.prompts} is not a multiple of data-parallel ranks ({dp}) "
            f"x loop.updates ({config.updates}) = {parts}",
            hint=f"use {max(parts, round(config.prompts / parts) * parts)}",
        )


class Stopwatch:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def start(self) -> None:
        self.seconds, self._since = {}, time.perf_counter()

    def lap(self, name: str, *, after: Tensor | None = None) -> None:
        """Since the last one; `after` is waited for, where a device works on its own."""
        if after is not None:
            after.item()
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now


# ------------------------------------------------------------------------------------------------ sampling


@dataclass(frozen=True)
class Sampled:
    """This rank's prompts of a step, and their completions."""

    asked: list[Asked]
    completions: list[list[Completion]]

    @property
    def pairs(self) -> list[tuple[Prompt, Sequence[Completion]]]:
        return [(asked.prompt, made) for asked, made in zip(self.asked, self.completions, strict=True)]


def sample(
    generator: Generator, engine: Engine, asked: Sequence[Asked], step: int, samples: int, seq_len: int
) -> Sampled:
    """Continue this rank's share of a step's prompts; seeds are of (seed, step, prompt, sample)."""
    share = len(asked) // engine.mesh.degrees.dp
    first = engine.mesh.dp_rank * share
    seeds = [
        [derive(engine.settings.seed, "sample", step, number, one) for one in range(samples)]
        for number in range(first, first + share)
    ]
    return _continued(generator, asked[first : first + share], seeds, seq_len)


def _continued(
    generator: Generator,
    asked: Sequence[Asked],
    seeds: list[list[int]],
    seq_len: int,
    *,
    greedy: bool = False,
) -> Sampled:
    limits = [seq_len + 1 - len(one.tokens) for one in asked]
    made = generator.sample([one.tokens for one in asked], seeds, limits, greedy=greedy)
    _check_made(made, [len(row) for row in seeds], type(generator).__name__)
    return Sampled(list(asked), made)


def _check_made(made: Any, wanted: list[int], name: str) -> None:
    """
    Raises:
        TitanError: what a generator returned is not each prompt's completions, one for each seed.
    """
    if not isinstance(made, Sequence) or not all(isinstance(row, Sequence) for row in made):
        raise TitanError(
            f"the generator {name} returned a {type(made).__name__} that is not a list of lists",
            hint="sample(...) returns for each prompt a list of its completions, one for each seed",
        )
    if (found := [len(row) for row in made]) != wanted:
        raise TitanError(
            f"the generator {name} returned {found} completions for the prompts of this rank, which have "
            f"{wanted} seeds"
        )
    if wrong := [type(one).__name__ for row in made for one in row if not isinstance(one, Completion)]:
        raise TitanError(
            f"the generator {name} returned a {wrong[0]} as a completion",
            hint="it must be a titancli.protocols.samples.Completion",
        )


# ------------------------------------------------------------------------------------------------ rollouts


class Rollouts:
    """The samples of this rank in a step, with their scores."""

    def __init__(self, sampled: Sampled, scores: list[list[Score]], config: Grpo) -> None:
        self._sampled, self._scores, self._config = sampled, scores, config
        self.rewards = torch.tensor([[one.total for one in row] for row in scores], dtype=torch.float64)
        """[prompts, samples], float64, on the CPU."""
        self.counted = torch.tensor([[_counts(one, config) for one in row] for row in scores])
        """[prompts, samples] bool: what the policy for failed rewards leaves in."""
        self.advantages = torch.zeros_like(self.rewards)
        self.worked: dict[str, int] = {}
        """By reward, how often it gave a number, over all ranks; `metrics` counts."""
        self.failing: set[str] = set()
        """Rewards that failed on some rank; `metrics` counts."""

    def rate(self, advantage: Advantage) -> None:
        """Take the advantages of the rewards.

        Raises:
            TitanError: they are not one finite number for each sample.
        """
        found = advantage(self.rewards.clone(), self.counted.clone())
        name = getattr(advantage, "__name__", type(advantage).__name__)
        wanted = list(self.rewards.shape)
        if not isinstance(found, Tensor) or list(found.shape) != wanted:
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise TitanError(
                f"the advantage {name} returned {what}, not a tensor [prompts, samples], which is {wanted}"
            )
        if not bool(torch.where(self.counted, found, 0.0).isfinite().all()):
            raise TitanError(f"the advantage {name} returned a number that is not finite")
        self.advantages = found

    def samples(self, first: int, count: int) -> list[Sample]:
        """Return the samples of `count` prompts to learn from; those with an advantage of 0 count in averages
        too."""
        found = []
        for number in range(first, first + count):
            asked, made = self._sampled.asked[number], self._sampled.completions[number]
            for sample, completion in enumerate(made):
                if self.counted[number, sample]:
                    advantage = float(self.advantages[number, sample])
                    found.append(Sample(asked.tokens, completion.tokens, completion.logprobs, advantage))
        return found

    def metrics(self, engine: Engine, names: Sequence[str]) -> dict[str, float]:
        """Over all ranks."""
        made = [completion for row in self._sampled.completions for completion in row]
        scores = [score for row in self._scores for score in row]
        counted = self.counted.double()
        rewards = self.rewards * counted
        spread = torch.where(self.counted, self.rewards, torch.nan)
        sums: dict[str, float] = {
            "counted": counted.sum().item(),
            "reward": rewards.sum().item(),
            "square": rewards.square().sum().item(),
            "solved": (self.counted & (self.rewards >= self._config.solved - ROUNDING)).double().sum().item(),
            "groups": float(len(self.rewards)),
            "zero_std_groups": float(sum(bool(_all_alike(row)) for row in spread)),
            "made": float(len(made)),
            "response_length": float(sum(len(completion.tokens) for completion in made)),
            "truncated": float(sum(completion.finish == "length" for completion in made)),
            "reward_failed": float(sum(len(score.failed) for score in scores)),
        }
        for name in names:
            found = [score.rewards[name] for score in scores if name in score.rewards]
            sums |= {f"reward/{name}": float(sum(found)), f"count {name}": float(len(found))}
        sums = _summed(sums, engine)
        self.worked = {name: round(sums[f"count {name}"]) for name in names}
        self.failing = {name for name in names if sums[f"count {name}"] < sums["made"]}
        return _averages(sums, names)

    def save(self, recorder: Recorder, step: int, engine: Engine) -> None:
        """Those of all ranks, on rank 0. Collective."""
        mine = [self._row(step, number) for number in range(len(self.rewards))]
        everyones = Ranks(engine.mesh.dp_group).gather(mine)
        if dist.get_rank() == 0:
            recorder.write(step, [row for rows in everyones for row in rows])

    def _row(self, step: int, number: int) -> dict[str, Any]:
        prompt = self._sampled.asked[number].prompt
        samples = [
            {
                "text": completion.text,
                "tokens": len(completion.tokens),
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
        return {"step": step, "prompt": prompt.text, "answer": prompt.answer, "samples": samples}


def _counts(score: Score, config: Grpo) -> bool:
    """Return whether the policy for failed rewards keeps a completion."""
    return config.failed_reward == "zero" or not score.failed


def _all_alike(row: Tensor) -> bool:
    kept = row[~row.isnan()]
    return len(kept) == 0 or bool(kept.max() - kept.min() < ROUNDING)


def _summed(sums: dict[str, float], engine: Engine) -> dict[str, float]:
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


# ------------------------------------------------------------------------------------------------ learning


class Learner:
    """Makes of rollouts the micro-batches of each update."""

    def __init__(self, config: Grpo, engine: Engine, run: Run) -> None:
        self._updates, self._engine, self._shape = config.updates, engine, run.batch_shape
        wanted = "reference_logprobs" in with_defaults(LossDefaults, engine.loss).needs
        self._reference = Reference(engine, run) if wanted else None

    def minibatches(self, rollouts: Rollouts) -> Iterator[list[Batch]]:
        """One list an update; as many micro-batches in it on every rank. Collective."""
        prompts = len(rollouts.rewards) // self._updates
        for number in range(self._updates):
            yield self._batches(rollouts.samples(number * prompts, prompts))

    def _batches(self, samples: list[Sample]) -> list[Batch]:
        size, length = self._shape
        rows = rows_of(samples, length)
        batches = []
        for number in range(self._most(max(1, -(-len(rows) // size)))):
            batch = pack(rows[number * size : (number + 1) * size], length, size).to(self._engine.device)
            if self._reference is not None:
                batch = Batch({**batch, "reference_logprobs": self._reference.log_probs(batch)})
            batches.append(batch)
        return batches

    def _most(self, count: int) -> int:
        """Over all data-parallel ranks."""
        if self._engine.mesh.degrees.dp == 1:
            return count
        most = torch.tensor(count, device=self._engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._engine.mesh.dp_group)
        return int(most.item())


# ---------------------------------------------------------------------------------------------- evaluation


class Evaluation:
    """The most probable completions of prompts that are held still, scored now and then."""

    def __init__(
        self,
        config: Grpo,
        engine: Engine,
        data: PromptSource,
        tokenizer: Any,
        generator: Generator,
        scorer: Scorer,
        seq_len: int,
    ) -> None:
        self._config, self._engine, self._generator, self._scorer = config, engine, generator, scorer
        self._seq_len = seq_len
        self._asked: list[Asked] = []
        if config.eval_freq:
            if config.eval_task is not None:
                task = build(config.eval_task, seed=engine.settings.seed)
                data = PromptSource(task, tokenizer, longest=seq_len)
            every = data.first(config.eval_prompts)
            self._asked = every[engine.mesh.dp_rank :: engine.mesh.degrees.dp]

    def due(self, step: int, last: int) -> bool:
        """Every so many steps, and after the last."""
        freq = self._config.eval_freq
        return freq > 0 and (step % freq == 0 or step == last)

    def __call__(self) -> tuple[dict[str, float], float]:
        """`eval_reward`, `eval_solved` and `eval_reward_failed` over all ranks, and the seconds that it took.
        Collective."""
        with phase("evaluation"):
            return self._evaluated()

    def _evaluated(self) -> tuple[dict[str, float], float]:
        began, seeds = time.perf_counter(), [[0] for _ in self._asked]
        sampled = _continued(self._generator, self._asked, seeds, self._seq_len, greedy=True)
        scores = [score for row in self._scorer.score(sampled.pairs) for score in row]
        totals = [score.total for score in scores if _counts(score, self._config)]
        solved = float(sum(total >= self._config.solved - ROUNDING for total in totals))
        failed = float(sum(len(score.failed) for score in scores))
        sums = {"count": float(len(totals)), "reward": sum(totals), "solved": solved, "failed": failed}
        sums = _summed(sums, self._engine)
        found = {f"eval_{name}": sums[name] / max(sums["count"], 1.0) for name in ("reward", "solved")}
        found["eval_reward_failed"] = sums["failed"]
        return found, time.perf_counter() - began
