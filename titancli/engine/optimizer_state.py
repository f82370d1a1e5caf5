"""The state of training: optimizer state by parameter name, never by index; counters; and learning rates."""

from __future__ import annotations

import logging
import math
import numbers
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from titancli.errors import EnvironmentProblem, TitanError

if TYPE_CHECKING:
    from titancli.checkpoint.exclude import Exclusion
    from titancli.engine.skip_step import Guard


logger = logging.getLogger(__name__)

RATES = ("params", "lr", "initial_lr", "peak_lr")
"""Keys of a parameter group that the recipe and its schedule set anew at each start."""
SWITCHES = ("grad_scale", "found_inf")
"""Attributes set for a step and reset after it, read by torch's fused optimizers."""
NOTES = ("_need_device_dtype_check_for_fused", "_opt_called", "_warned_capturable_if_run_uncaptured")
"""Attributes that torch sets on an optimizer and that do not affect a step."""
DEPTH = 4
"""Maximum depth of nested containers and optimizers that are searched."""

_began: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()
"""The values that each optimizer had outside its state when it was built."""


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """Return every tensor of the optimizer's state as `optimizer.<parameter>.<key>`.

    Raises:
        TitanError: the state contains a value that is not a tensor, which a checkpoint would lose.
    """
    initialise_state(optimizer)
    _warn_of_what_is_lost(optimizer)
    found = {
        f"optimizer.{name}.{key}": value
        for name, parameter in named_parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise TitanError(
                f"{type(optimizer).__name__} keeps {name}, of type {type(value).__name__}: a checkpoint "
                "stores tensors only, and a resumed run would lose it",
                hint="let the optimizer keep its state in tensors (a number: torch.tensor(0.0))",
            )
    return found


@torch.no_grad()
def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the missing state of an optimizer without changing a parameter.

    A step with zero learning rate and gradients does it for any optimizer; its step count is reset. Existing
    gradients are kept.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lacking = [p for p in parameters if p not in optimizer.state]
    if not lacking:
        return
    gradients = [parameter.grad for parameter in parameters]
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        optimizer.zero_grad(set_to_none=True)
        for parameter in lacking:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    except BaseException:
        for parameter in lacking:
            optimizer.state.pop(parameter, None)
        raise
    finally:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    for parameter in lacking:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()


def outside_of_state(
    optimizer: torch.optim.Optimizer, of_tensor: Callable[[Tensor], Any], depth: int = 0
) -> dict[str, Any]:
    """Return the values that an optimizer keeps in attributes and groups, by place; checkpoints lack them.

    Args:
        of_tensor: maps a tensor to its stand-in. Numbers and strings are returned as they are, containers as
            lists; other values, parameters and values in the state are left out.
        depth: nesting depth of the optimizer.
    """
    saved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for state in optimizer.state.values():
        saved |= {id(value) for value in state.values()} if isinstance(state, Mapping) else set()

    def of_unsaved(tensor: Tensor) -> Any:
        return None if id(tensor) in saved else of_tensor(tensor)

    def found_in(value: Any, depth: int) -> Any:
        if isinstance(value, Tensor):
            return of_unsaved(value)
        if isinstance(value, (numbers.Number, str)):
            return value
        if depth >= DEPTH:
            return None
        if isinstance(value, torch.optim.Optimizer):
            own = {} if value.state is optimizer.state else {"state": found_in(value.state, depth + 1)}
            return {**outside_of_state(value, of_unsaved, depth + 1), **own}
        if isinstance(value, Mapping):
            value = value.values()
        elif not isinstance(value, (list, tuple, set, frozenset)):
            return None
        return [inner for one in value if (inner := found_in(one, depth + 1)) is not None] or None

    known = vars(torch.optim.SGD([torch.zeros(1)])).keys() | {*SWITCHES, *NOTES}
    found = {name: found_in(value, depth) for name, value in vars(optimizer).items() if name not in known}
    for number, group in enumerate(optimizer.param_groups):
        for name in group.keys() - set(RATES):
            found[f"param_groups[{number}][{name!r}]"] = found_in(group[name], depth)
    return {name: value for name, value in found.items() if value is not None}


def remember(optimizer: torch.optim.Optimizer) -> None:
    """Record the values of a new optimizer outside its state; later changes cause a warning, once."""
    _began[optimizer] = outside_of_state(optimizer, _mark)


def _mark(tensor: Tensor) -> tuple[WeakIdRef, int]:
    """Return a mark that differs for every other tensor, even at the same address, and after a change in
    place."""
    return WeakIdRef(tensor), 0 if tensor.is_inference() else tensor._version


def _alike(one: Any, other: Any) -> bool:
    """Return whether two results of `outside_of_state` are equal; NaN equals NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other) or (one != one and other != other)


def _warn_of_what_is_lost(optimizer: torch.optim.Optimizer) -> None:
    if (began := _began.get(optimizer)) is None:
        return
    now = outside_of_state(optimizer, _mark)
    changed = sorted(name for name, value in now.items() if not _alike(began.get(name), value))
    if changed:
        del _began[optimizer]
        logger.warning(
            "the optimizer %s keeps %s on itself, which has changed since it was built and is in no "
            "checkpoint: a resumed run begins without it. What a step depends on belongs in "
            "optimizer.state[parameter], in tensors",
            type(optimizer).__name__,
            ", ".join(changed),
        )


class Counters(NamedTuple):
    """The counters of a checkpoint."""

    step: int
    tokens_seen: int
    version: int


def counters_of(
    state: dict[str, Any], folder: Path, guard: Guard | None, exclude: Exclusion
) -> Counters | None:
    """Return the counters in a checkpoint's state, None if they are excluded, and restore the guard.

    Raises:
        EnvironmentProblem: the state has no counters, or invalid ones.
    """
    record = state.get("engine")
    if record is None:
        raise EnvironmentProblem(
            f"{folder} contains weights but no training state, so no run can be resumed from it",
            hint=f"start a new run from it with weights={folder}",
        )
    found = None
    try:
        if not exclude.has("step"):
            found = Counters(record["step"], record["tokens_seen"], record.get("version", record["step"]))
            if wrong := [
                f"{name} {value!r}" for name, value in found._asdict().items() if type(value) is not int
            ]:
                raise TypeError(", ".join(wrong))
        if guard is not None and "guard" in record and not exclude.has("guard"):
            guard.load_state(record["guard"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"{folder} has a training state that titan cannot have written: {type(error).__name__}: {error}",
            hint="use another checkpoint (--step N)",
        ) from error
    return found


# --------------------------------------------------------------------------------------------- learning rates


def keep_peaks(optimizer: torch.optim.Optimizer, peak: Any) -> None:
    """Note in each group its own peak, `initial_lr`, and the recipe's, `peak_lr`.

    They differ on a pipeline stage without parameters of the first group's kind.

    Args:
        peak: the optimizer's `lr` in the recipe; if it is not a number, the first group's peak is used.
    """
    groups = optimizer.param_groups
    for group in groups:
        group.setdefault("initial_lr", group["lr"])
        group.setdefault("peak_lr", peak if isinstance(peak, numbers.Real) else groups[0]["initial_lr"])


def set_rates(optimizer: torch.optim.Optimizer, lr: Any, factor: float) -> float:
    """Give each group its learning rate for the next step.

    Args:
        lr: replaces the recipe's peak times its schedule; None: does not.
        factor: the schedule's factor.

    Returns:
        The recipe's rate at this step, or `lr`.

    Raises:
        TitanError: a rate is not a finite number of 0 or more. No group has changed.
    """
    groups = optimizer.param_groups
    if lr is None:
        what = "the recipe's learning rate"
        rates = [_checked(group["initial_lr"] * factor, what) for group in groups]
        shown = _checked(_peak(groups[0]) * factor, what) if groups else 0.0
    else:
        shown = _checked(lr, "optim_step(lr)")
        rates = [shown * _ratio(group) for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    return shown


def _peak(group: dict[str, Any]) -> float:
    peak: float = group.get("peak_lr", group["initial_lr"])  # an optimizer built by a script has none
    return peak


def _ratio(group: dict[str, Any]) -> float:
    own, peak = group.get("initial_lr", group["lr"]), group.get("peak_lr")
    if peak is None or own == peak:
        return 1.0
    if peak == 0:
        raise TitanError(
            f"optim_step(lr): optimizer.lr is 0 in the recipe but that of another group is {own:g}, so "
            f"there is no ratio to keep",
            hint="set an lr above 0 for the recipe's optimizer",
        )
    ratio: float = own / peak
    return ratio


def _checked(lr: Any, what: str) -> float:
    if isinstance(lr, torch.Tensor):
        if lr.device.type != "cpu" or lr.numel() != 1:
            raise TitanError(
                f"{what} must be a plain number, not a tensor of shape {list(lr.shape)} on {lr.device}",
                hint="pass a float: reading a tensor from a device would block training",
            )
        lr = lr.item()
    if isinstance(lr, bool) or not isinstance(lr, numbers.Real):
        raise TitanError(f"{what} must be a number, not a {type(lr).__name__}")
    try:
        rate = float(lr)
    except OverflowError:  # an integer too large for a float
        rate = math.inf
    if not (math.isfinite(rate) and rate >= 0):
        raise TitanError(
            f"{what} is {rate}, but a learning rate must be finite and at least 0",
            hint="nothing was changed; the gradients are still there for an optim_step",
        )
    return rate
