"""A loop's view of its run: the number of steps, when to save, whether to stop."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from titancli.closing import CALLBACKS, ENDED, EVALUATION
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem
from titancli.loops.hooks import RunHooks
from titancli.observe.phases import phase
from titancli.signals import NODES_JOIN
from titancli.terminal import shell_path

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.checkpoint import Checkpointer
    from titancli.engine import Engine
    from titancli.errors import TitanError
    from titancli.loops.closing import Closing
    from titancli.loops.validation import Validation
    from titancli.protocols import Dataset
    from titancli.protocols.batch import Batch
    from titancli.recipe.schema import Recipe

logger = logging.getLogger(__name__)


class Stop(Protocol):
    """A request from outside, made by a signal."""

    requested: str | None
    """The signal's name, e.g. "SIGTERM"."""


class Watch(Protocol):
    """The counter of skipped steps; see `titancli.engine.skip_step.Guard`."""

    def too_many(self) -> bool: ...

    def verdict(self, saved: str | None) -> TitanError: ...


class Placed(Protocol):
    """Data with a position: the one after what was last used."""

    @property
    def state(self) -> dict[str, Any]: ...


class Source(Placed, Protocol):
    """Batches one after the other."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...


@dataclass
class Run:
    """One run of a loop. Its decisions are the same on every rank."""

    steps: int
    """Optimizer steps in all."""
    stop: Stop
    checkpoints: Checkpointer | None = None
    """None: nothing is saved."""
    gc_freq: int = 50
    save_or_stop: bool = False
    """True if the run ends when a checkpoint cannot be written."""
    guard: Watch | None = None
    """Asked before each step whether too many were skipped."""
    validation: Validation | None = None
    """Evaluates between steps and at the end; None: nothing is evaluated."""
    on_first_step: Callable[[], None] = lambda: None
    """Called once, after the first step of this process."""
    open_dataset: Callable[[Any], Dataset] | None = None
    """Builds a further dataset of the loop's own, in rows as the run's."""
    reference: Callable[[], Engine] | None = None
    """Builds the model that the run began with, frozen. Collective."""
    batch_shape: tuple[int, int] = (1, 1)
    """Rows of a micro-batch of one data-parallel rank, and tokens of a row."""
    folder: Path | None = None
    """The run folder, for what the loop itself writes there."""
    recipe: Recipe | None = None
    """The resolved recipe."""
    tokenizer: Any = None
    """The recipe's tokenizer; None without one."""
    data: Any = None
    """The loop's source of batches; None before `run_start` of hooks, and if the loop does not train."""
    hooks: RunHooks = field(default_factory=RunHooks)
    """The hooks that take part in the run."""
    closing: Closing | None = None
    """What is left after the last step; None: it is not recorded."""
    why: str = "finished"
    """The way it ended: finished, stopped, interrupted, data_ended or skipped (too many steps in a row)."""
    signal: str | None = None
    data_wait: float = 0.0
    """Seconds that the last `next_microbatches` waited for data."""
    saved_step: int | None = None
    """The step of the newest checkpoint."""
    steps_here: int = field(default=0, repr=False)
    """Steps since the run was started or resumed."""
    _stopped_at: float | None = field(default=None, repr=False)
    _early: str | None = field(default=None, repr=False)
    """The reason for which this rank wants the run to end after this step."""
    _agreed: Sequence[int] = field(default=(), repr=False)
    """The answers that the ranks agreed on, for each hook."""

    def should_continue(self, step: int) -> bool:
        """Return whether there is another step to do. All ranks agree on a signal that any of them got. If
        there is another step, and `[validation]` is due, it is evaluated here first.

        Raises:
            EnvironmentProblem: a checkpoint could not be written, and the recipe wants that to end the run.
        """
        if self.should_stop() or step >= self.steps:
            return False
        # An evaluation takes its time.
        evaluated = self.validation is not None and self.validation.between(step, self.asked_to_stop)
        if evaluated and self.should_stop():
            return False
        self.hooks.before_step(step, self._agreed)
        return True

    @property
    def has_ended(self) -> bool:
        """Return whether the run, once its loop is done, came to its end and was not stopped before."""
        return self.why in ENDED

    def asked_to_stop(self) -> bool:
        """Return whether this rank got a signal."""
        return self.stop.requested is not None

    def stopped_by(self, signal: str | None) -> None:
        """Let the run have ended because of a signal."""
        self.signal, self.why = signal, "interrupted" if signal == "SIGINT" else "stopped"

    def should_stop(self) -> bool:
        """Return whether a signal, or what went wrong, ends the run before the next step; `why` says which.
        Collective."""
        self.signal, failed, too_many, early = self._agree()
        if failed:  # on some rank; the others' threads are about to hear of it
            self._settle()
        if too_many:
            self.why = "skipped"
            return True
        if self.signal is not None:
            self.stopped_by(self.signal)
            self._stopped_at = time.monotonic()
            self.hooks.call("stop_requested", self.signal)
            return True
        if early and self._early:
            logger.info("the run ends early: %s", self._early)
        return early

    def end_early(self, reason: str) -> None:
        """End the run with the step that is done, if any rank wants it: the run saves, and has finished."""
        self._early = reason

    def next_microbatches(self, data: Source, count: int) -> list[Batch]:
        """Return the micro-batches of one step; fewer, or none, at the end of the data. A dataset has as many
        on every rank: if not, the next verb, or `finish`, raises on all of them."""
        began = time.perf_counter()
        with phase("data"):
            batches = list(itertools.islice(data, count))
        self.data_wait = time.perf_counter() - began
        if not batches:
            self.why = "data_ended"
        return batches

    def step_done(self, step: int) -> None:
        """Housekeeping between steps: garbage is collected here and nowhere else."""
        self.hooks.call("step_done", step)
        self.steps_here += 1
        if self.steps_here == 1:
            self.on_first_step()
        if self.steps_here == 1 or self.steps_here % self.gc_freq == 0:
            gc.collect()

    def checkpoint_due(self, step: int) -> bool:
        return self.checkpoints is not None and self.checkpoints.due(step)

    def save(self, engine: Engine, data: Placed) -> None:
        """Save everything that a resume needs. A failing disk is reported, and ends the training or not.

        Raises:
            EnvironmentProblem: as in `should_continue`.
        """
        self._settle()
        try:
            self._save(engine, data)
        except EnvironmentProblem as error:
            if self.save_or_stop:
                raise
            follows = self._what_follows(engine.step)
            logger.warning("step %d was not saved, %s: %s", engine.step, follows, error)

    def save_seed(self, engine: Engine, data: Placed) -> None:
        """Save what the run begins with, and wait until it is on the disk.

        Raises:
            EnvironmentProblem: it cannot be saved.
        """
        self._save(engine, data)
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def finish(self, engine: Engine, data: Placed) -> None:
        """Save the last step, if it has not been, and wait until it is on the disk; then evaluate it, unless
        an earlier attempt has.

        Raises:
            EnvironmentProblem: it cannot be saved.
            TitanError: it is saved, and the run ended because too many steps in a row were skipped. Or the
                data ended here, but not on every rank.
        """
        if self.why == "data_ended":  # another rank may be in the next step, and would wait for this one
            with engine.call("finish (its data have ended)").agreed():
                pass
        self._settle(ending=True)
        if self.checkpoints is not None and self.saved_step != engine.step and engine.step > 0:
            self._save(engine, data)
            self.checkpoints.wait()
        if self.guard is not None and self.why == "skipped":
            raise self.guard.verdict(f"checkpoints/step-{self.saved_step}" if self.checkpoints else None)
        is_last = self.saved_step == engine.step and (self.has_ended or engine.step >= self.steps)
        if self.closing is not None and is_last:
            why = self.why if self.has_ended else "finished"
            self.closing.begin(engine.step, why, anew=self.steps_here > 0)
        if self.validation is not None and (self.steps_here or self._is_left(EVALUATION)):
            self._evaluate_last(engine.step, self.validation)

    def _evaluate_last(self, step: int, validation: Validation) -> None:
        """Evaluate the last step; after a signal, only if there is time."""
        if not self.has_ended:
            if validation.at_end(step, self.asked_to_stop, stopped_at=self._stopped_at):
                self._done(EVALUATION)
            return
        self.close(EVALUATION, lambda: validation.at_end(step, self.asked_to_stop, stopped_at=None))

    @property
    def _is_closing(self) -> bool:
        """Return whether the last step is saved, and run.json says what is left."""
        return self.closing is not None and self.closing.began

    def _is_left(self, name: str) -> bool:
        return self.closing is not None and name in self.closing.left

    def close(self, name: str, work: Callable[[], bool]) -> None:
        """Do something that is left after the last step, and record it. If a signal comes before it is done,
        the run stops, and a resume does it. Collective.

        Args:
            work: returns whether it came to its end, which it does unless a signal came.
        """
        if self._is_closing and not self._is_left(name):
            return
        if self._goes_on_closing() and self.has_ended:
            if not all(Ranks().gather(work())):
                self.stopped_by(self._agree()[0])
            else:
                self._done(name)

    def _done(self, name: str) -> None:
        if self.closing is not None:
            self.closing.done(name)

    def _goes_on_closing(self) -> bool:
        """Return whether no signal asks to stop; otherwise the run has stopped. Nodes that join can wait."""
        signal = self._agree()[0] if self.has_ended else None
        if signal not in (None, NODES_JOIN.name):
            self.stopped_by(signal)
        return self.has_ended

    def end(self) -> None:
        """Let the hooks know that the loop has ended. Collective."""
        if self._is_left(CALLBACKS):
            self._goes_on_closing()
        self.hooks.call("run_end", self.why)
        if self.has_ended:
            self._done(CALLBACKS)

    def saved(self, step: int, path: Path) -> None:
        """Record that a checkpoint is complete, and call the hooks."""
        self.saved_step = step
        self.hooks.call("checkpoint_saved", step, path)

    def export(self, step: int, name: str, weights: Mapping[str, Tensor], adapters: Any = None) -> None:
        """Save weights, by the names of parameters, as `exports/step-N-NAME` in the run folder; where the run
        saves nothing, do nothing. `adapters`: what they are, if they are adapters alone. Collective.

        Raises:
            EnvironmentProblem: the disk is full, or cannot be written.
        """
        if self.checkpoints is None or self.folder is None:
            return
        path = self.folder / "exports" / f"step-{step}-{name}"
        if self._is_closing and not self._is_left(CALLBACKS):
            logger.info("weights only, as before: %s", shell_path(path))
            return
        state = {"engine": {"adapters": adapters}} if adapters else {}
        self.checkpoints.save_apart(path, {f"model.{key}": tensor for key, tensor in weights.items()}, state)
        logger.info("weights only: %s", shell_path(path))

    def save_named(self, name: str, engine: Engine, facts: Mapping[str, Any]) -> None:
        """Save all that a resume needs as `exports/step-N-NAME`, with facts about it, and let the link `NAME`
        in the run folder point there; what it pointed to before is deleted. No other save deletes it. Where
        the run saves nothing, do nothing. Collective.

        Raises:
            EnvironmentProblem: the disk is full, or cannot be written.
        """
        if self.checkpoints is None or self.folder is None:
            return
        with phase("save"):
            tensors, counters = engine.save_state()
            state = {"engine": counters, "data": self.data.state, name: dict(facts)}
            path = self.folder / "exports" / f"step-{engine.step}-{name}"
            self.checkpoints.save_named(self.folder / name, path, tensors, state)

    def _what_follows(self, step: int) -> str:
        ends = step >= self.steps or self.why != "finished" or self._early is not None
        return "a second try follows" if ends else "training continues"

    def _settle(self, ending: bool = False) -> None:
        """Wait for the save that is under way, and tell of it if it failed."""
        try:
            if self.checkpoints is not None:
                with phase("save"):
                    self.checkpoints.wait()
        except EnvironmentProblem as error:
            if self.save_or_stop:
                raise
            follows = "the last step is saved next" if ending else "training continues"
            logger.warning("a checkpoint could not be written, %s: %s", follows, error)

    def _save(self, engine: Engine, data: Placed) -> None:
        if self.checkpoints is not None:
            with phase("save"):
                tensors, counters = engine.save_state()
                self.checkpoints.save(engine.step, tensors, {"engine": counters, "data": data.state})

    def _agree(self) -> tuple[str | None, bool, bool, bool]:
        """Return the signal that some rank got; whether some rank knows of a save that failed, or of too many
        steps that were skipped; and whether one wants the run to end early."""
        requested = self.stop.requested
        failed = self.checkpoints is not None and self.checkpoints.failed
        too_many = self.guard is not None and self.guard.too_many()
        self._agreed = polled = self.hooks.poll()
        if dist.get_world_size() == 1:
            return requested, failed, too_many, self._early is not None
        number = _SIGNALS.index(requested) if requested in _SIGNALS else 0
        numbers = torch.tensor([number, int(failed), int(too_many), int(self._early is not None), *polled])
        with phase("wait"):
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        signal, *decided = numbers[:4].tolist()
        self._agreed = numbers[4:].tolist()
        failed, too_many, early = map(bool, decided)
        return _SIGNALS[signal], failed, too_many, early


@contextmanager
def garbage_between_steps() -> Iterator[None]:
    """Freeze existing objects, and disable automatic collection: `Run` collects garbage at the same steps on
    all ranks.

    If the caller has already frozen objects, they stay frozen, since the others cannot be unfrozen
    separately.
    """
    ours = gc.get_freeze_count() == 0
    gc.collect()
    if ours:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if ours:
            gc.unfreeze()


# The order is the precedence when ranks got different ones.
_SIGNALS = (None, "SIGUSR2", "SIGUSR1", "SIGHUP", "SIGTERM", "SIGINT")
