"""Proximal policy optimization (PPO) with a critic. This file has the configs and imports no torch; the code
is in the files beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from titan_rl import Policy
from titancli import component, hookimpl
from titancli.registry.component import component_info

if TYPE_CHECKING:
    from titancli import Recipe


@component("loss", "ppo", target="titan_ppo.losses:Ppo")
class Ppo(Policy):
    """Clipped policy gradient and clipped value loss, averaged over tokens (PPO, arXiv 1707.06347).

    A linear layer on the model's last hidden states gives a value per token. It is trained with the model.
    """

    clip_low: Annotated[float, Ge(0)] = 0.2
    """Lower clipping bound: ratios are clipped at 1 - this."""
    clip_high: Annotated[float, Ge(0)] = 0.2
    """Upper clipping bound: ratios are clipped at 1 + this."""
    value_clip: Annotated[float, Gt(0)] = 0.2
    """Values count as no further than this from those before the updates, where that makes their error
    greater."""
    value_coef: Annotated[float, Ge(0)] = 0.1
    """Weight of the value loss."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        advantage = getattr(recipe.loop, "advantage", None)
        if advantage is not None and component_info(advantage).name != "gae":
            yield "", 'it learns values: set loop.advantage = "gae"'


@component("advantage", "gae", target="titan_ppo.advantages:Gae")
class Gae:
    """Generalized advantage estimation per token (GAE, arXiv 1506.02438), for the loss ppo.

    A completion's last token has its reward; with kl_coef each token has that of staying near the initial
    model.
    """

    gamma: Annotated[float, Ge(0), Le(1)] = 1.0
    """Discount of rewards per token."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """λ: 0 trusts the values alone, 1 the rewards alone."""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the penalty in each token's reward: log-probability minus that under the initial model, of
    which a copy is kept if this is above 0."""
    whiten: bool = True
    """Normalise the advantages of a sampling step to mean 0 and variance 1."""

    @property
    def needs_reference(self) -> bool:
        """Return whether a copy of the initial model is kept."""
        return self.kl_coef > 0

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if component_info(recipe.loss).name != "ppo":
            yield "", f'the loss {component_info(recipe.loss).name} has no values: set loss = "ppo"'


@hookimpl
def titan_components() -> list[type]:
    return [Ppo, Gae]
