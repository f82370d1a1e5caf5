"""The settings and the status of an engine, and checks that a verb may be called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from threading import Lock, get_ident
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from titancli.data.values import Limits
from titancli.errors import TitanError


class Status(TypedDict):
    """The status of an engine: plain numbers, the same on every rank."""

    step: int
    """Optimizer steps done, skipped ones included."""
    version: int
    """The version of the weights: it differs whenever they may."""
    accumulated: int
    """Micro-batches whose gradients wait for `optim_step`."""
    tokens_seen: int
    """Input tokens of all steps, over all ranks, without padding."""


@dataclass(frozen=True)
class EngineSettings:
    """The settings of a recipe that verbs need."""

    seed: int
    max_norm: float
    """Maximum norm of the gradients; 0: not clipped."""
    accumulation: int
    """Micro-batches per step, for the loop."""
    lr_factor: Callable[[int], float]
    """Returns the factor of the peak learning rate at a step, counted from 0."""
    limits: Limits = Limits()  # noqa: RUF009 - a tuple
    """The limits of a batch."""
    seq_len: int = 0
    """The usual number of tokens of a row."""
    budget: int = 0
    """Tokens of a micro-batch on each data-parallel rank."""


# --------------------------------------------------------------------------------------------------- unusable


RecoverableBy = Literal["load", "weights", "nothing"]
"""The remedy for an unusable engine: a `load` of its complete state; new weights alone, from `load_weights`
or a `load` without the optimizer's state; or only a new engine."""

_SEVERITY: tuple[RecoverableBy, ...] = ("weights", "load", "nothing")

_HINTS: dict[RecoverableBy, str] = {
    "load": "load a checkpoint into it (engine.load), or build a new engine",
    "weights": "load whole weights into it (engine.load or engine.load_weights), or build a new engine",
    "nothing": "build a new engine and load the last checkpoint",
}


@dataclass(frozen=True)
class Unusable:
    """The reason why an engine's numbers cannot be trusted."""

    why: str
    """The end of the message "the engine is unusable: "."""
    recoverable_by: RecoverableBy = "load"

    def error(self, verb: str) -> TitanError:
        """Return the error of calling a verb anyway."""
        return TitanError(f"{verb}: the engine is unusable: {self.why}", hint=_HINTS[self.recoverable_by])

    def mended_by_this(self, what: RecoverableBy | None) -> bool:
        """Return whether the state that a verb restores makes the engine usable."""
        return what is not None and self.recoverable_by != "nothing" and not self.worse_than(what)

    def worse_than(self, other: RecoverableBy) -> bool:
        return _SEVERITY.index(self.recoverable_by) > _SEVERITY.index(other)


# ----------------------------------------------------------------------------------------- one verb at a time


COMPUTING = frozenset(("forward", "evaluate", "forward_backward", "optim_step"))
"""The verbs during which no other may be called, not even those that need no lock (such as `weights`)."""
IN_HOOKS = frozenset(("forward", "evaluate"))
"""The verbs that hooks may call during another."""


class CallLock:
    """The running verb of an engine: one at a time over all threads.

    Without the lock two threads could both find no verb running, and step through the same shards.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._verb: str | None = None
        self._lent_to: int | None = None
        """The thread in which hooks may call verbs."""

    @property
    def verb(self) -> str | None:
        """The verb that is running."""
        return self._verb

    @contextmanager
    def of(self, verb: str) -> Iterator[None]:
        """Run a verb in the block.

        Raises:
            TitanError: another verb is running, in this thread or another.
        """
        if self._lent_to == get_ident() and verb in IN_HOOKS:
            with self._as(verb, None):
                yield
            return
        if not self._lock.acquire(blocking=False):
            raise self._refusal(verb)
        try:
            with self._as(verb, None):
                yield
        finally:
            self._lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let hooks called in the block call the verbs that change nothing."""
        with self._as(self._verb, get_ident()):
            yield

    @contextmanager
    def _as(self, verb: str | None, lent_to: int | None) -> Iterator[None]:
        before = self._verb, self._lent_to
        self._verb, self._lent_to = verb, lent_to
        try:
            yield
        finally:
            self._verb, self._lent_to = before

    def require(self, verb: str) -> None:
        """Check that no other verb is computing.

        Raises:
            TitanError: another verb is computing.
        """
        if self._verb in COMPUTING and self._verb != verb and self._lent_to != get_ident():
            raise self._refusal(verb)

    def _refusal(self, verb: str) -> TitanError:
        return TitanError(
            f"{verb}: the engine is in the middle of {self._verb or 'another verb'}",
            hint="call it earlier, and pass what a loss needs in the batch",
        )


def refuse_modes(verb: str, device: torch.device) -> None:
    """Check torch's modes.

    Raises:
        TitanError: the script has enabled a mode in which no verb can be called.
    """
    if torch.is_inference_mode_enabled():  # tensors made in it can never be trained
        raise TitanError(
            f"{verb} under torch.inference_mode()", hint="remove it: forward and evaluate record no graph"
        )
    if torch.is_autocast_enabled(device.type):  # it would cast what titan has already cast
        raise TitanError(
            f"{verb} under torch.autocast()",
            hint="remove it: training.mixed_precision_param sets the compute dtype",
        )


# ------------------------------------------------------------------------------------------------- parameters


class Watched:
    """The parameters of an engine's parts, watched for replacement.

    Sharding, optimizer and checkpoints refer to parameters as objects: a replacement by a script might or
    might not be used in forward, would never be trained, and would be saved under the name of the original.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._named = _named(parts)
        modules = [module for part in parts for module in part.modules()]
        self._places: list[dict[str, Any]] = [d for m in modules for d in (m._parameters, m._modules)]
        """The modules' own dictionaries; their values are compared by identity at each verb."""
        self._sizes = [*map(len, self._places)]
        self._keys = [*chain.from_iterable(self._places)]
        self._values = [*chain.from_iterable(map(dict.values, self._places))]

    def check(self, verb: str, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """Check that the parameters are those of the build.

        Raises:
            TitanError: parameters were replaced, added or removed; or one requires a gradient but is not in
                the optimizer.
        """
        if not self._same():
            self._compare(verb, _named(parts))
        if optimizer is None:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        lost = [name for name, p in self._named.items() if p.requires_grad and id(p) not in held]
        if lost:
            raise TitanError(
                f"{verb}: {_listed(lost)} {_require(lost)} a gradient, but the optimizer does not have "
                f"{'it' if len(lost) == 1 else 'them'}",
                hint="parameters can be frozen after an engine was built, but not unfrozen: build the "
                "engine with them",
            )

    def _same(self) -> bool:
        """Return whether nothing has changed. (No Python loop: there are hundreds of dictionaries.)"""
        return (
            [*map(len, self._places)] == self._sizes
            and [*chain.from_iterable(self._places)] == self._keys
            and all(map(is_, chain.from_iterable(map(dict.values, self._places)), self._values))
        )

    def _compare(self, verb: str, now: dict[str, nn.Parameter]) -> None:
        changed = [name for name, p in now.items() if self._named.get(name) is not p]
        gone = [name for name in self._named if name not in now]
        if changed or gone:
            parts = [f"{_listed(changed)} {_was(changed)} replaced or added"] if changed else []
            parts += [f"{_listed(gone)} {_was(gone)} removed"] if gone else []
            raise TitanError(
                f"{verb}: {' and '.join(parts)} after the engine was built; the engine would neither "
                f"train nor save the new ones",
                hint="write values into the existing parameters (parameter.data.copy_ of those that "
                "engine.named_parameters() returns, engine.load_weights), or change the model in a converter "
                "before the engine is built",
            )


def _named(parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    return {name: parameter for part in parts for name, parameter in part.named_parameters()}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _was(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _require(names: list[str]) -> str:
    return "requires" if len(names) == 1 else "require"
