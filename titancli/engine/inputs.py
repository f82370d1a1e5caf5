"""Batches and losses passed to verbs: conversion and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titancli.data.values import INTEGERS, Limits, fault, readable, zero_invalid
from titancli.errors import TitanError
from titancli.models.loss import module_of
from titancli.protocols import LossDefaults
from titancli.protocols.batch import EXAMPLE, NOTHING, Batch, Counts, padding_of
from titancli.protocols.result import LossResult, check_shape
from titancli.registry import current
from titancli.registry.component import build_offered, completed, component_info, is_config
from titancli.registry.defaults import members

Given = Batch | Mapping[str, Tensor]
LossFunction = Callable[[Tensor, Batch], LossResult]
OUTPUTS = ("logprobs", "model", "hidden", "projection")
RESERVED = frozenset(
    (
        *("loss", "weight", "loss_max", "tokens", "grad_norm", "lr", "version", "skipped_steps"),
        *("targets", "padding", "padding_share", "targets_per_second"),
        *("step", "step_seconds", "eta_seconds", "tokens_per_second", "mfu", "memory_gib"),
        *("expert_load", "data_wait", "data_wait_share", "slow_rank", "slow_rank_seconds"),
    )
)
"""Names reserved for the engine and runs, besides `time/...` and `expert_load/...`: no metric of a loss may
have them."""


# ---------------------------------------------------------------------------------------------- batches


def batches_of(given: Given | Sequence[Given]) -> list[Batch]:
    """Return one batch or several as a list of batches.

    Raises:
        TitanError: there is no batch, or one is something else.
    """
    several = [given] if isinstance(given, Mapping) or not isinstance(given, Iterable) else list(given)
    if not several:
        raise TitanError("no batch was passed")
    return [batch_of(batch) for batch in several]


def batch_of(given: Given) -> Batch:
    """Return a batch, or a plain mapping as a batch."""
    if not isinstance(given, Mapping) or not given:
        raise TitanError(
            f"a batch must map names to tensors, but this is "
            f"{'empty' if given == {} else type(given).__name__}",
            hint=EXAMPLE,
        )
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TitanError(
                f"a batch's {name} must be a tensor whose first dimension is rows, "
                f"not a {type(value).__name__}",
                hint=EXAMPLE,
            )
        if value.layout != torch.strided or value.is_nested:
            raise TitanError(
                f"a batch's {name} must be a dense tensor, not a "
                f"{'nested' if value.is_nested else 'sparse'} one",
                hint=EXAMPLE,
            )
        if value.is_meta:
            raise TitanError(f"a batch's {name} is on the meta device and has no data", hint=EXAMPLE)
    return given if isinstance(given, Batch) else Batch(given)


class CheckedBatches(NamedTuple):
    """Batches that fit the model and the loss."""

    batches: list[Batch]
    """With `padding` where there is any, if the model takes it."""
    poison: Tensor | None
    """A scalar to add to every number computed from them: 0, or NaN if a tensor on a GPU has an invalid
    value. None if all values were checked on the host."""
    counts: Counts


def checked_batches(
    batches: Sequence[Batch], part: Any, loss: Any, limits: Limits, device: torch.device
) -> CheckedBatches:
    """Check batches against the model and the loss, before anything is copied or exchanged.

    Raises:
        TitanError: a tensor is missing, or has a wrong shape, dtype or value.
    """
    found, marks, total = [], [], NOTHING
    for given in batches:
        batch = with_integers(given)
        check_batch(batch, part, loss, limits)
        counts = counts_of(part, given)
        total += counts
        if readable(batch):
            if (wrong := fault(batch, limits)) is not None:
                raise TitanError(wrong.message, hint=wrong.hint)
        else:
            batch, mark = zero_invalid(batch.to(device), limits)
            marks.append(mark)
        found.append(with_padding(batch, part, counts))
    found = alike(found)
    if not marks:
        return CheckedBatches(found, None, total)
    nothing = torch.zeros((), device=device)
    return CheckedBatches(found, nothing.masked_fill(torch.stack(marks).any(), torch.nan), total)


def with_integers(batch: Batch) -> Batch:
    """Convert ids and positions to int64, from any integer dtype; document ids to int32 or int64.

    Raises:
        TitanError: they are not integers.
    """
    # Tensors made in inference mode (say, log-probs of a reference) cannot be saved for backward.
    tensors = {name: value.clone() if value.is_inference() else value for name, value in batch.items()}
    for name in {*INTEGERS} & {*batch}:
        dtype = batch[name].dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise TitanError(
                f"the batch's {name} are {dtype}, but must be integers", hint="for example int64"
            )
        if dtype != torch.int64 and not (name == "document_ids" and dtype == torch.int32):
            tensors[name] = batch[name].long()
    return Batch(tensors, unit=batch.unit)


def check_batch(batch: Batch, part: Any, loss: Any, limits: Limits) -> None:
    """Check that a batch has the tensors that the model and the loss need, in the right shapes.

    Raises:
        TitanError: a tensor is missing or has the wrong shape.
    """
    first = part.inputs[0]
    needed = [first, "targets"] if loss.output != "model" else [first]
    if missing := [name for name in needed if name not in batch]:
        raise TitanError(
            f"the batch has no {' and no '.join(missing)}; it has {', '.join(batch)}",
            hint="targets[b, t] is the token that follows tokens[b, t]; -100 means no target",
        )
    if not all(batch[first].shape):
        raise TitanError(
            f"the batch's {first} are {list(batch[first].shape)}: the tensor is empty",
            hint="a rank without data must pass rows whose targets are all -100",
        )
    if len(needed) == 2 and first != "tokens" and batch["targets"].shape != batch[first].shape[:2]:
        raise TitanError(
            f"the batch's targets are {list(batch['targets'].shape)}, its {first} {list(batch[first].shape)}",
            hint="there must be a target for each position, already shifted; -100 means no target",
        )
    if first == "tokens":
        _check_rows(batch, limits)
    _check_needs(batch, loss)


def _check_rows(batch: Batch, limits: Limits) -> None:
    shape = batch["tokens"].shape
    if len(shape) != 2:
        raise TitanError(
            f"the batch's tokens are {list(shape)}, but must be [rows, length]",
            hint="for a single row, use tokens[None]",
        )
    for name in ("targets", "positions", "document_ids", "padding"):
        if name in batch and batch[name].shape != shape:
            raise TitanError(
                f"the batch's {name} are {list(batch[name].shape)}, its tokens {list(shape)}",
                hint="there must be one for each token"
                + ("; -100 means no target" if name == "targets" else ""),
            )
    if "padding" in batch and batch["padding"].dtype != torch.bool:
        raise TitanError(
            f"the batch's padding is {batch['padding'].dtype}, but must be torch.bool",
            hint='for example batch["tokens"] == pad_id',
        )
    if shape[1] % limits.multiple:
        raise TitanError(
            f"the batch's rows are {shape[1]} tokens long, which cannot be sharded into "
            f"{limits.multiple} pieces",
            hint=f"pad rows to a multiple of {limits.multiple}, with targets of -100",
        )
    if limits.row_length is not None and shape[1] > limits.row_length:
        raise TitanError(
            f"the batch's rows are {shape[1]} tokens long, but the model was built for {limits.row_length}",
            hint="use shorter rows, or a larger training.seq_len (up to the model's max_seq_len)",
        )


def _check_needs(batch: Batch, loss: Any) -> None:
    needs = loss.needs
    needs = (needs,) if isinstance(needs, str) else needs
    if missing := [name for name in needs if name not in batch]:
        raise TitanError(
            f"the loss {name_of(loss)} needs {', '.join(missing)} in the batch, which only has "
            f"{', '.join(batch)}",
            hint="pass the inputs of a loss as additional tensors of the batch, with rows as the first "
            "dimension",
        )
    shapes: Mapping[str, str] = needs if isinstance(needs, Mapping) else {}
    for name, shape in shapes.items():
        check_shape(batch, name, shape, name_of(loss))
    loss.check_batch(batch)


def counts_of(model: Any, batch: Batch) -> Counts:
    """Return how many tokens of a batch are padding, and how many are not, without waiting for a device.

    All positions of the model's `token_inputs` are tokens if its rows are not rows of tokens, have no
    targets, or were not made or moved by `Batch.to` on the host.
    """
    names = model.token_inputs
    positions = sum(batch.rows * batch[name].shape[model.sequence_dim[name]] for name in names)
    known = batch.counts() if names == ("tokens",) else None
    return Counts(tokens=positions) if known is None else known


def with_padding(batch: Batch, model: Any, counts: Counts) -> Batch:
    """Return a batch with `padding` for a model that takes it, unless every position is a target."""
    if "padding" in batch or "padding" not in model.inputs or "targets" not in batch:
        return batch
    # By targets, not padding: rows of conversations then have it always, and graphs see one set of inputs.
    if counts.targets == batch["targets"].numel():
        return batch
    padding = padding_of(batch["targets"], batch.get("document_ids"))
    return Batch({**batch, "padding": padding}, unit=batch.unit)


def alike(batches: list[Batch]) -> list[Batch]:
    """Return the batches of a call with `padding` in all of them, if one has it: a pipeline joins them."""
    if all("padding" not in batch for batch in batches):
        return batches
    return [
        batch
        if "padding" in batch
        else Batch({**batch, "padding": torch.zeros_like(batch["tokens"], dtype=torch.bool)}, unit=batch.unit)
        for batch in batches
    ]


# ----------------------------------------------------------------------------------------------- losses


class FunctionLoss(LossDefaults):
    """A plain callable as a loss; `output`, `entropy`, `steady` and so on are its attributes."""

    def __init__(self, function: LossFunction) -> None:
        self._function = function
        self.output = getattr(function, "output", "logprobs")
        for name in members(LossDefaults):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        return self._function(out, batch)


def loss_of(given: Any, model: Any = None) -> Any:
    """Return a loss: an object as it is, the component of a config or name, or a wrapped callable.

    Args:
        model: the model's config, for losses that are built from it.

    Raises:
        TitanError: it is none of these.
    """
    if isinstance(given, str):
        given = current().find("loss", given)()
    name = getattr(given, "__name__", type(given).__name__)
    if is_config(given):
        info = component_info(given)
        if info.kind != "loss" or isinstance(given, type):
            what = f"a {info.kind}" if info.kind != "loss" else "a class"
            raise TitanError(f"{name} is {what}, not the config of a loss", hint=f"use {name}()")
        given = build_offered(given, model=model)
    if isinstance(given, type) or not callable(given):
        raise TitanError(
            f"{name} is not a loss",
            hint="a loss is the config of a loss component, or a callable (log-probs, batch) -> LossResult",
        )
    plain = hasattr(given, "__name__") or not hasattr(given, "output")
    loss = FunctionLoss(given) if plain else completed("loss", given)
    if loss.output not in OUTPUTS:
        raise TitanError(f"the output of {name} is {loss.output!r}, not one of {', '.join(OUTPUTS)}")
    for output in loss.outputs:
        _check_output(output, name)
    return loss


def _check_output(output: Any, name: str) -> None:
    kind, _, number = str(output).partition(":")
    if (kind, number) != ("hidden", "-1") and not (kind == "topk" and number.isdecimal() and int(number)):
        raise TitanError(
            f"the loss {name} declares the output {output!r}, which a model does not have",
            hint='outputs are "topk:K", for the K most probable tokens, and "hidden:-1"',
        )


def trained_alone(loss: Any) -> Any:
    """Return a loss after checking that it has no trainable parameters.

    Raises:
        TitanError: it is a module with parameters, which nothing would train or save.
    """
    if (module := module_of(loss)) is not None:
        name = next(name for name, parameter in module.named_parameters() if parameter.requires_grad)
        raise TitanError(
            f"the loss {name_of(loss)} has the parameter {name}, which no optimizer trains",
            hint="make it the recipe's loss, whose parameters are trained with the model's, or freeze it: "
            "parameter.requires_grad_(False)",
        )
    return loss


def checked(made: Any, loss: Any) -> LossResult:
    """Check what a loss returned, and return its weight and metrics as tensors.

    Raises:
        TitanError: it is not a LossResult of scalars, or lacks a gradient where one is needed.
    """
    name = name_of(loss)
    if not isinstance(made, LossResult):
        raise TitanError(
            f"the loss {name} returned a {type(made).__name__}",
            hint="it must return titancli.LossResult(sum, weight): a sum and its divisor",
        )
    if not isinstance(made.sum, Tensor) or made.sum.ndim:
        shape = list(made.sum.shape) if isinstance(made.sum, Tensor) else type(made.sum).__name__
        raise TitanError(f"the sum of the loss {name} must be a scalar tensor, not {shape}")
    if torch.is_grad_enabled() and not made.sum.requires_grad:
        raise TitanError(
            f"the sum of the loss {name} has no gradient",
            hint="compute it from the log-probs or logits passed to the loss; multiply by 0 if no "
            "position counts",
        )
    if not isinstance(made.metrics, Mapping):
        raise TitanError(
            f"the metrics of the loss {name} must be a dict, not a {type(made.metrics).__name__}"
        )
    if taken := [key for key in made.metrics if key in RESERVED or not isinstance(key, str)]:
        raise TitanError(
            f"the loss {name} reports a metric called {taken[0]!r}, a name reserved by titan"
            if taken[0] in RESERVED
            else f"the loss {name} reports a metric called {taken[0]!r}, which is not a string",
            hint=f"use another name; reserved names are {', '.join(sorted(RESERVED))}",
        )
    numbers = {"weight": made.weight, **made.metrics}
    for key, value in numbers.items():
        if not isinstance(value, Tensor | Real | np.generic | np.ndarray):
            raise TitanError(f"the loss {name}: {key} must be one number, not a {type(value).__name__}")
    tensors = {key: torch.as_tensor(value, device=made.sum.device).detach() for key, value in numbers.items()}
    if wrong := [key for key, value in tensors.items() if value.is_complex()]:
        raise TitanError(f"the loss {name}: {wrong[0]} must be a real number, not a complex one")
    if wrong := [key for key, value in tensors.items() if value.ndim]:
        raise TitanError(
            f"the loss {name}: {wrong[0]} must be one number, not {list(tensors[wrong[0]].shape)}"
        )
    return LossResult(made.sum, tensors.pop("weight"), tensors)


def name_of(loss: Any) -> str:
    function = getattr(loss, "_function", loss)
    return getattr(function, "__name__", type(function).__name__)


class LogProbs(LossDefaults):
    """A placeholder loss that returns the log-probabilities."""

    output = "logprobs"

    def __init__(self, temperature: float = 1.0) -> None:
        """
        Raises:
            TitanError: logits cannot be divided by the temperature.
        """
        if not 0 < temperature < math.inf:
            raise TitanError(f"temperature is {temperature}, not a number above 0")
        self.temperature = temperature

    def __call__(self, out: Tensor, batch: Batch) -> Tensor:
        return out


class Values(LogProbs):
    """A placeholder loss that returns the values of a loss for each target, and 0 where there is none."""

    def __init__(self, loss: Any, temperature: float) -> None:
        """
        Raises:
            TitanError: the loss has none.
        """
        super().__init__(temperature)
        if loss.values is None:
            raise TitanError(
                f"forward: the loss {name_of(loss)} of the recipe has no values",
                hint="see titancli.protocols.LossDefaults.values",
            )
        self._values, self.output, self.outputs = loss.values, loss.output, loss.outputs

    def __call__(self, out: Tensor, batch: Batch) -> Tensor:
        found: Tensor = self._values(out, batch)
        return torch.where(batch["targets"] >= 0, found.float(), 0.0)


class Logits(LossDefaults):
    """A placeholder loss that returns the raw output of the model."""

    output = "model"

    def __call__(self, out: Tensor, batch: Batch) -> Tensor:
        return out
