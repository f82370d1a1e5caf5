"""The teacher: a frozen engine, of which a batch gets the last hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from titan_distil.losses import HIDDEN, Distil, Head
from titancli import Batch, Engine, LossResult, TitanError, phase
from titancli.distributed.collectives import gather_same

if TYPE_CHECKING:
    from torch import Tensor

    from titan_distil import Teacher as Config
    from titancli import Recipe
    from titancli.models.blocks.projection import Projection


class Teacher:
    """A live teacher: adds the teacher's hidden states to batches.

    Hidden states are the smallest form of its distributions. The output weight is kept whole beside its
    sharded layers, in its dtype: under tensor parallelism of the student, the rows that a rank needs.
    """

    def __init__(self, student: Engine, recipe: Recipe, config: Config) -> None:
        """Build the engine. Collective.

        Raises:
            TitanError: the weights do not fit the model, or the layout deals rows otherwise than the
                student's.
        """
        loss: Any = student.loss
        if not isinstance(loss, Distil):
            raise TitanError("the loop distil needs its own loss", hint='set loss = "distil"')
        self._student, self._loss = student, loss
        self._head = _Capture()
        self.engine = Engine.frozen(config.recipe(recipe), device=student.device)
        ours, theirs = student.mesh.degrees, self.engine.mesh.degrees
        if theirs.dp != ours.dp:
            raise TitanError(
                f"loop.teacher.mesh has {theirs.dp} data-parallel ranks, the student's mesh {ours.dp}",
                hint="both see the same rows on a rank: dp_replicate x dp_shard must be the same",
            )

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch, on the device, with the teacher's hidden states. Collective."""
        batch = batch.to(self._student.device)
        with phase("teacher"):
            self.engine.evaluate(batch, self._head)
        if self._loss.teacher is None:
            self._loss.teacher = self._head.head
        return Batch({**batch, HIDDEN: self._head.taken()}, unit=batch.unit)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


class _Capture:
    """A loss that is none: takes hidden states, and the first time the output weight, which is freed after
    it."""

    output = "projection"

    def __init__(self) -> None:
        self._hidden: Tensor | None = None
        self.head: Head | None = None

    def __call__(self, out: Projection, batch: Batch) -> LossResult:
        self._hidden = out.whole(out.hidden)
        if self.head is None:
            weight = out.weight if out.group is None else gather_same(out.weight, 0, out.group)
            self.head = Head(weight.detach().clone(), out.cap)
        nothing = torch.zeros((), device=out.hidden.device)
        return LossResult(nothing, nothing)

    def taken(self) -> Tensor:
        """Return the hidden states of the last batch, [B, S, D], and forget them."""
        found, self._hidden = self._hidden, None
        if found is None:
            raise TitanError(
                "the teacher's model does not compute losses in titancli.models.blocks.head.Output"
            )
        return found
