"""The same rows given to the engine in another way: as a list of samples, with routes to replay, as the last
step of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from titancli import IGNORE, Batch, Engine, Sample
from titancli.errors import TitanError

FIELDS = {"old_logprobs": "logprobs", "reference_logprobs": "reference", "advantages": "advantages"}
"""Columns of a batch that have a name of their own in a sample; others are its `extra`."""


def with_routes(batch: Batch, engine: Engine, step: int) -> Batch:
    """Return the rows with the experts that tokens are to visit, drawn at random; a quarter is left to the
    routers.

    Raises:
        TitanError: the model's routes cannot be replayed.
    """
    routing = engine.parts[0].routing
    if routing is None:
        raise TitanError("routes cannot be replayed: the model has no layers of experts that are alike")
    drawn = torch.Generator().manual_seed(step)
    places = (*batch["tokens"].shape, routing.layers)
    order = torch.rand(*places, routing.num_experts, generator=drawn).argsort(-1)
    own = torch.rand(*places, 1, generator=drawn) < 0.25
    routes = torch.where(own, -1, order[..., : routing.top_k])
    return Batch({**batch, "routes": routes}, unit=batch.unit)


def without_targets(batch: Batch) -> Batch:
    """Return a micro-batch of as many rows without targets: what fills up the last step of an epoch."""
    tensors = {name: torch.zeros_like(value) for name, value in batch.items()}
    tensors["targets"] = torch.full_like(batch["targets"], IGNORE)
    if "positions" in tensors:
        tensors["positions"] += torch.arange(batch["positions"].shape[1])
    if "routes" in tensors:
        tensors["routes"] = torch.full_like(batch["routes"], -1)
    return Batch(tensors, unit=batch.unit)


def samples_of(batch: Batch, loss: Any) -> list[Sample]:
    """Return each document of the rows as a sample.

    Raises:
        TitanError: the loss cannot take samples: it reads neither log-probabilities nor logits, or takes a
            number for each row.
    """
    if loss.output not in ("logprobs", "model"):
        raise TitanError(f"the loss reads {loss.output}, and samples have log-probabilities")
    shapes = loss.needs if isinstance(loss.needs, Mapping) else {}
    if by_row := [name for name, shape in shapes.items() if shape == "B"]:
        raise TitanError(f"the loss takes {by_row[0]} as one number for each row, but samples share rows")
    found = [_sample(batch, row, place) for row, place in _documents(batch)]
    return [one for one in found if one is not None]


def _documents(batch: Batch) -> Iterator[tuple[int, slice]]:
    """Yield the row and the positions of every document."""
    count, length = batch["tokens"].shape
    ids = batch["document_ids"] if "document_ids" in batch else torch.zeros(count, length)
    for row in range(count):
        begins = [0, *((ids[row].diff() != 0).nonzero()[:, 0] + 1).tolist(), length]
        for first, end in itertools.pairwise(begins):
            yield row, slice(first, end)


def _sample(batch: Batch, row: int, document: slice) -> Sample | None:
    """Return a document up to its last target; None if it has none."""
    there = batch["targets"][row, document] != IGNORE
    if not bool(there.any()):
        return None
    there = there[: int(there.nonzero()[-1]) + 1]
    place = slice(document.start, document.start + len(there))
    last = batch["targets"][row, place.stop - 1 : place.stop]
    columns: dict[str, Any] = {
        name: _shifted(torch.where(there, value[row, place], 0.0))
        for name, value in batch.items()
        if value.is_floating_point() and value.ndim == 2
    }
    mask = columns.pop("weights", _shifted(there.float()))
    named = {field: columns.pop(name) for name, field in FIELDS.items() if name in columns}
    routes = {"routes": batch["routes"][row, place]} if "routes" in batch else {}
    tokens = torch.cat((batch["tokens"][row, place], last))
    return Sample(tokens, mask, extra=columns, **named, **routes)


def _shifted(values: Tensor) -> Tensor:
    """Return values of targets as values of a sample's tokens, of which the first is none."""
    return torch.cat((values.new_zeros(1), values))
