"""Rewards of completions: a failed reward is counted and reported, and never ends a run.

A reward fails if it raises, exceeds its time limit, or returns something that is not a finite number. An
alarm in the main thread enforces the limit; it interrupts Python code, waits and regular expressions, so a
reward needs no separate process. Rewards that are `async def` wait concurrently.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import traceback
import types
from collections import Counter
from collections.abc import Awaitable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from titan_rl import PATIENCE
from titancli.protocols.rl import NoNumber, number_of
from titancli.protocols.samples import Completion, Prompt
from titancli.registry.component import build, component_info
from titancli.registry.error_source import blame

logger = logging.getLogger(f"titancli.plugins.{__name__}")

SKIPPED = f"skipped: timed out {PATIENCE} times in this step"
AGAIN = 1.0
"""Seconds after which the alarm rings again, for code that ignores it."""


@dataclass(frozen=True)
class Score:
    """The rewards of one completion."""

    rewards: dict[str, float] = field(default_factory=dict)
    """Unweighted rewards by name, without those that failed."""
    failed: dict[str, str] = field(default_factory=dict)
    """Failures by name of the reward, in words."""
    total: float = 0.0
    """Σ weight · reward, with failed rewards as 0."""


class _Weighted(NamedTuple):
    name: str
    weight: float
    reward: Any


class _Waiting(NamedTuple):
    """The call of a reward that is `async def`, and where its result or failure is stored."""

    name: str
    answer: Awaitable[Any]
    rewards: dict[str, float]
    failed: dict[str, str]


class _TooLong(BaseException):
    """A timeout; not an Exception, which a reward might catch."""


class Scorer:
    """Calls every reward for every completion."""

    def __init__(self, configs: Sequence[Any], seconds: float, concurrency: int = 64) -> None:
        """Build the rewards; `seconds` is the time limit of a call, `concurrency` the number of concurrent
        calls of rewards that are `async def`."""
        self._rewards: list[_Weighted] = []
        self._seconds, self._concurrency = seconds, concurrency
        self._loop: asyncio.AbstractEventLoop | None = None
        """Created when the first reward waits, and kept: clients of rewards may belong to it."""
        self.first_failures: dict[str, str] = {}
        """The first failure of each reward, by name, in words."""
        count: Counter[str] = Counter()
        for config in configs:
            name = component_info(config).name
            count[name] += 1
            label = name if count[name] == 1 else f"{name}_{count[name]}"
            self._rewards.append(_Weighted(label, float(config.weight), build(config)))

    @property
    def names(self) -> list[str]:
        """The names of the rewards; repeated names are numbered."""
        return [reward.name for reward in self._rewards]

    def refuses(self, prompt: Prompt) -> str | None:
        """Return why some reward cannot rate completions of a prompt; None if all can."""
        for name, _, reward in self._rewards:
            refuses = getattr(reward, "refuses", None)  # bound methods and the like take no defaults
            if refuses is not None and (why := refuses(prompt)) is not None:
                return f"the reward {name} cannot rate it: {why}"
        return None

    def score(self, asked: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[Score]]:
        """Return the scores of each prompt's completions."""
        late: Counter[str] = Counter()
        waiting: list[_Waiting] = []
        with _Alarm() as alarm:
            found = [
                [self._one(prompt, completion, late, alarm, waiting) for completion in completions]
                for prompt, completions in asked
            ]
            if waiting:
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                self._loop.run_until_complete(self._answers(waiting, late, alarm))
        return [[replace(score, total=self._total(score.rewards)) for score in row] for row in found]

    def _one(
        self,
        prompt: Prompt,
        completion: Completion,
        late: Counter[str],
        alarm: _Alarm,
        waiting: list[_Waiting],
    ) -> Score:
        """Return the rewards of a completion; calls that wait are added to `waiting`, and fill in their
        reward later."""
        score = Score()
        for name, _, reward in self._rewards:
            if late[name] >= PATIENCE:
                score.failed[name] = SKIPPED
                continue
            with self._failing(name, score.failed, late, alarm):
                with alarm.limit(self._seconds):
                    value = reward(prompt, completion)
                    if not inspect.isawaitable(value):
                        score.rewards[name] = number_of(value)
                if inspect.isawaitable(value):
                    waiting.append(_Waiting(name, value, score.rewards, score.failed))
        return score

    async def _answers(self, waiting: Sequence[_Waiting], late: Counter[str], alarm: _Alarm) -> None:
        """Wait for all calls, `concurrency` at a time, each within its limit."""
        free = asyncio.Semaphore(self._concurrency)

        async def answer(one: _Waiting) -> None:
            async with free:
                if late[one.name] >= PATIENCE:
                    one.failed[one.name] = SKIPPED
                    if inspect.iscoroutine(one.answer):
                        one.answer.close()  # otherwise Python warns that it was never awaited
                    return
                with self._failing(one.name, one.failed, late, alarm):
                    one.rewards[one.name] = number_of(await _within(self._seconds, one.answer, alarm))

        await asyncio.gather(*map(answer, waiting))

    @contextmanager
    def _failing(
        self, name: str, failed: dict[str, str], late: Counter[str], alarm: _Alarm
    ) -> Iterator[None]:
        """Record a failure of the reward called in the block; the first one is reported."""
        try:
            yield
            return
        except _TooLong:
            alarm.stop()  # it may have rung while being stopped
            late[name] += 1
            failed[name] = f"took longer than {self._seconds:g} s"
        except NoNumber as error:
            failed[name] = str(error)
        except (Exception, SystemExit) as error:
            failed[name] = f"{type(error).__name__}: {error}".removesuffix(": ") + _place(error)
        self.warn(name, failed[name])

    def _total(self, rewards: dict[str, float]) -> float:
        return sum(weight * rewards.get(name, 0.0) for name, weight, _ in self._rewards)

    def warn(self, name: str, why: str) -> None:
        """Report the first failure of a reward, here or on another rank."""
        if name not in self.first_failures:
            self.first_failures[name] = why
            logger.warning(
                "the reward %s failed: %s; further failures are only counted (reward_failed)", name, why
            )


async def _within(seconds: float, answer: Awaitable[Any], alarm: _Alarm) -> Any:
    """Await an answer.

    Raises:
        _TooLong: it takes longer, waiting or computing.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await _in_steps(answer, alarm, seconds)
    except TimeoutError:
        if limit.expired():
            raise _TooLong from None
        raise  # the reward's own error


@types.coroutine
def _in_steps(answer: Awaitable[Any], alarm: _Alarm, seconds: float) -> Generator[Any, Any, Any]:
    """Await an answer, with the alarm set while its own code runs: code that blocks delays all others, whose
    time continues."""
    steps: Any = answer.__await__()
    go: Any = partial(next, steps)
    while True:
        try:
            with alarm.limit(seconds):
                waits_for = go()
        except StopIteration as end:
            return end.value
        try:
            sent = yield waits_for
        except BaseException as error:  # passed to the reward: a cancellation, for example
            go = partial(steps.throw, error)
        else:
            go = partial(next, steps) if sent is None else partial(steps.send, sent)


def _place(error: BaseException) -> str:
    """Return where a reward raised: the last line of its plugin, or the last outside titan."""
    found = blame(error)
    if found is not None and os.path.abspath(found.place.rpartition(":")[0]) != os.path.abspath(__file__):
        return f" ({found.place})"
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return (
        f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    )


class _Alarm:
    """Raises _TooLong in the main thread a given time after `start`, unless stopped."""

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
        # Set each time: rewards with their own alarm (math_verify) leave another handler, or none,
        # with which the alarm would end the process.
        signal.signal(signal.SIGALRM, self._ring)
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Limit the time of the block."""
        self.start(seconds)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
