"""What a caller gives a verb, made what the engine needs: batches and losses, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titancli.data.batch import Batch
from titancli.errors import TitanError
from titancli.losses.result import LossResult
from titancli.registry.component import build, component_info

Given = Batch | Mapping[str, Tensor]
LossFunction = Callable[[Tensor, Batch], LossResult]
OUTPUTS = ("logprobs", "model")


# ---------------------------------------------------------------------------------------------- batches


def batches_of(given: Given | Sequence[Given]) -> list[Batch]:
    """One batch or several.

    Raises:
        TitanError: there is none, or one is no batch.
    """
    several = [given] if isinstance(given, Mapping) else list(given)
    if not several:
        raise TitanError("no batch was given")
    return [batch_of(batch) for batch in several]


def batch_of(given: Given) -> Batch:
    """A batch, or a plain mapping as one."""
    if isinstance(given, Batch):
        return given
    if not isinstance(given, Mapping) or not given:
        raise TitanError(
            f"a batch maps names to tensors, and this is {'empty' if given == {} else type(given).__name__}",
            hint='give titancli.Batch({"tokens": ..., "targets": ...})',
        )
    for name, value in given.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            what = "a tensor of one number" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TitanError(f"a batch's {name} must be a tensor whose first dimension is rows, not {what}")
    return Batch(given)


def check_batch(batch: Batch, part: Any, loss: Any) -> None:
    """See to it that a batch has what the model and the loss take.

    Raises:
        TitanError: a tensor is missing, or has another shape or dtype.
    """
    first = part.inputs[0]
    needed = [first, "targets"] if loss.output == "logprobs" else [first]
    if missing := [name for name in needed if name not in batch]:
        raise TitanError(
            f"the batch has no {' and no '.join(missing)}; it has {', '.join(batch) or 'nothing'}",
            hint="targets[b, t] is what follows tokens[b, t]; -100 is no target",
        )
    for name in {"tokens", "targets"} & set(batch):
        if batch[name].dtype not in (torch.int64, torch.int32):
            raise TitanError(f"the batch's {name} are {batch[name].dtype}, and must be integers")
    if len(needed) == 2 and batch["targets"].shape != batch[first].shape[:2]:
        raise TitanError(
            f"the batch's targets are {list(batch['targets'].shape)}, its {first} {list(batch[first].shape)}",
            hint="there is a target for each position, already shifted; -100 is none",
        )


# ----------------------------------------------------------------------------------------------- losses


class FunctionLoss:
    """A plain callable as a loss, which is asked for `output`, `entropy`, `steady` and `token_weights`."""

    def __init__(self, function: LossFunction) -> None:
        self._function = function
        self.output = getattr(function, "output", "logprobs")
        self.entropy = getattr(function, "entropy", False)
        self.steady = getattr(function, "steady", True)
        if hasattr(function, "token_weights"):
            self.token_weights = function.token_weights

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        return self._function(out, batch)


def loss_of(given: Any) -> Any:
    """A loss: one as it is, one built of a component's config, or a plain callable as one.

    Raises:
        TitanError: it is none of these.
    """
    name = getattr(given, "__name__", type(given).__name__)
    if hasattr(given, "__component__"):
        info = component_info(given)
        if info.kind != "loss" or isinstance(given, type):
            what = f"a {info.kind}" if info.kind != "loss" else "a class"
            raise TitanError(f"{name} is {what}, not the config of a loss", hint=f"write {name}()")
        return build(given)
    if isinstance(given, type) or not callable(given):
        raise TitanError(
            f"{name} is no loss",
            hint="a loss is a component's config, or is called with (log-probs, batch) -> LossResult",
        )
    loss = given if hasattr(given, "output") and not hasattr(given, "__name__") else FunctionLoss(given)
    if loss.output not in OUTPUTS:
        raise TitanError(f'the output of {name} is {loss.output!r}, not "logprobs" or "model"')
    return loss


def checked(made: Any, loss: Any) -> LossResult:
    """What a loss made, its weight and metrics as tensors.

    Raises:
        TitanError: it is no LossResult, or not of scalars, or has no gradient where one is needed.
    """
    name = _name(loss)
    if not isinstance(made, LossResult):
        raise TitanError(
            f"the loss {name} returned a {type(made).__name__}",
            hint="it must return titancli.LossResult(sum, weight): a sum, and what it is to be divided by",
        )
    if not isinstance(made.sum, Tensor) or made.sum.ndim:
        shape = list(made.sum.shape) if isinstance(made.sum, Tensor) else type(made.sum).__name__
        raise TitanError(f"the sum of the loss {name} must be a tensor of one number, not {shape}")
    if torch.is_grad_enabled() and not made.sum.requires_grad:
        raise TitanError(
            f"the sum of the loss {name} carries no gradient",
            hint="make it of the log-probs or logits that the loss is given; multiply by 0 where none counts",
        )
    numbers = {"weight": made.weight, **made.metrics}
    tensors = {key: torch.as_tensor(value, device=made.sum.device).detach() for key, value in numbers.items()}
    if wrong := [key for key, value in tensors.items() if value.ndim]:
        raise TitanError(
            f"the loss {name}: {wrong[0]} must be one number, not {list(tensors[wrong[0]].shape)}"
        )
    return LossResult(made.sum, tensors.pop("weight"), tensors)


def _name(loss: Any) -> str:
    function = getattr(loss, "_function", loss)
    return getattr(function, "__name__", type(function).__name__)


class LogProbs:
    """The loss that is none: hands the log-probabilities on."""

    output = "logprobs"

    def __call__(self, out: Tensor, batch: Batch) -> Tensor:
        return out


class Logits:
    """Hands the model's own output on."""

    output = "model"

    def __call__(self, out: Tensor, batch: Batch) -> Tensor:
        return out
