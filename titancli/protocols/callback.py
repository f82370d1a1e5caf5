"""Hooks in the steps of an engine, and in a run. A callback of a recipe may be both.

All methods are optional. Every rank has the same hooks and calls them in the same order; so a hook may call
collectives, as long as it does so on every rank. In a `StepHook` `step` is a `titancli.engine.step.Step` and
`backward` a `titancli.engine.step.Backward`; `run` is a `titancli.loops.run.Run`, whose `data` are there from
`run_start` on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class StepHook(Protocol):
    """Takes part in optimizer steps.

    What it raises ends the verb on every rank: in `around_backward` the gradients of the step are discarded,
    later the engine is unusable until `load`. `engine.forward` and `engine.evaluate` can be called in it.
    Random numbers drawn in `step_applied` are those of the step.
    """

    def around_backward(self, backward: Any) -> AbstractContextManager[None] | None:
        """Return a context for a backward pass, or None. `backward.batches` and `backward.loss` are the
        inputs of the step; `backward.compute()` computes it once more."""

    def gradients_ready(self, step: Any) -> bool | Tensor | None:
        """Look at the gradients of a step: sums, to be divided by `step.weight`, not clipped yet; leave them
        as they are. True, or a tensor that is not 0, on any rank vetoes the step on all of them: it is then
        counted, but skipped."""

    def step_applied(self, step: Any) -> Mapping[str, Tensor | float] | None:
        """Look at a step after its end, and return metrics: names with numbers, the same on every rank.
        `step.skipped` is 1.0 if it was skipped."""


class StepHookDefaults:
    """The state of a hook in checkpoints, under its `name` (by default that of its class)."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors to save and to load into; those that are sharded like a parameter are put
        on any other layout as parameters are."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the rest as plain JSON."""
        return {}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Continue from `state`, after `tensors` were filled. None: other weights were loaded, and no state
        of this hook came with them."""


class RunHook(Protocol):
    """Takes part in a run, in the thread of its loop. What it raises ends the run."""

    def run_start(self, step: int) -> None:
        """Act before the loop begins, after `step` steps."""

    def step_done(self, step: int) -> None:
        """Act after a step, when its metrics are reported. Any verb of the engine can be called.
        `run.end_early("why")` on any rank lets it be the last one."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """`[validation]` was evaluated, after `step` steps: its metrics by name, `validation/NAME/loss`.
        A run that is resumed at a step with an evaluation has it done once more. Collectives can be
        called."""

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """Act on a complete checkpoint."""

    def stop_requested(self, signal: str) -> None:
        """Act on a signal that has come on any rank: the run saves and ends."""

    def run_end(self, why: str) -> None:
        """Act after the loop has ended without an error and its last checkpoint is complete: `finished`,
        `stopped`, `interrupted` or `data_ended`."""

    def close(self, error: BaseException | None) -> None:
        """Release what the callback holds, when the run is over on this rank, after `run_end` or because of
        an error; those added last are called first. Other ranks may be gone: no collectives."""


class RunHookDefaults:
    """An optional number that the ranks of a run agree on for a hook, before each step."""

    def poll(self) -> int:
        """Return a number of 0 or more, such as a request to this rank."""
        return 0

    def before_step(self, step: int, agreed: int) -> None:
        """Another step begins, after `step` of them; `agreed` is the largest number of any rank."""


class Callback(StepHook, RunHook, Protocol):
    """Takes part in steps and in the run, by any of these methods."""


class CallbackBuilder(Protocol):
    def __call__(self, config: Any, *, engine: Any, run: Any) -> Callback:
        """Build the callback of this rank, before the first step; a checkpoint is loaded after it."""
        ...
