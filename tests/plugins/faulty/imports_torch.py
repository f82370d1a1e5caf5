"""Works, and makes every command wait for torch."""

import torch

from titancli import component, hookimpl


@component("loss", "slow", target="imports_torch:build")
class Slow:
    """Slow to list."""


@hookimpl
def titan_components():
    return [Slow]


def build(config):
    return torch.zeros(())
