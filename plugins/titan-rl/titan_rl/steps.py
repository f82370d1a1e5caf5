"""The steps of the GRPO loop after sampling: what is learned from, and evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titan_rl.rollouts import ROUNDING, Rollouts, counts, summed
from titan_rl.sampled import continued
from titancli import phase
from titancli.errors import RecipeError, TitanError
from titancli.loops.reference import Reference
from titancli.registry.component import build
from titancli.rl.prompts import PromptSource, TokenizedPrompt

if TYPE_CHECKING:
    from torch import Tensor

    from titan_rl import GrpoLoop
    from titan_rl.scoring import Scorer
    from titancli.engine import Engine
    from titancli.loops.run import Run
    from titancli.protocols import Advantage, Generator
    from titancli.protocols.samples import Sample

    OfTokens = Callable[[list[Sample], Callable[[Tensor], Tensor]], list[Sample]]


def check_fits(config: GrpoLoop, dp: int) -> None:
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


# ------------------------------------------------------------------------------------------------ learning


class Learner:
    """Makes of rollouts the samples of each update, and learns from them."""

    def __init__(self, config: GrpoLoop, engine: Engine, run: Run, advantage: Advantage) -> None:
        self._updates, self._passes, self._engine = config.updates, config.passes, engine
        self._advantage = advantage
        rows, length = run.batch_shape
        self._how: dict[str, Any] = {"budget": rows * length, "shared": False}
        needs = engine.loss.needs
        referring = "reference_logprobs" in needs or config.advantage.needs_reference
        self._reference = Reference(engine, run) if referring else None
        self._importance = "sampler_logprobs" in needs

    def minibatches(self, rollouts: Rollouts) -> Iterator[list[Sample]]:
        """Yield one list for each update. Collective."""
        prompts = len(rollouts.rewards) // self._updates
        samples = (rollouts.samples(number * prompts, prompts) for number in range(self._updates))
        parts: Iterable[list[Sample]] = map(self._measured, samples)
        # With the weights that sampled, before they change:
        if self._advantage.of_tokens is not None:
            parts = self._rated(list(parts), self._advantage.of_tokens)
        elif self._importance or self._passes > 1:
            parts = list(parts)
        for _ in range(self._passes):
            yield from parts

    def _measured(self, samples: list[Sample]) -> list[Sample]:
        """With the log-probabilities of other models that the loss reads."""
        how = {**self._how, "temperature": self._engine.loss.temperature}
        if self._reference is not None:
            # Of routes of its own: it is what the reference would say, not what it would say as the sampler.
            found = self._reference.log_probs([replace(one, routes=None) for one in samples], **how)
            samples = [replace(one, reference=own) for one, own in zip(samples, found, strict=True)]
        if self._importance:
            found = self._engine.forward(samples, **how)
            samples = [
                replace(one, logprobs=own, extra={"sampler_logprobs": one.logprobs or ()})
                for one, own in zip(samples, found, strict=True)
            ]
        return samples

    def _rated(self, parts: list[list[Sample]], of_tokens: OfTokens) -> list[list[Sample]]:
        """Return the samples of each update with advantages for each token.

        Raises:
            TitanError: the advantage returned another number of samples.
        """
        valued = []
        for samples in parts:
            how = {**self._how, "temperature": self._engine.loss.temperature}
            found = self._engine.forward(samples, return_values=True, **how)
            valued += [
                replace(one, extra={**one.extra, "old_values": own})
                for one, own in zip(samples, found, strict=True)
            ]
        rated = of_tokens(valued, self._over_ranks)
        if len(rated) != len(valued):
            name = type(self._advantage).__name__
            raise TitanError(
                f"the advantage {name} returned {len(rated)} samples for {len(valued)}",
                hint="of_tokens must return those that it is given, in the same order",
            )
        left = iter(rated)
        return [list(islice(left, len(samples))) for samples in parts]

    def _over_ranks(self, numbers: Tensor) -> Tensor:
        if self._engine.dp_size == 1:
            return numbers
        total = numbers.to(self._engine.device, copy=True)
        dist.all_reduce(total, group=self._engine.mesh.dp_group)
        return total.cpu()

    def step(self, samples: list[Sample]) -> dict[str, Any]:
        """Learn from samples, and return the metrics of the step. Collective."""
        return self._engine.forward_backward(samples, **self._how).metrics | self._engine.optim_step()


# ---------------------------------------------------------------------------------------------- evaluation


class Evaluation:
    """The most probable completions of prompts that are held still, scored now and then."""

    def __init__(
        self,
        config: GrpoLoop,
        engine: Engine,
        data: PromptSource,
        tokenizer: Any,
        generator: Generator,
        scorer: Scorer,
        seq_len: int,
    ) -> None:
        self._config, self._engine, self._generator, self._scorer = config, engine, generator, scorer
        self._seq_len = seq_len
        self._asked: list[TokenizedPrompt] = []
        if config.eval_freq:
            if config.eval_task is not None:
                task = build(config.eval_task, seed=engine.settings.seed)
                data = PromptSource(task, tokenizer, longest=seq_len)
                data.require(scorer.refuses, strict=getattr(config.eval_task, "strict", False))
            every = data.first(config.eval_prompts)
            self._asked = every[engine.mesh.dp_rank :: engine.mesh.degrees.dp]

    def due(self, step: int, last: int) -> bool:
        """Return whether an evaluation is due: at intervals, and after the last step."""
        freq = self._config.eval_freq
        return freq > 0 and (step % freq == 0 or step == last)

    def __call__(self) -> tuple[dict[str, float], float]:
        """`eval_reward`, `eval_solved` and `eval_reward_failed` over all ranks, and the seconds that it took.
        Collective."""
        with phase("evaluation"):
            return self._evaluated()

    def _evaluated(self) -> tuple[dict[str, float], float]:
        began, seeds = time.perf_counter(), [[0] for _ in self._asked]
        sampled = continued(self._generator, self._asked, seeds, self._seq_len, greedy=True)
        scores = [score for row in self._scorer.score(sampled.pairs) for score in row]
        totals = [score.total for score in scores if counts(score, self._config)]
        solved = float(sum(total >= self._config.solved - ROUNDING for total in totals))
        failed = float(sum(len(score.failed) for score in scores))
        sums = {"count": float(len(totals)), "reward": sum(totals), "solved": solved, "failed": failed}
        sums = summed(sums, self._engine)
        found = {f"eval_{name}": sums[name] / max(sums["count"], 1.0) for name in ("reward", "solved")}
        found["eval_reward_failed"] = sums["failed"]
        return found, time.perf_counter() - began
