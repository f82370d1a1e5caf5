"""Policy-gradient losses: sampled tokens become more or less probable, by their advantage.

They read from the batch: `targets`, the sampled tokens; `document_ids`, their samples (any integers, each
sample contiguous; if absent, a row is one sample); and as fp32 [B, S] `advantages`; `old_logprobs`,
log-probabilities under the weights that sampled; with `importance` `sampler_logprobs`, the sampler's own
log-probabilities under these weights; and with `kl_coef` `reference_logprobs`. Only entries at targets are
read. Targets are weighted by `weights` [B, S], if present.

Each loss is a sum over tokens, Σ c·(−w·objective + kl_coef·k3 − entropy_coef·H), where w is 1, or corrects
for the sampler (`importance`), H is the entropy, and c makes the sum an average over tokens, or over samples
of their averages. Metrics are averaged in the same way. k1 and k3 are the estimators of Schulman,
"Approximating KL divergence".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from titancli.protocols import LossDefaults
from titancli.protocols.batch import IGNORE
from titancli.protocols.result import LossResult

if TYPE_CHECKING:
    import titan_rl as rl
    from titancli.protocols.batch import Batch


class Samples:
    """The sampled tokens of a batch, and their grouping into completions."""

    def __init__(self, batch: Batch) -> None:
        targets = batch["targets"]
        rows, length = targets.shape
        self.drawn = targets != IGNORE
        """Mask of sampled tokens, [B, S] bool."""
        counts = self.drawn.float()
        self.weights = torch.where(self.drawn, batch["weights"], 0.0) if "weights" in batch else counts
        """The weight of each token, [B, S] fp32; 0 where nothing was sampled."""
        # Number the documents of a row in order, whatever their ids: each is contiguous.
        numbers = torch.arange(rows, device=targets.device)[:, None].expand(rows, length) * length
        if "document_ids" in batch:
            ids = batch["document_ids"]
            begins = functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
            numbers = numbers + begins.cumsum(1)
        self._numbers = numbers.flatten()
        self._lengths = self._sums(self.weights)
        lengths = self._lengths[self._numbers].view(rows, length)
        self.length = torch.where(lengths > 0, lengths, 1.0)
        """The length of each token's sample, in weighted tokens, [B, S] fp32."""
        self.count = (self._lengths > 0).sum().float()

    def total(self, x: Tensor) -> Tensor:
        """Return at each token its sample's sum of x, [B, S], which is 0 where nothing was sampled."""
        return self._sums(x)[self._numbers].view(x.shape)

    def mean(self, x: Tensor) -> Tensor:
        """Return at each token its sample's mean of x, [B, S], which is 0 where nothing was sampled."""
        return self.total(x * self.weights) / self.length

    def _sums(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.numel()).scatter_add(0, self._numbers, x.flatten())


class PolicyLoss(LossDefaults, ABC):
    """The common part of these losses; each defines its objective."""

    output = "logprobs"
    entropy = True
    """The engine adds `entropy` [B, S] to the batch: it is reported, and part of the loss with
    `entropy_coef`."""
    weighted = True
    steady = False
    """The value changes with every batch of samples, so a jump is not a spike."""
    needs: Mapping[str, Literal["B", "BS"]] = {"advantages": "BS", "old_logprobs": "BS"}
    """Required entries of the batch."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.temperature = 1.0 if config.temperature is None else config.temperature
        if config.kl_coef > 0:
            self.needs = {**self.needs, "reference_logprobs": "BS"}
        if config.importance != "none":
            self.needs = {**self.needs, "sampler_logprobs": "BS"}

    def sampled_at(self, temperature: float) -> None:
        """Divide logits by the sampling temperature, unless the config sets another."""
        if self.config.temperature is None:
            self.temperature = temperature

    @abstractmethod
    def objective(self, out: Tensor, log_ratio: Tensor, advantages: Tensor, samples: Samples) -> Any:
        """Return the value to maximise, the ratio of probabilities in it, and whether it is clipped: [B, S]
        each. All arguments are 0 where nothing was sampled."""

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S] fp32 log-probabilities, 0 where there is no target.
        """
        samples = Samples(batch)
        advantages, log_ratio = (
            torch.where(samples.drawn, x, 0.0) for x in (batch["advantages"], out - batch["old_logprobs"])
        )
        objective, ratio, clipped = self.objective(out, log_ratio, advantages, samples)
        share, divisor, weight = self._shares(samples)
        metrics = {"ratio": ratio, "clip_fraction": clipped.float()}
        to_sampler = log_ratio
        if self.config.importance != "none":
            to_sampler = torch.where(samples.drawn, out - batch["sampler_logprobs"], 0.0)
            factor, bounded = self._importance(to_sampler - log_ratio, samples)
            objective = factor * objective
            metrics |= {"importance": factor, "importance_bounded": bounded.float()}
        loss = -objective
        metrics |= {"sampler_k1": -to_sampler, "sampler_k3": k3(to_sampler)}
        if self.config.kl_coef > 0:
            reference = torch.where(samples.drawn, batch["reference_logprobs"] - out, 0.0)
            metrics["reference_kl"] = k3(reference)
            loss = loss + self.config.kl_coef * k3(reference)
        if "entropy" in batch:
            metrics["entropy"] = torch.where(samples.drawn, batch["entropy"], 0.0)
        if self.config.entropy_coef > 0:
            loss = loss - self.config.entropy_coef * metrics["entropy"]
        sums = {name: (value.detach() * share).sum() for name, value in metrics.items()}
        return LossResult(sum=(loss * divisor).sum(), weight=weight, metrics=sums)

    @torch.no_grad()
    def _importance(self, log_ratio: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Return the factor of each token's objective that corrects for a sampler that differs from the
        model, and where `importance_max` bounds it, [B, S] each.

        Args:
            log_ratio: [B, S] log p(old) − log p(sampler), 0 where nothing was sampled.
        """
        level, how = self.config.importance.split("_")
        ratio = (log_ratio if level == "token" else samples.total(log_ratio)).exp()
        bounded = samples.drawn & (ratio > self.config.importance_max)
        kept = ratio.clamp(max=self.config.importance_max)
        return kept if how == "truncate" else ratio.masked_fill(bounded, 0.0), bounded

    def _shares(self, samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's share in a metric, and in the loss, [B, S]; and the sum of the shares in a
        metric."""
        return samples.weights, samples.weights, samples.weights.sum()


def k3(log_ratio: Tensor) -> Tensor:
    """Return an estimate of KL(q ‖ p), for x drawn from q and log_ratio = log p(x) − log q(x): unbiased and
    never negative."""
    return torch.expm1(log_ratio) - log_ratio


def _clipped(ratio: Tensor, advantages: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Return PPO's lower bound (arXiv 1707.06347), and where it uses the clipped ratio. `delta` caps the
    ratio, which bounds the objective if the advantage is negative (arXiv 1912.09729)."""
    free = ratio if config.delta is None else ratio.clamp(max=config.delta)
    kept, bound = free * advantages, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return torch.minimum(kept, bound), (bound < kept) | (free < ratio)


class Grpo(PolicyLoss):
    """min(r·A, clip(r)·A), r the ratio of a token's probabilities."""

    def __init__(self, config: rl.Grpo) -> None:
        super().__init__(config)

    def objective(self, out: Tensor, log_ratio: Tensor, advantages: Tensor, samples: Samples) -> Any:
        ratio = log_ratio.exp()
        value, clipped = _clipped(ratio, advantages, self.config)
        return value, ratio, clipped

    def _shares(self, samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
        if self.config.length_norm == "token":
            return super()._shares(samples)
        share = samples.weights / samples.length
        by_sample = self.config.length_norm == "sample"
        return share, share if by_sample else samples.weights / self.config.constant, samples.count


class Gspo(PolicyLoss):
    """min(s·A, clip(s)·A), s the ratio of a whole sample's probabilities, `per_token` to the power of
    1 / length."""

    def __init__(self, config: rl.Gspo) -> None:
        super().__init__(config)

    def objective(self, out: Tensor, log_ratio: Tensor, advantages: Tensor, samples: Samples) -> Any:
        ratio = (samples.mean if self.config.per_token else samples.total)(log_ratio).exp()
        value, clipped = _clipped(ratio, advantages, self.config)
        return value, ratio, clipped

    def _shares(self, samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
        share = samples.weights / samples.length
        return share, share, samples.count


class Cispo(PolicyLoss):
    """clip(r)·A·log p, the clipped ratio without gradient: no token loses its gradient."""

    def __init__(self, config: rl.Cispo) -> None:
        super().__init__(config)

    def objective(self, out: Tensor, log_ratio: Tensor, advantages: Tensor, samples: Samples) -> Any:
        ratio = log_ratio.detach().exp()
        kept = ratio.clamp(max=1 + self.config.clip_high)
        return kept * advantages * out, ratio, ratio > kept


class ImportanceSampling(PolicyLoss):
    """r·A."""

    def __init__(self, config: rl.ImportanceSampling) -> None:
        super().__init__(config)

    def objective(self, out: Tensor, log_ratio: Tensor, advantages: Tensor, samples: Samples) -> Any:
        ratio = log_ratio.exp()
        return ratio * advantages, ratio, torch.zeros_like(samples.drawn)
