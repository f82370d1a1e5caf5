"""`Batch`: a frozen mapping of names to tensors whose first dimension is always rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from titancli.errors import TitanError, nearest_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORE = -100
"""The target of positions that are not trained on."""
MIX = "mix/"
"""Prefix of the names that mark the rows of one dataset of a mixture: `mix/NAME`, [B] fp32, 1 or 0."""
EXAMPLE = 'pass titancli.Batch({"tokens": ..., "targets": ...})'


class Spans(NamedTuple):
    """Upper bounds of the documents of rows, which the host knows without reading a device."""

    documents: int
    """In a row."""
    longest: int
    """Tokens of a document."""

    @classmethod
    def of(cls, document_ids: Tensor) -> Spans:
        """Return the bounds of `document_ids` on the CPU, [B, S] integers."""
        begins = document_ids.diff(dim=1, prepend=document_ids[:, :1] - 1) != 0
        starts = begins.flatten().nonzero()[:, 0]
        lengths = starts.diff(append=starts.new_tensor([begins.numel()]))
        return cls(int(begins.sum(1).max()), int(lengths.max()))


@dataclass(frozen=True)
class Counts:
    """What rows consist of, which the host knows without reading a device."""

    tokens: int = 0
    """Positions that are prompts or targets."""
    targets: int = 0
    padding: int = 0
    """The other positions."""

    @classmethod
    def of(cls, targets: Tensor, padding: Tensor | None, document_ids: Tensor | None) -> Counts:
        """Return the counts of rows on the CPU, [B, S] each; `padding` None: that of `padding_of`."""
        positions, found = targets.numel(), int((targets != IGNORE).sum())
        if padding is None and found < positions:
            padding = padding_of(targets, document_ids)
        padded = 0 if padding is None else int(padding.sum())
        return cls(positions - padded, found, padded)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tokens + other.tokens, self.targets + other.targets, self.padding + other.padding)


NOTHING = Counts()


def padding_of(targets: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Return where rows are padding, [B, S] bool: no position from there to the end of the document has a
    target, so that nothing which is trained depends on it. Reads nothing from the device.

    Args:
        targets: [B, S] int64.
        document_ids: [B, S] integers; None: a row is one document.
    """
    size = targets.shape[1]
    places = targets.new_ones(size).cumsum(0) - 1
    following = places.masked_fill(targets == IGNORE, size).flip(1).cummin(1).values.flip(1)
    padding = following == size
    if document_ids is None:
        return padding
    return padding | (document_ids.gather(1, following.clamp(max=size - 1)) != document_ids)


class MissingTensor(TitanError, KeyError):
    """A requested tensor is not in the batch."""


class Batch(Mapping[str, "Tensor"]):
    """Rows of training data.

    | key | shape, dtype | meaning |
    |---|---|---|
    | tokens | [B, S] int64 | model input |
    | targets | [B, S] int64 | already shifted: `targets[b, t]` follows `tokens[b, t]`; -100 is no target |
    | positions | [B, S] int64 | position within the document |
    | document_ids | [B, S] int32, optional | attention stays inside one id |
    | routes | [B, S, layers, top_k] integers, optional | experts to visit; -1 is the router's choice |
    | padding | [B, S] bool, optional | positions that are neither prompts nor targets; absent: `padding_of` |
    | any other | [B, …] | a loss's own inputs |

    `unit` rows belong together (2 for preference pairs) and are never split.

    Raises:
        TitanError: there is no tensor; one has no rows, or another number of them than the others; or that is
            no multiple of `unit`. Asking for what is not there raises one that is a KeyError too.
    """

    __slots__ = ("_tensors", "unit")

    def __init__(self, tensors: Mapping[str, Tensor], *, unit: int = 1) -> None:
        if not tensors:
            raise TitanError("a batch must have tensors", hint=EXAMPLE)
        for name, value in tensors.items():
            if not getattr(value, "ndim", 0) or not hasattr(value, "shape"):
                number = hasattr(value, "ndim")
                what = "a scalar tensor" if number else f"a {type(value).__name__}"
                raise TitanError(
                    f"a batch's {name} must be a tensor whose first dimension is rows, not {what}",
                    hint=EXAMPLE,
                )
        rows = {name: tensor.shape[0] for name, tensor in tensors.items()}
        if len(set(rows.values())) != 1:
            raise TitanError(f"a batch's tensors must have the same number of rows, not {rows}")
        if unit < 1 or next(iter(rows.values())) % unit:
            raise TitanError(
                f"a batch of {next(iter(rows.values()))} rows cannot be divided into units of {unit}"
            )
        self._tensors = dict(tensors)
        self.unit = unit

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            near = nearest_name(str(name), self._tensors)
            raise MissingTensor(
                f"the batch has no {name!r}; it has {', '.join(self._tensors)}",
                hint=f"did you mean {near!r}?" if near else None,
            )
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def rows(self) -> int:
        return next(iter(self._tensors.values())).shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch on a device; the copy does not wait for it. On a GPU, `document_ids` get the
        attribute `spans` (`Spans`), and `targets` the attribute `counts` (`Counts`)."""
        moved = Batch({k: v.to(device, non_blocking=True) for k, v in self.items()}, unit=self.unit)
        if "document_ids" in self and moved["document_ids"].is_cuda:
            ids, there = self["document_ids"], moved["document_ids"]
            if _are_known_rows(ids):
                there.spans = Spans.of(ids)  # type: ignore[attr-defined]
        if "targets" in self and moved["targets"].is_cuda and (counts := self.counts()) is not None:
            moved["targets"].counts = counts  # type: ignore[attr-defined]
        return moved

    def counts(self) -> Counts | None:
        """Return the counts of rows with targets, if the host knows them: rows on the CPU, or moved from
        there by `to`."""
        targets, padding, ids = (self._tensors.get(name) for name in ("targets", "padding", "document_ids"))
        if targets is None:
            return None
        there = [one for one in (targets, padding, ids) if one is not None]
        if all(_are_known_rows(one) for one in there) and len({one.shape for one in there}) == 1:
            return Counts.of(targets, padding, ids)
        return getattr(targets, "counts", None)

    def split(self, rows: int) -> list[Batch]:
        """Return pieces of `rows` rows each, a multiple of `unit`."""
        if rows < 1 or rows % self.unit or self.rows % rows:
            raise TitanError(f"a batch of {self.rows} rows (units of {self.unit}) cannot be split by {rows}")
        pieces = {name: tensor.split(rows) for name, tensor in self.items()}
        return [
            Batch({name: parts[i] for name, parts in pieces.items()}, unit=self.unit)
            for i in range(self.rows // rows)
        ]

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{k}{list(v.shape)}' for k, v in self.items())})"


def _are_known_rows(x: Tensor) -> bool:
    # A fake tensor cannot be read, and the engine refuses other shapes.
    return x.is_cpu and not hasattr(x, "fake_mode") and x.ndim == 2 and x.numel() > 0
