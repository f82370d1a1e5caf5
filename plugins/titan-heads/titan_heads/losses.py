"""The losses. Each is a sum over pairs, documents or anchors, and its weight is their number.

Rows without a target are padding and do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from titan_heads.pooling import fine, pooled
from titancli import IGNORE, Batch, LossResult
from titancli.errors import RecipeError, TitanError
from titancli.models.blocks.init import normal_

if TYPE_CHECKING:
    from torch import Tensor

    from titan_heads import Classification as ClassificationConfig
    from titan_heads import Embedding as EmbeddingConfig
    from titan_heads import Reward as RewardConfig


class Scores(nn.Module):
    """A linear function of hidden states, without a bias: `score` of transformers' sequence classifiers."""

    output = "hidden"
    kept: list[Tensor] | None = None
    """What is said of the document of each row, [B, count] fp32 for each call; None: it is not kept."""

    def __init__(self, model: Any, count: int) -> None:
        """
        Args:
            model: the model's config.

        Raises:
            RecipeError: it does not say how wide hidden states are.
        """
        super().__init__()
        if model.dim is None:
            raise RecipeError("loss: the model's config has no `dim`, the width of its hidden states")
        self.score = nn.Linear(model.dim, count, bias=False)

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Initialise as transformers does."""
        normal_(self.score.weight, 0.02, generator_for("score.weight"))

    def scores(self, hidden: Tensor) -> Tensor:
        """Return scores [..., count] of hidden states [..., D]."""
        return functional.linear(hidden, fine(self.score.weight))

    def blank(self, tensors: dict[str, Tensor]) -> Batch:
        """Return a batch of documents that are not learned from."""
        return Batch(tensors)

    def keep(self, out: Tensor, batch: Batch) -> None:
        """Keep what is said of the document of each row, if that is wanted."""
        if self.kept is not None:
            self.kept.append(self.scores(pooled(out, batch)[0]).detach())


class Reward(Scores):
    """−log σ(chosen − rejected − margin) + center · (chosen + rejected)²."""

    def __init__(self, config: RewardConfig, *, model: Any) -> None:
        super().__init__(model, 1)
        self.config = config

    def check_batch(self, batch: Batch) -> None:
        """
        Raises:
            TitanError: rows are no pairs, or there is not one margin for each row.
        """
        if batch.rows % 2:
            raise TitanError(
                f"the loss reward needs pairs of rows, but got {batch.rows}",
                hint="rows 2i and 2i + 1 form a pair, with the chosen answer first",
            )
        if "margin" in batch and batch["margin"].shape != (batch.rows,):
            raise TitanError(
                f"the batch's margin is {list(batch['margin'].shape)}, not [{batch.rows}]",
                hint="pass one number for each row; that of the chosen answer counts",
            )

    def forward(self, out: Tensor, batch: Batch) -> LossResult:
        self.keep(out, batch)
        hidden, there = pooled(out, batch)
        pairs = there.view(-1, 2).all(1)
        scores = self.scores(hidden)[:, 0]
        chosen, rejected = scores[0::2], scores[1::2]
        gap = chosen - rejected
        beyond = torch.where(pairs, batch["margin"][0::2].to(gap.dtype), 0.0) if "margin" in batch else 0.0
        each = -functional.logsigmoid(gap - beyond)
        if self.config.center:
            each = each + self.config.center * (chosen + rejected).square()
        values = {
            "reward_accuracy": (gap > 0).to(gap.dtype),
            "reward_margin": gap,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }
        metrics = {name: torch.where(pairs, value.detach(), 0.0).sum() for name, value in values.items()}
        return LossResult(torch.where(pairs, each, 0.0).sum(), pairs.sum().float(), metrics)


class Classification(Scores):
    """Cross-entropy of a class, binary cross-entropy of each class, or squared error of a number."""

    def __init__(self, config: ClassificationConfig, *, model: Any) -> None:
        super().__init__(model, config.outputs)
        self.config = config

    def blank(self, tensors: dict[str, Tensor]) -> Batch:
        several = self.config.problem_type == "multi_label_classification"
        shape = (*tensors["targets"].shape, *([self.config.outputs] if several else []))
        return Batch({**tensors, "labels": torch.zeros(shape)})

    def check_batch(self, batch: Batch) -> None:
        """
        Raises:
            TitanError: there is not one label for each token, or one where there is a target is no class.
        """
        shape = [*batch["targets"].shape]
        if self.config.problem_type == "multi_label_classification":
            shape.append(self.config.outputs)
        if "labels" not in batch or [*batch["labels"].shape] != shape:
            found = list(batch["labels"].shape) if "labels" in batch else "missing"
            raise TitanError(
                f"the loss classification takes labels {shape}, which are {found}",
                hint="pass a label for each token; those at targets, which are last tokens of documents, "
                "count",
            )
        labels = batch["labels"]
        if self.config.problem_type != "single_label_classification" or labels.device.type != "cpu":
            return
        wrong = (batch["targets"] != IGNORE) & ~((labels >= 0) & (labels < self.config.outputs))
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise TitanError(
                f"row {row}, token {place}: the label is {labels[row, place].item():g}, but there are "
                f"{self.config.outputs} classes",
                hint=f"labels are 0 to {self.config.outputs - 1}",
            )

    def forward(self, out: Tensor, batch: Batch) -> LossResult:
        self.keep(out, batch)
        # Scores of all tokens: choosing some would wait for the device.
        scores = self.scores(fine(out))
        there = batch["targets"] != IGNORE
        labels, metrics = batch["labels"], {}
        if self.config.problem_type == "single_label_classification":
            labels = torch.where(there, labels, 0).long().clamp(0, self.config.outputs - 1)
            each = functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
            metrics["accuracy"] = (scores.argmax(-1) == labels).float()
        elif self.config.problem_type == "multi_label_classification":
            labels = torch.where(there[..., None], labels, 0.0).to(scores.dtype)
            each = functional.binary_cross_entropy_with_logits(scores, labels, reduction="none").mean(-1)
            metrics["accuracy"] = ((scores > 0) == (labels > 0.5)).float().mean(-1)
        else:
            labels = torch.where(there, labels, 0.0).to(scores.dtype)
            each = (scores[..., 0] - labels).square()
        total = torch.where(there, each, 0.0).sum()
        counted = {name: torch.where(there, value, 0.0).sum() for name, value in metrics.items()}
        return LossResult(total, there.sum().float(), counted)


class Embedding:
    """−log of the softmax of cosine similarities / temperature, at each anchor's positive."""

    output = "hidden"
    kept: list[Tensor] | None = None
    """The embedding of each row, [B, dim] fp32 for each call; None: it is not kept."""

    def __init__(self, config: EmbeddingConfig) -> None:
        self.config = config

    def blank(self, tensors: dict[str, Tensor]) -> Batch:
        """Return a batch of documents that are not learned from."""
        return Batch(tensors, unit=2)

    def check_batch(self, batch: Batch) -> None:
        """
        Raises:
            TitanError: rows do not belong together.
        """
        if batch.unit not in (2, 3):
            raise TitanError(
                f"the loss embedding needs units of an anchor, its positive and perhaps a negative, but the "
                f"batch has units of {batch.unit}",
                hint="pass Batch(..., unit=2), or 3 with hard negatives",
            )

    def forward(self, out: Tensor, batch: Batch) -> LossResult:
        hidden, there = pooled(out, batch, self.config.pool)
        vectors = functional.normalize(hidden, dim=-1)
        if self.kept is not None:
            self.kept.append(vectors.detach())
        anchors, keys = (
            vectors[0 :: batch.unit],
            torch.cat([vectors[number :: batch.unit] for number in range(1, batch.unit)]),
        )
        counted = there.view(-1, batch.unit).all(1)
        known = counted.repeat(batch.unit - 1)
        similar = (anchors @ keys.t() / self.config.temperature).masked_fill(~known, -torch.inf)
        # A row of nothing but -inf would have no gradient that is a number.
        similar = torch.where(counted[:, None], similar, 0.0)
        own = torch.arange(len(anchors), device=hidden.device)
        each = functional.cross_entropy(similar, own, reduction="none")
        right = (similar.argmax(1) == own).float()
        metrics = {"accuracy": torch.where(counted, right, 0.0).sum()}
        return LossResult(torch.where(counted, each, 0.0).sum(), counted.sum().float(), metrics)

    __call__ = forward
