"""The steps of the GRPO loop after sampling: micro-batches to learn from, and evaluations."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titancli.errors import RecipeError
from titancli.loops.grpo_rollouts import ROUNDING, Rollouts, continued, counts, summed
from titancli.loops.reference import Reference
from titancli.observe.phases import phase
from titancli.protocols import LossDefaults
from titancli.protocols.batch import Batch
from titancli.registry.component import build
from titancli.registry.defaults import with_defaults
from titancli.rl.packing import Sample, pack, rows_of
from titancli.rl.prompts import Asked, PromptSource

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.loops import Grpo
    from titancli.loops.run import Run
    from titancli.protocols import Generator
    from titancli.rl.scoring import Scorer


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


# ------------------------------------------------------------------------------------------------ learning


class Learner:
    """Makes of rollouts the micro-batches of each update."""

    def __init__(self, config: Grpo, engine: Engine, run: Run) -> None:
        self._updates, self._passes = config.updates, config.passes
        self._engine, self._shape = engine, run.batch_shape
        needs = with_defaults(LossDefaults, engine.loss).needs
        self._reference = Reference(engine, run) if "reference_logprobs" in needs else None
        self._importance = "sampler_logprobs" in needs

    def minibatches(self, rollouts: Rollouts) -> Iterator[list[Batch]]:
        """One list an update; as many micro-batches in it on every rank. Collective."""
        prompts = len(rollouts.rewards) // self._updates
        samples = (rollouts.samples(number * prompts, prompts) for number in range(self._updates))
        parts: Iterable[list[Batch]] = map(self._batches, samples)
        if self._importance or self._passes > 1:  # with the weights that sampled, before they change
            parts = list(parts)
        for _ in range(self._passes):
            yield from parts

    def _batches(self, samples: list[Sample]) -> list[Batch]:
        size, length = self._shape
        rows = rows_of(samples, length)
        batches = []
        for number in range(self._most(max(1, -(-len(rows) // size)))):
            batch = pack(rows[number * size : (number + 1) * size], length, size).to(self._engine.device)
            if self._reference is not None:
                batch = Batch({**batch, "reference_logprobs": self._reference.log_probs(batch)})
            if self._importance:
                own = self._engine.forward(batch)
                batch = Batch({**batch, "sampler_logprobs": batch["old_logprobs"], "old_logprobs": own})
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
