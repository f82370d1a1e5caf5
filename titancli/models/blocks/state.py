"""What of a model is saved, loaded and converted: its parameters, and state that moves without gradients."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and then the persistent buffers (a router's balancing bias, for one)."""
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
