"""The factors of logits, for losses that need whole distributions, but never those of all rows at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titancli.losses.chunked import OfChunk, linear_sum

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.distributed.collectives import Group
    from titancli.distributed.local import NestedCut, RowCut


@dataclass(frozen=True)
class Projection:
    """Hidden states and output weight, whose product are the logits: the argument of a loss with
    `output = "projection"`.

    Valid inside the loss alone: FSDP2 frees the weight after it.
    """

    hidden: Tensor
    """[B, S, D] in the compute dtype; if rows are sharded, this rank's part of each."""
    weight: Tensor
    """[V, D]; if the vocabulary is sharded, this rank's rows of it. A bias is one of the columns."""
    cap: float | None = None
    """Logits x are cap · tanh(x / cap); None: as they are."""
    group: Group | None = None
    """The ranks that the vocabulary is sharded over, evenly."""
    row_cut: RowCut | NestedCut | None = None
    """How rows are sharded."""

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of whole rows, [B, S, …]."""
        return x if self.row_cut is None else self.row_cut.cut(x, 1)

    def whole(self, x: Tensor) -> Tensor:
        """Return whole rows, [B, S, …], from the parts of all ranks, in document order. Collective."""
        return x if self.row_cut is None else self.row_cut.join(x, 1)

    def sum(self, of_chunk: OfChunk, *, tensors: int = 1) -> tuple[Tensor, Tensor]:
        """Return a sum over all rows, with its gradient, and what each token of this rank's part adds to it:
        see `titancli.losses.chunked.linear_sum`. Collective."""
        total, each = linear_sum(self.hidden, self.weight, of_chunk, tensors=tensors, cap=self.cap)
        return total if self.row_cut is None else self.row_cut.sum(total), each
