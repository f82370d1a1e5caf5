"""The loss: the student's logits and the teacher's are made of their hidden states, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from titan_distil.divergence import TENSORS, Divergence, Rows
from titancli import IGNORE, LossResult
from titancli.errors import TitanError
from titancli.losses.chunked import capped
from titancli.models.blocks.head import report_by_dataset
from titancli.protocols.result import check_shape

if TYPE_CHECKING:
    from torch import Tensor

    from titan_distil import DistilLoss
    from titancli import Batch
    from titancli.models.blocks.projection import Projection

HIDDEN = "teacher_hidden"
"""The teacher's last hidden states in a batch, [B, S, its width]."""
TOP = ("teacher_topk_logprobs", "teacher_topk_ids")
"""In place of them, log-probabilities and ids of the teacher's K most probable tokens, [B, S, K] each."""


@dataclass
class Head:
    """What makes logits of the teacher's hidden states."""

    weight: Tensor
    """[V, its width]: of the whole vocabulary, or the rows that this rank needs."""
    cap: float | None = None

    def narrow(self, out: Projection) -> None:
        """Keep only the part of the vocabulary that this rank has of the student's.

        Raises:
            TitanError: the vocabularies differ.
        """
        ranks = 1 if out.group is None else out.group.size
        rows = out.weight.shape[0]
        if self.weight.shape[0] == rows:
            return
        if self.weight.shape[0] != rows * ranks or out.group is None:
            raise TitanError(
                f"the teacher's vocabulary has {self.weight.shape[0]} tokens, the student's {rows * ranks}",
                hint="distributions over different tokens cannot be compared: use a teacher of the same "
                "vocabulary",
            )
        self.weight = self.weight[out.group.rank * rows :][:rows].clone()


class Distil:
    """(1 − w) · divergence + w · cross-entropy, summed over the targets; its weight is their number, or the
    sum of their `weights`."""

    output = "projection"

    def __init__(self, config: DistilLoss) -> None:
        self._sft_weight = config.sft_weight
        self._divergence = Divergence(config.divergence, config.beta, config.temperature, config.sft_weight)
        self.teacher: Head | None = None
        """Set by the loop."""

    def check_batch(self, batch: Batch) -> None:
        """
        Raises:
            TitanError: there are `weights`, and not one for each token; or the teacher's hidden states do not
                fit.
        """
        if "weights" in batch:
            check_shape(batch, "weights", "BS", "distil")
        if all(name in batch for name in TOP) or self._planned(batch):
            return
        if self.teacher is None or HIDDEN not in batch:
            raise TitanError(
                f"the loss distil has no teacher: the batch lacks {HIDDEN}",
                hint='set [loop] type = "distil", which adds it',
            )
        wanted = (*batch["tokens"].shape, self.teacher.weight.shape[1])
        if batch[HIDDEN].shape != wanted:
            raise TitanError(f"the batch's {HIDDEN} are {list(batch[HIDDEN].shape)}, not {list(wanted)}")

    def _planned(self, batch: Batch) -> bool:
        """Return whether only sizes are asked for, as by `titan plan`, which has no teacher: it is taken to
        be as wide as the student."""
        return self.teacher is None and batch["tokens"].is_meta

    def __call__(self, out: Projection, batch: Batch) -> LossResult:
        """
        Args:
            out: the student's hidden states, and its output weight.
        """
        there = batch["targets"] != IGNORE
        given = batch["weights"].float() if "weights" in batch else there.float()
        weights = torch.where(there, given, 0.0)
        own, targets = out.part(weights).flatten(), out.part(batch["targets"]).flatten()
        compare = self._comparison(out, batch, targets)
        divergence = torch.empty_like(own)
        log_probs = torch.empty_like(own)

        def of_chunk(logits: Tensor, rows: slice, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
            found = compare(logits, rows, wants_gradient)
            # What stands where there is no target may be infinite, which survives a product with 0.
            none = own[rows] == 0
            divergence[rows] = found.divergence.masked_fill_(none, 0.0)
            log_probs[rows] = found.log_probs
            each = (1 - self._sft_weight) * divergence[rows] - self._sft_weight * log_probs[rows]
            if found.gradient is None:
                return own[rows] * each, None
            gradient = found.gradient.mul_(own[rows][:, None]).masked_fill_(none[:, None], 0.0)
            return own[rows] * each, logits.copy_(gradient)

        total, _ = out.sum(of_chunk, tensors=TENSORS)
        shape = out.hidden.shape[:-1]
        divergence, log_probs = out.whole(divergence.view(shape)), out.whole(log_probs.view(shape))
        report_by_dataset(log_probs, batch)
        metrics = {
            "divergence": (weights * divergence).sum(),
            "cross_entropy": -(weights * log_probs).sum(),
        }
        return LossResult(total, weights.sum(), metrics)

    def _comparison(
        self, out: Projection, batch: Batch, targets: Tensor
    ) -> Callable[[Tensor, slice, bool], Rows]:
        """Return the function that compares the student's logits of some rows with the teacher's."""
        if TOP[0] in batch:
            log_top, ids = (out.part(batch[name]).flatten(0, 1) for name in TOP)

            def with_top(logits: Tensor, rows: slice, wants_gradient: bool) -> Rows:
                given = (logits, log_top[rows], ids[rows], targets[rows])
                return self._divergence.of_top(*given, group=out.group, wants_gradient=wants_gradient)

            return with_top
        head, given = self.teacher, batch.get(HIDDEN)
        if self._planned(batch):
            head = Head(out.weight.detach())
            given = batch["tokens"].new_empty(
                (*batch["tokens"].shape, out.weight.shape[1]), dtype=out.hidden.dtype
            )
        if head is None or given is None:
            raise TitanError("the loss distil has no teacher", hint='set [loop] type = "distil"')
        head.narrow(out)
        hidden = out.part(given).flatten(0, 1)

        def with_all(logits: Tensor, rows: slice, wants_gradient: bool) -> Rows:
            theirs, _ = capped(hidden[rows] @ head.weight.t(), head.cap)
            given = (logits, theirs, targets[rows])
            return self._divergence(*given, group=out.group, wants_gradient=wants_gradient)

        return with_all
