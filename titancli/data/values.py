"""Valid ranges of the integers of a batch: ids that the model has, and positions that it was made for.

On the CPU, values are checked and rejected with a message. A tensor on a GPU is not read, since that would
wait for the device: invalid values are replaced by zeros, and the step's numbers become NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titancli.protocols.batch import IGNORE, Batch

INTEGERS = ("tokens", "targets", "positions", "document_ids")
"""The tensors of a batch that hold integers."""


class Limits(NamedTuple):
    """Limits of a model; None: no limit."""

    vocab_size: int | None = None
    """Ids are 0 to vocab_size - 1."""
    row_length: int | None = None
    """Maximum number of tokens in a row."""
    positions: int | None = None
    """Positions are 0 to positions - 1."""
    multiple: int = 1
    """Number of equal pieces that rows are split into over ranks."""

    def of_model(self) -> Limits:
        """Return the limits of the model alone: rows may be as long as it has positions."""
        return self._replace(row_length=self.positions)

    def top(self, name: str) -> int | None:
        """Return the exclusive upper bound of a tensor's integers."""
        return self.positions if name == "positions" else self.vocab_size


class Fault(NamedTuple):
    """What is wrong with a batch's values."""

    message: str
    hint: str


def readable(batch: Batch) -> bool:
    """Return whether values can be read without waiting for a device. (A fake tensor has none.)"""
    return all(type(batch[name]) is Tensor and batch[name].device.type == "cpu" for name in _given(batch))


def fault(batch: Batch, limits: Limits, who: str = "the batch contains") -> Fault | None:
    """Return the first invalid value of a readable batch; `who` begins the message."""
    for name in _bounded(batch):
        if _is_inside(batch[name], limits.top(name)):
            continue
        outside = _outside(name, batch[name], limits)
        if bool(outside.any()):
            place = outside.nonzero()[0].tolist()
            return _fault(who, name, int(batch[name][tuple(place)]), place, limits.top(name))
    if "padding" in batch and "targets" in batch:
        trained = batch["padding"] & (batch["targets"] != IGNORE)
        if bool(trained.any()):
            return Fault(
                f"{who} padding with a target, at {trained.nonzero()[0].tolist()}",
                f"padding is never trained on: its targets are {IGNORE}",
            )
    if "document_ids" in batch and bool((split := _split(batch["document_ids"])).any()):
        row = int(split.nonzero()[0])
        return Fault(
            f"{who} a repeated document id: in row {row} an id of document_ids appears again after a "
            f"different one",
            "a document must be contiguous: give each piece, and padding at either end, its own id",
        )
    return None


def zero_invalid(batch: Batch, limits: Limits) -> tuple[Batch, Tensor]:
    """Return the batch with 0 in place of every invalid value, and whether there was one.

    Nothing is read to the host: the flag is a bool tensor on the device.
    """
    tensors, found = dict(batch), []
    for name in _bounded(batch):
        outside = _outside(name, batch[name], limits)
        tensors[name] = batch[name].masked_fill(outside, 0)
        found.append(outside.any())
    if "padding" in batch and "targets" in batch:
        found.append((batch["padding"] & (batch["targets"] != IGNORE)).any())
    if "document_ids" in batch:
        found.append(_split(batch["document_ids"]).any())
    return Batch(tensors, unit=batch.unit), torch.stack(found).any()


def _given(batch: Batch) -> list[str]:
    return [name for name in INTEGERS if name in batch]


def _bounded(batch: Batch) -> list[str]:
    return [name for name in _given(batch) if name != "document_ids"]  # document ids may be any integers


def _is_inside(values: Tensor, top: int | None) -> bool:
    """Return whether one cheap pass over the values shows that all of them are valid."""
    if values.dtype != torch.int64 or not values.numel():
        return False
    low, high = values.aminmax()
    return int(low) >= 0 and (top is None or int(high) < top)


def _outside(name: str, values: Tensor, limits: Limits) -> Tensor:
    """Return where ids or positions are invalid, bool."""
    top = limits.top(name)
    outside = values < 0 if top is None else (values < 0) | (values >= top)
    return outside & (values != IGNORE) if name == "targets" else outside


def _split(document_ids: Tensor) -> Tensor:
    """Return whether an id of each row of [B, S] reappears after a different one, bool [B]."""

    def changes(ids: Tensor) -> Tensor:
        return (ids[:, 1:] != ids[:, :-1]).sum(1)

    return changes(document_ids) != changes(document_ids.sort(1).values)


def _fault(who: str, name: str, value: int, place: list[int], top: int | None) -> Fault:
    if name == "positions":
        limit = "positions start at 0" if top is None else f"the model supports 0 to {top - 1}"
        return Fault(
            f"{who} the position {value} at {place}, but {limit}",
            "positions must start at 0 in each document; without them, they start at 0 in each row",
        )
    limit = "ids start at 0" if top is None else f"the model's vocab_size is {top}"
    return Fault(
        f"{who} the token id {value} in {name!r}, but {limit} (position {place})",
        "use the ids of the model's tokenizer" + (f"; {IGNORE} means no target" if name == "targets" else ""),
    )
