"""The state of a model that is saved, loaded and converted: parameters, and buffers updated without
gradients."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, tied ones once, and then the persistent buffers (such as a router's balancing
    bias)."""
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
