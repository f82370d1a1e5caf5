"""One optimizer step, and the hooks that take part in it.

The engine calls its hooks at three moments, in the same order on every rank; a hook has methods for the
moments that it needs (`titancli.protocols.StepHook`):

- `around_backward(backward)`: a context manager around the backward pass, which may compute it once more;
- `gradients_ready(step)`: all gradients are complete, but not divided or clipped yet; it may veto the step;
- `step_applied(step)`: weights and counters are those after the step; it may return metrics.

An error in a hook is an error of the verb: it is reported to the other ranks, and has the same effect as any
other error of `forward_backward` or `optim_step`. A hook may call the verbs `forward` and `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from titancli.engine.sums import quotient
from titancli.errors import TitanError
from titancli.protocols import StepHookDefaults
from titancli.protocols.batch import NOTHING, Counts
from titancli.registry.defaults import fill_in

if TYPE_CHECKING:
    from titancli.engine.rng import Stream
    from titancli.protocols.batch import Batch

Metrics = dict[str, Any]
"""Scalars on the device (or plain numbers) by name. Nothing is read to the host until a logger reads it."""


@dataclass
class Step:
    """A step between its first `forward_backward` and the end of its `optim_step`.

    Tensors are fp32 scalars on the device, the same on every rank.
    """

    number: int
    """The number of the step, counted from 1."""
    stream: Stream
    """The random numbers of the step."""
    loss: Tensor
    """The sum of the loss so far, not divided by the weight."""
    weight: Tensor
    norm: Tensor
    """The norm of the gradients divided by the weight, before clipping; 0 until gradients are complete."""
    counts: Counts = NOTHING
    """Input tokens, targets and padding over all ranks."""
    batches: int = 0
    """The number of micro-batches."""
    steady: bool = True
    """Whether all losses keep to a level (`titancli.protocols.Loss`)."""
    lr: float = 0.0
    """The learning rate; 0 until `optim_step`."""
    lr_given: float | None = None
    """The argument of `optim_step`; None if the rate is the recipe's."""
    vetoed: Tensor | bool | None = None
    """Whether a hook of this rank has vetoed the step; None if no hook was asked."""
    skipped: Tensor | None = None
    """1.0 if the step is not applied; None if it is. Known once all hooks have seen the gradients."""

    @property
    def tokens(self) -> int:
        """Input tokens over all ranks, without padding."""
        return self.counts.tokens

    @property
    def average(self) -> Tensor:
        """The loss divided by the weight; 0 if the weight is 0."""
        return quotient(self.loss, self.weight)


@dataclass(frozen=True)
class Backward:
    """A backward pass that is about to begin."""

    step: Step
    batches: Sequence[Batch]
    """This rank's micro-batches, on the device."""
    loss: Any
    is_first: bool
    """Whether the step has no gradients yet."""
    _compute: Callable[[Sequence[Batch]], None]
    _forget: Callable[[], None]

    def compute(self, batches: Sequence[Batch] | None = None) -> None:
        """Compute gradients of the loss's sum once more, or those of other batches, with the random numbers
        of the step. They stay in the parameters until `forget`. Collective.

        Raises:
            TitanError: the step already has gradients, to which these would be added.
        """
        if not self.is_first:
            raise TitanError(
                "a hook computes once more where the step has gradients already",
                hint="do it only where backward.is_first",
            )
        self._compute(self.batches if batches is None else batches)

    def forget(self) -> None:
        """Discard the results of `compute`: gradients, and token counts of experts."""
        self._forget()


class Hooks:
    """The hooks of one engine, in the order in which they are called."""

    def __init__(self, own: Sequence[Any] = (), last: Any = None) -> None:
        """
        Args:
            own: hooks of the engine.
            last: the hook that is called after all others, and decides whether the step is applied.
        """
        self._own, self.last = list(own), last
        self._added: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from self._own
        yield from self._added
        if self.last is not None:
            yield self.last

    @property
    def callbacks(self) -> list[Any]:
        """The hooks that were added."""
        return list(self._added)

    def add(self, hook: Any) -> None:
        """Add a hook, before the first step.

        Raises:
            TitanError: it was added before, or another hook keeps its state under the same name.
        """
        if any(one is hook for one in self):
            raise TitanError(f"the hook {name_of(hook)} was added to the engine twice")
        if (name := state_name(hook)) is not None and name in map(state_name, self._added):
            raise TitanError(
                f"two callbacks keep state under the name {name!r}",
                hint="give one of them another `name`: checkpoints tell them apart by it",
            )
        self._added.append(hook if name is None else fill_in(hook, StepHookDefaults))

    # ------------------------------------------------------------------------------------- the moments

    @contextmanager
    def around_backward(
        self, backward: Backward, lent: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Enter the hooks around the backward pass in the block. They may move the weights meanwhile.

        Args:
            lent: lets hooks call verbs inside a block.
        """
        moved = False
        with lent(), ExitStack() as entering:
            for hook in self._with("around_backward"):
                context = hook.around_backward(backward)
                if context is not None:
                    entering.enter_context(context)
                    moved = True
            if moved:
                self.weights_moved()
            entered = entering.pop_all()
        try:
            yield
        except BaseException as error:
            with lent():
                entered.__exit__(type(error), error, error.__traceback__)
            raise
        with lent():
            entered.close()
            if moved:
                self.weights_moved()

    def weights_moved(self) -> None:
        """Let the engine's own hooks renew what follows from weights that a hook has moved. Collective."""
        for hook in self._with("weights_moved"):
            if hook not in self._added:
                hook.weights_moved()

    @property
    def wait_for_gradients(self) -> bool:
        """Return whether callbacks use gradients; the same on every rank."""
        return any(hasattr(hook, "gradients_ready") for hook in self._added)

    def gradients_ready(self, step: Step) -> None:
        """Pass the step with its gradients to all hooks but the last, and collect their vetoes."""
        for hook in self._with("gradients_ready"):
            if hook is not self.last:
                step.vetoed = _either(hook, step.vetoed, hook.gradients_ready(step))

    def decide(self, step: Step) -> None:
        """Let the last hook decide whether the step is applied. Collective."""
        if self.last is not None:
            step.skipped = self.last.gradients_ready(step)

    def step_applied(self, step: Step) -> Metrics:
        """Pass the step to all hooks, and return their metrics.

        Raises:
            TitanError: a hook returned something else, or a metric with a name already used.
        """
        found: Metrics = {}
        for hook in self._with("step_applied"):
            for name, value in _checked(hook, hook.step_applied(step)).items():
                if name in found or name in ENGINE_METRICS:
                    raise TitanError(
                        f"{name_of(hook)} returned the metric {name!r}, which there is already",
                        hint="give it another name",
                    )
                found[name] = value
        return found

    def _with(self, moment: str) -> Iterator[Any]:
        return (hook for hook in self if hasattr(hook, moment))

    # ----------------------------------------------------------------------------------------- state

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that callbacks keep, as `callbacks.<name>.<key>`."""
        return {
            f"{PART}.{name}.{key}": tensor
            for name, hook in self._keeping_state()
            for key, tensor in hook.tensors().items()
        }

    def state(self) -> dict[str, Any]:
        """Return the other state of callbacks by name: plain JSON."""
        return {name: h.state() for name, h in self._keeping_state()}

    def lacking(self, states: Mapping[str, Any]) -> list[str]:
        """Return the names of callbacks that keep state but have none in `states`."""
        return [name for name, _ in self._keeping_state() if name not in states]

    def weights_loaded(self, states: Mapping[str, Any] | None = None) -> None:
        """Notify hooks of new weights that no step has made.

        Args:
            states: the parts of `state` loaded with them; the tensors of the callbacks in it are loaded too.
        """
        for hook in self._with("weights_loaded"):
            hook.weights_loaded()
        for name, hook in self._keeping_state():
            hook.load_state((states or {}).get(name))

    def _keeping_state(self) -> list[tuple[str, Any]]:
        found = ((state_name(hook), hook) for hook in self._added)
        return [(name, hook) for name, hook in found if name is not None]


PART = "callbacks"
"""The part of a checkpoint with the state of hooks."""
ENGINE_METRICS = frozenset(("loss", "loss_max", "tokens", "grad_norm", "lr", "version", "data_wait"))
"""Metrics of the verbs and loops."""


def name_of(hook: Any) -> str:
    """Return the name of a hook in messages."""
    return type(hook).__qualname__


def state_name(hook: Any) -> str | None:
    """Return the name under which a hook keeps its state in checkpoints; None if it keeps none."""
    if not any(hasattr(hook, member) for member in ("tensors", "state", "load_state")):
        return None
    return str(getattr(hook, "name", None) or name_of(hook).lower())


def _either(hook: Any, before: Tensor | bool | None, veto: Any) -> Tensor | bool:
    """Return whether a step is vetoed, by a hook or one before it."""
    if veto is None:
        veto = False
    elif isinstance(veto, Tensor) and veto.numel() == 1:
        veto = veto.detach().reshape(()) != 0  # NaN too
    elif not isinstance(veto, bool):
        raise TitanError(
            f"gradients_ready of {name_of(hook)} returned {type(veto).__name__} instead of whether the step "
            "is vetoed",
            hint="return True, False, None or a tensor of one element",
        )
    if before is None or before is False or veto is True:
        return veto
    return before if before is True or veto is False else before | veto


def _checked(hook: Any, found: Any) -> Mapping[str, Any]:
    if found is None:
        return {}
    scalars = isinstance(found, Mapping) and all(
        isinstance(name, str) and (value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, Real))
        for name, value in found.items()
    )
    if not scalars:
        raise TitanError(
            f"step_applied of {name_of(hook)} must return metrics, names with one number each, or nothing",
            hint="a number is a float or a tensor without dimensions",
        )
    return found
