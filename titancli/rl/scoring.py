"""Rewards of completions: one that fails is counted and reported, and never ends a run.

A reward fails when it raises, takes longer than its time, or returns what is no finite number. Time is kept
by an alarm in the main thread, which reaches Python code, waiting, and regular expressions; so a reward needs
no process of its own.
"""

from __future__ import annotations

import logging
import math
import signal
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from titancli.protocols.samples import Completion, Prompt
from titancli.registry.blame import blame
from titancli.registry.component import build, component_info
from titancli.registry.defaults import RewardConfigDefaults, with_defaults
from titancli.rl import PATIENCE

logger = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds after which the alarm rings once more, for code that takes no notice of it."""


@dataclass(frozen=True)
class Score:
    """The rewards of one completion."""

    rewards: dict[str, float] = field(default_factory=dict)
    """By reward, unweighted; those that failed are not here."""
    failed: dict[str, str] = field(default_factory=dict)
    """By reward, in words."""
    total: float = 0.0
    """Σ weight · reward, a failed one counting 0."""


class _Weighted(NamedTuple):
    name: str
    weight: float
    reward: Any


class _TooLong(BaseException):
    """Not an Exception, which a reward may well catch."""


class Scorer:
    """Asks every reward about every completion."""

    def __init__(self, configs: Sequence[Any], seconds: float) -> None:
        """`seconds`: what one call of a reward may take."""
        self._rewards: list[_Weighted] = []
        self._seconds = seconds
        self.first_failures: dict[str, str] = {}
        """By reward, in words: how it failed first."""
        count: Counter[str] = Counter()
        for config in configs:
            name = component_info(config).name
            count[name] += 1
            label = name if count[name] == 1 else f"{name}_{count[name]}"
            self._rewards.append(
                _Weighted(label, float(with_defaults(RewardConfigDefaults, config).weight), build(config))
            )

    @property
    def names(self) -> list[str]:
        """Return the names of the rewards; the second of a name has a number."""
        return [reward.name for reward in self._rewards]

    def score(self, asked: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[Score]]:
        """The scores of each prompt's completions."""
        late: Counter[str] = Counter()
        with _Alarm() as alarm:
            return [
                [self._one(prompt, completion, late, alarm) for completion in completions]
                for prompt, completions in asked
            ]

    def _one(self, prompt: Prompt, completion: Completion, late: Counter[str], alarm: _Alarm) -> Score:
        rewards, failed = {}, {}
        for name, _, reward in self._rewards:
            if late[name] >= PATIENCE:
                failed[name] = f"skipped: timed out {PATIENCE} times in this step"
                continue
            try:
                alarm.start(self._seconds)
                try:
                    rewards[name] = number_of(reward(prompt, completion))
                finally:
                    alarm.stop()
            except _TooLong:
                alarm.stop()  # it may have rung within the line above
                late[name] += 1
                failed[name] = f"took longer than {self._seconds:g} s"
            except NoNumber as error:
                failed[name] = str(error)
            except (Exception, SystemExit) as error:
                failed[name] = f"{type(error).__name__}: {error}".removesuffix(": ") + _place(error)
            if name in failed:
                self.tell(name, failed[name])
        total = sum(weight * rewards.get(name, 0.0) for name, weight, _ in self._rewards)
        return Score(rewards, failed, total)

    def tell(self, name: str, why: str) -> None:
        """Report how a reward failed first, here or on another rank."""
        if name not in self.first_failures:
            self.first_failures[name] = why
            logger.warning(
                "the reward %s failed: %s; further failures are only counted (reward_failed)", name, why
            )


class NoNumber(ValueError):
    """A reward returned something that is not a number."""


def number_of(value: Any) -> float:
    """Return what a reward returned as a number.

    Raises:
        NoNumber: it is none, or not finite.
    """
    if isinstance(value, (str, bytes)) or value is None:
        raise NoNumber(f"it returned {value!r}, which is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise NoNumber(f"it returned {number}")
    return number


def _place(error: BaseException) -> str:
    """Return where a reward raised: the last line of its plugin, or the last outside titan's own call."""
    if (found := blame(error)) is not None:
        return f" ({found.place})"
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return (
        f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    )


class _Alarm:
    """Raises _TooLong in the main thread some time after its `start`, and before its `stop`."""

    def __init__(self) -> None:
        self._armed = False
        self._before: Any = None

    def __enter__(self) -> _Alarm:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        signal.signal(signal.SIGALRM, signal.SIG_DFL if self._before is None else self._before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            raise _TooLong

    def start(self, seconds: float) -> None:
        # Again each time: rewards that keep time themselves (math_verify) leave another handler, or none,
        # with which the alarm would end the process.
        signal.signal(signal.SIGALRM, self._ring)
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)

    def stop(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
