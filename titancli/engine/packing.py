"""Packing of samples into micro-batches: checks, distribution over ranks, and rows that samples share."""

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
from titancli.engine.routes import NO_RECORD, ROUTES, routes_of
from titancli.errors import TitanError
from titancli.protocols import Routing
from titancli.protocols.batch import IGNORE, Batch
from titancli.protocols.samples import Sample

STEP = 64
"""Row lengths are rounded up to a multiple of this, to limit the number of shapes."""
COLUMNS = {"logprobs": "old_logprobs", "reference": "reference_logprobs"}
"""The names in a batch of a sample's log-probabilities."""
OWN = (
    *("tokens", "targets", "positions", "document_ids", ROUTES),
    *("row", "weights", "advantages", *COLUMNS.values()),
)
"""Names that `extra` cannot have: they have another meaning in a batch."""


# ----------------------------------------------------------------------------------------------- checked


@dataclass(frozen=True)
class Checked:
    """A sample as CPU tensors with one number per token, 0 where the mask is 0."""

    index: int
    tokens: Tensor
    columns: dict[str, Tensor]
    """Columns by their names in a batch, fp32; `weights` is the mask. `routes`, int16, are of tokens as
    inputs."""

    @property
    def length(self) -> int:
        """The number of positions in a row: the last token is only a target."""
        return len(self.tokens) - 1

    @property
    def has_targets(self) -> bool:
        return bool(self.columns["weights"].any())


def checked_samples(
    given: Any, vocab_size: int | None, routing: Routing | None, room: int, why: str
) -> list[Checked]:
    """Check samples, and convert them to tensors.

    Args:
        routing: the model's.
        room: maximum positions of a row.
        why: a hint on how to raise the limit.

    Raises:
        TitanError: an item is not a valid sample; names its index and the error.
    """
    found = [_checked(index, sample, vocab_size, routing) for index, sample in enumerate(given)]
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


def _checked(index: int, sample: Any, vocab_size: int | None, routing: Routing | None) -> Checked:
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
    if sample.routes is not None:
        columns[ROUTES] = routes_of(index, sample.routes, len(tokens), routing)
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
    """Return [count] fp32, 0 where `read` is false."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    each = [value] * count if isinstance(value, Real) and name not in COLUMNS.values() else value
    # Python floats would get the script's default dtype.
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
    """Return the name in a sample of a column of a batch."""
    return next((own for own, column in COLUMNS.items() if column == name), name)


def checksum(samples: Sequence[Checked]) -> str:
    """Return a checksum of tokens, targets and routes. (Floats may differ by rounding.)"""
    state = xxhash.xxh3_64()
    for sample in samples:
        state.update(sample.tokens.numpy().data)
        state.update((sample.columns["weights"] != 0).numpy().data)
        if ROUTES in sample.columns:
            state.update(sample.columns[ROUTES].numpy().data)
    return state.hexdigest()


# ------------------------------------------------------------------------------------------------ packed


class Place(NamedTuple):
    """The position of a sample in the rows of a rank."""

    sample: Checked
    row: int
    start: int


class Rows:
    """The rows of one rank."""

    def __init__(self, samples: Sequence[Checked], length: int, *, shared: bool) -> None:
        """Pack the longest sample first, each into the first row with room. Samples without targets are left
        out.

        Args:
            length: maximum positions of a row.
            shared: whether samples share rows; the model must then use document ids.
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
    """The size of the micro-batches of a call."""

    row: int
    """Maximum positions of a row."""
    budget: int
    """Maximum positions of a micro-batch."""
    exact: bool
    """Whether micro-batches are always that large; otherwise as large as their samples need."""
    usual: int
    """Positions of a row, unless a sample needs more or `exact` is set."""
    multiple: int = 1
    """Row lengths are multiples of this."""
    rows_multiple: int = 1
    """Row counts are multiples of this."""

    @classmethod
    def of(
        cls, budget: int | None, usual_budget: int, usual: int, limits: Limits, rows_multiple: int
    ) -> Room:
        """
        Raises:
            TitanError: the budget is not a number of tokens with room for a row.
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
        """A hint for samples that are too long."""
        if self.row + self.multiple > self.budget:
            return "pass a larger budget, in tokens"
        return "use shorter samples, or a larger training.seq_len"

    def length_for(self, samples: Sequence[Checked]) -> int:
        """Return the maximum number of positions of a row that may be filled with these samples."""
        longest = max((one.length for one in samples if one.has_targets), default=0)
        return self.row if self.exact else max(self.usual, longest)

    def shape(self, count: int, longest: int) -> tuple[int, int, int]:
        """Return the number of micro-batches, their rows, and the row length.

        Args:
            count: maximum rows of any rank.
            longest: maximum filled positions of any row, on any rank.
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
    """The samples of this rank as micro-batches on the CPU."""

    places: Sequence[Place]
    batches: list[Batch]
    lengths: Sequence[int]
    """Tokens of each sample that was passed on this rank, including those dealt to other ranks."""

    def unpacked(self, rows: Tensor) -> list[Tensor]:
        """Return values of rows by sample: [R, S] -> [tokens] each, 0 for the first token, and for samples of
        other ranks."""
        found = [rows.new_zeros(length) for length in self.lengths]
        for sample, row, start in self.places:
            found[sample.index][1:] = rows[row, start : start + sample.length]
        return found

    def repacked(self, numbers: Sequence[Tensor | None]) -> Tensor:
        """Return values of samples by row: [tokens] for each sample -> [R, S] fp32; None means zeros."""
        tokens = [batch["tokens"] for batch in self.batches]
        found = torch.zeros(sum(map(len, tokens)), tokens[0].shape[1], device=_device_of(numbers))
        for sample, row, start in self.places:
            if (own := numbers[sample.index]) is not None:
                found[row, start : start + sample.length] = own[1:]
        return found


def _device_of(numbers: Sequence[Tensor | None]) -> torch.device | None:
    return next((one.device for one in numbers if one is not None), None)


def pack(
    rows: Rows,
    shape: tuple[int, int, int],
    names: Sequence[str],
    lengths: Sequence[int],
    routing: Routing | None,
) -> Packed:
    """Copy the samples of rows into micro-batches; padding has no targets.

    Args:
        shape: number of micro-batches, rows, length; see `Room.shape`.
        names: the names of the columns.
        routing: the model's; needed if one of them is `routes`.
    """
    batches, size, length = shape
    count = batches * size
    ids = {"tokens": torch.zeros(count, length, dtype=torch.int64)}
    ids["targets"] = torch.full((count, length), IGNORE)
    ids["positions"] = torch.arange(length).repeat(count, 1)
    ids["document_ids"] = torch.zeros(count, length, dtype=torch.int32)
    columns = {name: torch.zeros(count, length, dtype=torch.float32) for name in names}
    if ROUTES in columns and routing is not None:
        columns[ROUTES] = torch.full((count, length, *routing[:2]), NO_RECORD, dtype=torch.int16)
    for document, (sample, row, start) in enumerate(rows.places, start=1):
        here = (row, slice(start, start + sample.length))
        follows = sample.tokens[1:]
        ids["tokens"][here] = sample.tokens[:-1]
        ids["targets"][here] = torch.where(sample.columns["weights"][1:] != 0, follows, IGNORE)
        ids["positions"][here] = torch.arange(sample.length)
        ids["document_ids"][here] = document
        for name in names:
            own = sample.columns[name]
            columns[name][here] = own[:-1] if name == ROUTES else own[1:]
        # The padding of a row is a separate document.
        left = start + sample.length
        ids["positions"][row, left:] = torch.arange(length - left)
        ids["document_ids"][row, left:] = 0
    whole = Batch({**ids, **columns, "row": torch.arange(count)})
    return Packed(rows.places, whole.split(size), lengths)
