"""When a run of the GRPO loop has failed because its rewards have."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titancli.distributed.together import Ranks
from titancli.errors import TitanError

if TYPE_CHECKING:
    from titan_rl.rollouts import Rollouts
    from titan_rl.scoring import Scorer
    from titancli.engine import Engine

logger = logging.getLogger(f"titancli.plugins.{__name__}")


FLAT = 10
"""Samplings in a row with nothing to learn from their rewards after which this is reported."""


class Failures:
    """Ends a run whose rewards, or whose completions, say nothing, or leave no sample. The same on every
    rank."""

    def __init__(self, scorer: Scorer, most: int, engine: Engine, *, most_without: int = 10) -> None:
        """
        Args:
            most: samplings in a row without a reward, or with empty completions, that end a run.
            most_without: the same without a sample to learn from.
        """
        self._scorer, self._most, self._mesh = scorer, most, engine.mesh
        self._most_without = most_without
        self._shared: set[str] = set()
        self._in_a_row = self._empty_in_a_row = self._without_in_a_row = self._flat_in_a_row = 0
        self._told_flat = False
        self._why = ""
        self._last = 0
        self._never = set(scorer.names)

    def count(self, rollouts: Rollouts, step: int) -> None:
        """Take note of what led to a step, and report what failed for the first time, on whatever rank, and
        where every reward of it failed. Collective."""
        if rollouts.failing - self._shared and self._mesh.degrees.dp > 1:
            everyones = Ranks(self._mesh.dp_group).gather(dict(self._scorer.first_failures))
            for name, why in (item for own in everyones for item in own.items()):
                self._scorer.warn(name, why)
        self._shared |= rollouts.failing
        worked = {name for name, times in rollouts.worked.items() if times}
        self._never -= worked
        self._last = step
        self._in_a_row = 0 if worked else self._in_a_row + 1
        if not worked:
            logger.warning("step %d: every reward failed, so no sample has an advantage", step)
        self._empty_in_a_row = self._empty_in_a_row + 1 if rollouts.all_empty else 0
        if rollouts.all_empty:
            logger.warning("step %d: every completion is empty, so there is nothing to learn from", step)
        self._without_in_a_row = self._without_in_a_row + 1 if rollouts.left_out else 0
        if rollouts.left_out:
            self._why = ", ".join(f"{count} {words}" for words, count in rollouts.left_out.items())
            logger.warning("step %d has no sample to learn from: of its completions %s", step, self._why)
        self._flat_in_a_row = self._flat_in_a_row + 1 if rollouts.flat else 0
        if self._flat_in_a_row == FLAT and not self._told_flat:
            self._told_flat = True
            logger.warning(
                "the rewards of each prompt were equal in %d samplings in a row, up to step %d, so there is "
                "nothing to learn from them: use prompts that the model solves sometimes, more samples, or a "
                "reward with more levels; `titan rollouts RUN` shows them",
                FLAT,
                step,
            )

    @property
    def too_many(self) -> bool:
        most = max(self._in_a_row, self._empty_in_a_row)
        return most >= self._most or self._without_in_a_row >= self._most_without

    def verdict(self, why: str) -> TitanError | None:
        """Why the run has failed, if so; a reward that never gave a number is no reward.

        Args:
            why: how the run ended, see `Run`. One that is stopped may go on, and is not judged.
        """
        if self._empty_in_a_row >= self._most:
            times = f"{self._empty_in_a_row} samplings in a row, up to step {self._last}"
            return TitanError(
                f"every completion was empty in {times}",
                hint="the model ends at once: check the prompt's format (chat = true?), the tokenizer's end "
                "marker and the generator, then resume with --resume; `titan rollouts RUN` shows them",
            )
        hint = "fix the reward and resume with --resume; `titan rollouts RUN` shows each failure"
        if self._in_a_row >= self._most:
            found = f"every reward failed in {self._in_a_row} samplings in a row, up to step {self._last}"
            return TitanError(found + self._first(self._scorer.names), hint=hint)
        if why in ("finished", "data_ended") and self._last and self._never:
            names = sorted(self._never)
            them = f"reward {names[0]}" if len(names) == 1 else f"rewards {', '.join(names)}"
            return TitanError(f"the {them} failed each time" + self._first(names), hint=hint)
        if self._without_in_a_row >= self._most_without:
            times = f"{self._without_in_a_row} samplings in a row, up to step {self._last}"
            return TitanError(
                f"no sample was left to learn from in {times}: of the last completions {self._why}",
                hint="raise loop.generator.max_new_tokens, fix the reward, or change loop.mask_truncated or "
                "loop.failed_reward; then resume with --resume",
            )
        return None

    def _first(self, names: Sequence[str]) -> str:
        first = self._scorer.first_failures
        return "".join(f"\n  {name}: {first[name]}" for name in names if name in first)
