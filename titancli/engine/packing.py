"""Samples made micro-batches: checked, dealt to ranks, and packed into rows that several of them share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from titancli.data.values import Limits
from titancli.errors import TitanError
from titancli.protocols.batch import IGNORE, Batch
from titancli.protocols.samples import Sample

STEP = 64
"""Rows whose length follows from the samples are a multiple of it long: there are not too many lengths."""
COLUMNS = {"logprobs": "old_logprobs", "reference": "reference_logprobs"}
"""What log-probabilities of a sample are called in a batch."""
OWN = ("tokens", "targets", "positions", "document_ids", "row", "weights", "advantages", *COLUMNS.values())
"""Names that `extra` cannot have: they stand for something else in a batch."""


# ----------------------------------------------------------------------------------------------- checked


@dataclass(frozen=True)
class Checked:
    """A sample as tensors on the CPU, with one number for each token; 0 where the mask is 0."""

    index: int
    tokens: Tensor
    columns: dict[str, Tensor]
    """By their names in a batch, fp32; `weights` is the mask."""

    @property
    def length(self) -> int:
        """Places in a row: the last token is a target only."""
        return len(self.tokens) - 1

    @property
    def has_targets(self) -> bool:
        return bool(self.columns["weights"].any())


def checked_samples(given: Any, vocab_size: int | None, room: int, why: str) -> list[Checked]:
    """Check samples, and make them tensors.

    Args:
        room: places of a row at most.
        why: what limits them, a hint.

    Raises:
        TitanError: one is no sample, or wrong; names its index and what is wrong.
    """
    found = [_checked(index, sample, vocab_size) for index, sample in enumerate(given)]
    for one in found:
        if one.has_targets and one.length > room:
            raise TitanError(
                f"sample {one.index} has {len(one.tokens)} tokens, but there is room for {room + 1}", hint=why
            )
        if one.columns.keys() != found[0].columns.keys():
            name = min(one.columns.keys() ^ found[0].columns.keys())
            has, lacks = (one, found[0]) if name in one.columns else (found[0], one)
            raise TitanError(
                f"sample {has.index} has {field_of(name)}, but sample {lacks.index} has not",
                hint="all samples of a call must have the same fields",
            )
    return found


def _checked(index: int, sample: Any, vocab_size: int | None) -> Checked:
    if not isinstance(sample, Sample):
        raise TitanError(
            f"sample {index} is a {type(sample).__name__}, not a titancli.Sample",
            hint="pass batches, or samples, but not both",
        )
    tokens = _tensor(index, "tokens", sample.tokens)
    if not len(tokens):
        raise TitanError(f"sample {index} has no tokens")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TitanError(f"sample {index}: its tokens are {tokens.dtype}, but must be integers")
    tokens = tokens.long()
    if bool((wrong := (tokens < 0) | (tokens >= (vocab_size or math.inf))).any()):
        place = int(wrong.nonzero()[0])
        limit = "ids start at 0" if vocab_size is None else f"the model's vocab_size is {vocab_size}"
        raise TitanError(
            f"sample {index} contains the token id {int(tokens[place])} at {place}, but {limit}",
            hint="use the ids of the model's tokenizer",
        )
    mask = _numbers(index, "mask", sample.mask, len(tokens))
    if bool((mask < 0).any()):
        raise TitanError(
            f"sample {index}: its mask has {float(mask.min()):g}, but a weight must be at least 0",
            hint="what is to become less probable has a negative advantage",
        )
    mask[0] = 0.0
    given = {
        "advantages": sample.advantages,
        **{COLUMNS[n]: v for n in COLUMNS if (v := getattr(sample, n)) is not None},
        **_extra(index, sample.extra),
    }
    read = mask != 0
    columns = {name: _numbers(index, name, value, len(tokens), read) for name, value in given.items()}
    return Checked(index, tokens, {"weights": mask, **columns})


def _extra(index: int, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise TitanError(f"sample {index}: its extra must map names to numbers")
    if taken := [name for name in given if name in OWN or not isinstance(name, str)]:
        raise TitanError(f"sample {index}: {taken[0]!r} cannot be a name in extra", hint="use another name")
    return given


def _tensor(index: int, name: str, value: Any) -> Tensor:
    what = f"sample {index}: its {field_of(name)} must be a list of numbers"
    try:
        found = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TitanError(f"{what}: {error}") from error
    if found.ndim != 1:
        raise TitanError(f"{what}, not of shape {list(found.shape)}")
    return found


def _numbers(index: int, name: str, value: Any, count: int, read: Tensor | None = None) -> Tensor:
    """[count] fp32, 0 where it is not read."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    each = [value] * count if isinstance(value, Real) and name not in COLUMNS.values() else value
    # Python's floats would get the default dtype of the script.
    exact = torch.tensor(each, dtype=torch.float64) if _are_floats(each) else _tensor(index, name, each)
    if len(exact) != count:
        what = "one number" if len(exact) == 1 else f"{len(exact)} numbers"
        raise TitanError(
            f"sample {index}: its {field_of(name)} has {what}, but it has {count} tokens",
            hint="pass one for each token, those of the prompt and the first one included",
        )
    found = exact.float().clone()
    if read is not None:
        found = torch.where(read, found, 0.0)
    if not bool(found.isfinite().all()):
        place = int((~found.isfinite()).nonzero()[0])
        raise TitanError(f"sample {index}: its {field_of(name)} has {float(found[place])} at {place}")
    return found


def _are_floats(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Real) for one in value)


def field_of(name: str) -> str:
    """Return what a column of a batch is called in a sample."""
    return next((own for own, column in COLUMNS.items() if column == name), name)


def checksum(samples: Sequence[Checked]) -> str:
    """Return a checksum of tokens and targets. (Other numbers may differ by rounding.)"""
    state = xxhash.xxh3_64()
    for sample in samples:
        state.update(sample.tokens.numpy().data)
        state.update((sample.columns["weights"] != 0).numpy().data)
    return state.hexdigest()


# ------------------------------------------------------------------------------------------------ packed


class Place(NamedTuple):
    """Where a sample lies in the rows of a rank."""

    sample: Checked
    row: int
    start: int


class Rows:
    """The rows of one rank."""

    def __init__(self, samples: Sequence[Checked], length: int, *, shared: bool) -> None:
        """The longest sample first, each into the first row that has room. One without targets is left out.

        Args:
            length: places in a row at most.
            shared: whether samples share rows, as a model must know documents to allow.
        """
        self.places: list[Place] = []
        filled: list[int] = []
        for sample in sorted((one for one in samples if one.has_targets), key=lambda one: -one.length):
            fits = (i for i, used in enumerate(filled) if shared and used + sample.length <= length)
            row = next(fits, len(filled))
            if row == len(filled):
                filled.append(0)
            self.places.append(Place(sample, row, filled[row]))
            filled[row] += sample.length
        self.count, self.longest = len(filled), max(filled, default=0)


def dealt(samples: Sequence[Checked], ranks: int) -> list[list[Checked]]:
    """Distribute samples over ranks: the longest first, each to the rank with the fewest tokens."""
    piles: list[list[Checked]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for sample in sorted(samples, key=lambda one: -one.length):
        rank = loads.index(min(loads))
        piles[rank].append(sample)
        loads[rank] += sample.length
    return [sorted(pile, key=lambda one: one.index) for pile in piles]


@dataclass(frozen=True)
class Room:
    """How large the micro-batches of a call may be."""

    row: int
    """Places in a row at most."""
    budget: int
    """Places in a micro-batch at most."""
    exact: bool
    """Whether micro-batches are always that large; else as large as their samples need."""
    usual: int
    """Places in a row, unless a sample needs more or `exact` says otherwise."""
    multiple: int = 1
    """What the length of a row must be a multiple of."""
    rows_multiple: int = 1
    """What the number of rows must be a multiple of."""

    @classmethod
    def of(
        cls, budget: int | None, usual_budget: int, usual: int, limits: Limits, rows_multiple: int
    ) -> Room:
        """
        Raises:
            TitanError: the budget is not a number of tokens that has room for a row.
        """
        if budget is not None and (type(budget) is not int or budget < limits.multiple):
            raise TitanError(
                f"the budget {budget!r} is not a number of tokens, at least {limits.multiple}",
                hint="it is how many tokens a micro-batch has",
            )
        total = usual_budget if budget is None else budget
        row = min(total, limits.row_length or total)
        row -= row % limits.multiple
        return cls(row, total, budget is not None, min(usual, row), limits.multiple, rows_multiple)

    @property
    def why(self) -> str:
        """What to do where a sample is too long."""
        if self.row + self.multiple > self.budget:
            return "pass a larger budget, in tokens"
        return "use shorter samples, or a larger training.seq_len"

    def length_for(self, samples: Sequence[Checked]) -> int:
        """How many places of rows may be filled with these samples."""
        longest = max((one.length for one in samples if one.has_targets), default=0)
        return self.row if self.exact else max(self.usual, longest)

    def shape(self, count: int, longest: int) -> tuple[int, int, int]:
        """Return micro-batches, their rows, and the length of rows.

        Args:
            count: rows of the rank that has most.
            longest: places of the row that is filled most, on any rank.
        """
        length, rows = self.row, max(1, self.budget // self.row)
        if not self.exact:
            step = math.lcm(STEP, self.multiple)
            length = min(self.row, max(1, -(-longest // step)) * step)
            rows = max(1, self.budget // length)
        batches = max(1, -(-count // rows))
        if not self.exact:
            rows = max(1, -(-count // batches))
        return batches, -(-rows // self.rows_multiple) * self.rows_multiple, length


@dataclass(frozen=True)
class Packed:
    """Samples of this rank as micro-batches on the CPU."""

    places: Sequence[Place]
    batches: list[Batch]
    lengths: Sequence[int]
    """Tokens of each sample that was passed here, also of those that are on other ranks."""

    def unpacked(self, rows: Tensor) -> list[Tensor]:
        """Return numbers at the places of rows as those of samples: [R, S] -> [tokens] each, 0 for the first
        token, and for samples of other ranks."""
        found = [rows.new_zeros(length) for length in self.lengths]
        for sample, row, start in self.places:
            found[sample.index][1:] = rows[row, start : start + sample.length]
        return found

    def repacked(self, numbers: Sequence[Tensor | None]) -> Tensor:
        """The other way round: [tokens] for each sample -> [R, S] fp32; None stands for zeros."""
        tokens = [batch["tokens"] for batch in self.batches]
        found = torch.zeros(sum(map(len, tokens)), tokens[0].shape[1], device=_device_of(numbers))
        for sample, row, start in self.places:
            if (own := numbers[sample.index]) is not None:
                found[row, start : start + sample.length] = own[1:]
        return found


def _device_of(numbers: Sequence[Tensor | None]) -> torch.device | None:
    return next((one.device for one in numbers if one is not None), None)


def pack(rows: Rows, shape: tuple[int, int, int], names: Sequence[str], lengths: Sequence[int]) -> Packed:
    """Put the samples of rows into micro-batches; what is lacking has no targets.

    Args:
        shape: micro-batches, rows, length; see `Room.shape`.
        names: the columns.
    """
    batches, size, length = shape
    count = batches * size
    ids = {"tokens": torch.zeros(count, length, dtype=torch.int64)}
    ids["targets"] = torch.full((count, length), IGNORE)
    ids["positions"] = torch.arange(length).repeat(count, 1)
    ids["document_ids"] = torch.zeros(count, length, dtype=torch.int32)
    columns = {name: torch.zeros(count, length, dtype=torch.float32) for name in names}
    for document, (sample, row, start) in enumerate(rows.places, start=1):
        here = (row, slice(start, start + sample.length))
        follows = sample.tokens[1:]
        ids["tokens"][here] = sample.tokens[:-1]
        ids["targets"][here] = torch.where(sample.columns["weights"][1:] != 0, follows, IGNORE)
        ids["positions"][here] = torch.arange(sample.length)
        ids["document_ids"][here] = document
        for name in names:
            columns[name][here] = sample.columns[name][1:]
        # What is left of a row is a document of its own.
        left = start + sample.length
        ids["positions"][row, left:] = torch.arange(length - left)
        ids["document_ids"][row, left:] = 0
    whole = Batch({**ids, **columns, "row": torch.arange(count)})
    return Packed(rows.places, whole.split(size), lengths)
