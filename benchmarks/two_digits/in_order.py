"""A reward as a plugin of one file: `titan train ./grpo.toml -p ./in_order.py`."""

from __future__ import annotations

from collections.abc import Callable

from titancli import component, hookimpl
from titancli.protocols.samples import Completion, Prompt


@component("reward", "in_order", target="in_order:build")
class InOrder:
    """1 if the completion is the two digits of the prompt in order, else 0."""

    weight: float = 1.0
    """Factor in the sum of the rewards."""


def build(config: InOrder) -> Callable[[Prompt, Completion], float]:
    """Return the reward of a completion."""

    def reward(prompt: Prompt, completion: Completion) -> float:
        return float(completion.text == "".join(sorted(prompt.text[:2])))

    return reward


@hookimpl
def titan_components() -> list[type]:
    return [InOrder]
