"""The loss: the clipped policy gradient of titan's `grpo`, and the clipped error of a value per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from titan_rl import Grpo
from titan_rl.losses import Grpo as Objective
from titan_rl.losses import Samples
from titancli import Batch, LossResult
from titancli.errors import RecipeError
from titancli.models.blocks.init import zeros_

if TYPE_CHECKING:
    from titan_ppo import Ppo as Config


class Ppo(nn.Module):
    """Reads from the batch, beside what `grpo` does: `old_values`, the values under the weights that sampled,
    and `returns`, what they should have been; [B, S] each. A value is that of what precedes the target."""

    output = "logprobs"
    outputs = ("hidden:-1",)
    entropy = True
    weighted = True
    steady = False

    def __init__(self, config: Config, *, model: Any) -> None:
        """
        Raises:
            RecipeError: the model's config does not say how wide hidden states are.
        """
        super().__init__()
        if model.dim is None:
            raise RecipeError("loss: the model's config has no `dim`, the width of its hidden states")
        self.config = config
        shared = {one.name: getattr(config, one.name) for one in fields(Grpo) if hasattr(config, one.name)}
        self._policy = Objective(Grpo(**shared, length_norm="token"))
        self.needs: Mapping[str, Literal["B", "BS"]] = {
            **self._policy.needs,
            "old_values": "BS",
            "returns": "BS",
        }
        self.value = nn.Linear(model.dim, 1)

    @property
    def temperature(self) -> float:
        """The divisor of the logits."""
        return self._policy.temperature

    def sampled_at(self, temperature: float) -> None:
        """Divide logits by the sampling temperature, unless the config sets another."""
        self._policy.sampled_at(temperature)

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Begin with values of 0."""
        zeros_(self.value.weight)
        zeros_(self.value.bias)

    def values(self, out: Tensor, batch: Batch) -> Tensor:
        """Return the values, [B, S], in the dtype of the log-probabilities."""
        return self.value(batch["hidden"])[..., 0].to(out.dtype)

    def forward(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S] log-probabilities, 0 where there is no target.
        """
        policy, samples = self._policy(out, batch), Samples(batch)
        values, old, returns = (
            torch.where(samples.drawn, x, 0.0)
            for x in (self.values(out, batch), batch["old_values"], batch["returns"])
        )
        clip = self.config.value_clip
        error = (values - returns).square()
        bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
        loss = 0.5 * (torch.maximum(error, bounded) * samples.weights).sum()
        metrics = {"value": values, "return": returns, "value_clip_fraction": (bounded > error).float()}
        sums = {name: (x.detach() * samples.weights).sum() for name, x in metrics.items()}
        return LossResult(
            policy.sum + self.config.value_coef * loss,
            policy.weight,
            {**policy.metrics, **sums, "value_loss": loss.detach()},
        )
