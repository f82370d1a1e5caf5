"""The output projection, with the loss inside its forward.

Inside, FSDP2 has gathered the weight and will reduce its gradient; outside, it is a sharded DTensor that
plain operations cannot use. This is also where shards are joined again: of a vocabulary split over ranks
(tensor parallelism), and of split rows (context parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from titancli.distributed.collectives import Group, gather, gather_same
from titancli.distributed.local import SEQUENCE, NestedCut, RowCut, local
from titancli.errors import TitanError
from titancli.losses.chunked import (
    capped,
    entropy,
    linear_log_probs,
    linear_log_probs_and_entropy,
    linear_token_loss,
    linear_topk,
)
from titancli.models.blocks.mtp import further, targets_ahead
from titancli.models.blocks.projection import Projection
from titancli.observe.metrics import report
from titancli.protocols.batch import IGNORE, MIX, Batch

if TYPE_CHECKING:
    from titancli.protocols import Loss
    from titancli.protocols.result import LossResult


class Output(nn.Linear):
    """Maps hidden states to logits, or directly to a loss.

    Ranks that share rows or the vocabulary have the same whole batch, and get the same loss.
    """

    tensor_group: Group | None = None
    """The ranks that hold the other rows of the weight; hidden states come split along the sequence."""
    row_cut: RowCut | None = None
    """How rows are split over ranks: hidden states are this rank's part."""
    token_cut: RowCut | None = None
    """How the ranks of tensor parallelism split that part, if they do not divide the vocabulary: each then
    has the whole weight, and keeps its part of the sequence."""
    loss_backend: str | None = None
    """Compiler backend for the loss's arithmetic; None: not compiled."""
    scale: float = 1.0
    """Factor of logits, including the bias."""
    cap: float | None = None
    """Cap of scaled logits: x becomes cap · tanh(x / cap)."""
    mtp_loss_weight: float = 0.0
    """Factor of the mean loss of multi-token prediction."""

    def __init__(self, dim: int, vocab_size: int, *, bias: bool = False) -> None:
        super().__init__(dim, vocab_size, bias=bias)

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Shard the module; called by the `decoder` plan, with the style "vocab" if its ranks divide the
        vocabulary."""
        if style == "vocab":
            self.tensor_group = group
        else:
            self.token_cut = RowCut(group, head_tail=False)

    @property
    def cut(self) -> RowCut | NestedCut | None:
        """Return how whole rows are split into this rank's part; None: they are not."""
        if self.row_cut is None or self.token_cut is None:
            return self.row_cut or self.token_cut
        return NestedCut(self.row_cut, self.token_cut)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        batch: Batch | None = None,
        loss: Loss | None = None,
        ahead: Sequence[Tensor] = (),
    ) -> Tensor | LossResult:
        """Map [B, S, dim] to logits [B, S, V], or to a LossResult if a loss is given.

        `ahead`: hidden states that predict the second token from theirs on, the third, …
        (`titancli.models.blocks.mtp`), whose loss adds to the gradients but not to the sum.

        Raises:
            TitanError: `ahead` is given, and the loss has no token weights.
        """
        if ahead:
            _refuse_unweighted(loss, batch)
            hidden = torch.cat((hidden, *ahead))
        states = hidden
        if loss is not None and batch is not None and loss.output == "hidden":
            return loss(self._whole_states(states), batch)
        if self.tensor_group is not None:
            hidden = gather(hidden, SEQUENCE, self.tensor_group)
        temperature = 1.0 if loss is None else loss.temperature
        hidden, weight = self._factors(hidden, self.scale / temperature)
        cap = self.cap if self.cap is None else self.cap / temperature
        if loss is None:
            return self._logits(hidden, weight, cap)
        if batch is None:
            raise TypeError("a loss needs its batch")
        if loss.outputs:
            batch = self._with_outputs(batch, loss.outputs, states, hidden, weight, cap)
        wants_entropy = loss.entropy
        if loss.output == "projection":
            return loss(Projection(hidden, weight, cap, self.tensor_group, self.cut), batch)
        if loss.output == "model":
            logits = self._logits(hidden, weight, cap)
            if wants_entropy:
                batch = _with_entropy(batch, entropy(logits, batch["targets"]))
            return loss(logits, batch)
        weights = loss.token_weights(batch)
        if weights is not None:  # values without a target may be NaN, which survives a product with 0
            weights = weights.masked_fill(batch["targets"] < 0, 0.0)
        if weights is None or wants_entropy:
            return self._from_log_probs(hidden, weight, cap, batch, loss, weights, wants_entropy)
        # The loss declares its token weights, so its sum is computed together with its gradient.
        targets, own = batch["targets"], weights
        if ahead:
            steps, share = range(1, len(ahead) + 1), self.mtp_loss_weight / len(ahead)
            targets = torch.cat((targets, *(targets_ahead(batch, n) for n in steps)))
            weights = torch.cat((own, *(share * further(own, n, 0) for n in steps)))
        total, log_probs = linear_token_loss(
            hidden,
            weight,
            self._my_part(targets),
            self._my_part(weights),
            self.tensor_group,
            self.loss_backend,
            cap,
        )
        if self.cut is not None:
            total = self.cut.sum(total)
        log_probs = self._whole_rows(log_probs)
        if ahead:
            self._report_ahead(log_probs, targets, weights, len(own))
            log_probs = log_probs[: len(own)]
            total = -(log_probs * own).sum() + (total - total.detach())  # the sum over next tokens alone
        report_by_dataset(log_probs, batch)
        return loss(log_probs, batch)._replace(sum=total)

    def _with_outputs(
        self,
        batch: Batch,
        outputs: Sequence[str],
        states: Tensor,
        hidden: Tensor,
        weight: Tensor,
        cap: float | None,
    ) -> Batch:
        """Add what a loss declares (`LossDefaults.outputs`).

        Args:
            states: hidden states as they came.
            hidden, weight: as `_factors` returns them.
        """
        found, rows = dict(batch), batch.rows
        for name, _, number in (one.partition(":") for one in outputs):
            if name == "topk":
                made = linear_topk(hidden[:rows], weight, int(number), self.tensor_group, cap)
                found["topk_logprobs"], found["topk_ids"] = map(self._whole_rows, made)
            else:
                found["hidden"] = self._whole_states(states[:rows])
        return Batch(found, unit=batch.unit)

    def _whole_states(self, states: Tensor) -> Tensor:
        """Return hidden states of whole rows, [B, S, dim], the same on all ranks that share them."""
        if self.tensor_group is not None:
            states = gather_same(states, SEQUENCE, self.tensor_group)
        return self._whole_rows(states)

    def _report_ahead(self, log_probs: Tensor, targets: Tensor, weights: Tensor, rows: int) -> None:
        """Report the mean loss of tokens further ahead, which follow the first `rows` rows, as `mtp_loss`."""
        weights = weights[rows:].masked_fill(targets[rows:] < 0, 0.0)
        report("mtp_loss", -(log_probs[rows:] * weights).sum(), count=weights.sum())

    def _factors(self, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return hidden states and a matrix whose product are the logits before capping: a bias becomes
        one more column, padded with zeros to keep the width a multiple of eight."""
        hidden, weight = self.matrix(hidden)
        if scale != 1.0:
            hidden = hidden * scale
        if self.bias is not None:
            columns = (local(self.bias)[:, None], weight.new_zeros(weight.shape[0], 7))
            hidden = torch.cat((hidden, hidden.new_full((*hidden.shape[:-1], 1), scale)), -1)
            hidden, weight = pad(hidden, (0, 7)), torch.cat((weight, *columns), 1)
        return hidden, weight

    def _from_log_probs(
        self,
        hidden: Tensor,
        weight: Tensor,
        cap: float | None,
        batch: Batch,
        loss: Loss,
        weights: Tensor | None,
        wants_entropy: bool,
    ) -> LossResult:
        """Compute the loss of differentiable log-probabilities; with weights it is −Σ w·log p."""
        targets = self._my_part(batch["targets"])
        given = (hidden, weight, targets, self.tensor_group, self.loss_backend, cap)
        if wants_entropy:
            log_probs, found = linear_log_probs_and_entropy(*given)
            batch = _with_entropy(batch, self._whole_rows(found))
        else:
            log_probs = linear_log_probs(*given)
        log_probs = self._whole_rows(log_probs)
        report_by_dataset(log_probs, batch)
        result = loss(log_probs, batch)
        if weights is None:
            return result
        return result._replace(sum=-(log_probs * weights).sum())

    def matrix(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and the matrix that they are multiplied with; adapters lengthen both."""
        return hidden, local(self.weight)

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits before capping; generation replaces it (`titancli.models.blocks.onednn`)."""
        return linear(hidden, weight)

    def _logits(self, hidden: Tensor, weight: Tensor, cap: float | None) -> Tensor:
        logits = self.product(hidden, weight)
        if cap is not None:
            logits = capped(logits, cap)[0].to(logits.dtype)
        if self.tensor_group is not None:
            logits = gather_same(logits, logits.ndim - 1, self.tensor_group)
        return self._whole_rows(logits)

    def _my_part(self, x: Tensor) -> Tensor:
        return x if self.cut is None else self.cut.cut(x, 1)

    def _whole_rows(self, x: Tensor) -> Tensor:
        """Join the parts of [B, S, …], in document order."""
        return x if self.cut is None else self.cut.join(x, 1)


def report_by_dataset(log_probs: Tensor, batch: Batch) -> None:
    """Report the cross-entropy of each dataset of a mixture as `mix/NAME/loss`.

    Args:
        log_probs: [B, S] fp32, 0 where there is no target.
    """
    for key in batch:
        if key.startswith(MIX):
            own = batch[key]
            targets = ((batch["targets"] != IGNORE).sum(1) * own).sum()
            total = -(log_probs.detach().sum(1) * own).sum()
            report(f"{key}/loss", total, count=targets)


def _refuse_unweighted(loss: Any, batch: Any) -> None:
    if loss.output != "logprobs" or loss.entropy or loss.token_weights(batch) is None:
        raise TitanError(
            f"model.n_mtp_layers: the loss {type(loss).__name__} is not a weighted sum over tokens, and only "
            f"such losses can be trained on tokens further ahead",
            hint="set model.n_mtp_layers = 0, or use the loss cross_entropy or sft",
        )


def _with_entropy(batch: Batch, found: Tensor) -> Batch:
    return Batch({**batch, "entropy": found}, unit=batch.unit)
