"""The dense feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

if TYPE_CHECKING:
    from titancli.protocols.shape import FeedForward as Spec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


class FeedForward(nn.Module):
    """A dense feed-forward layer, see `titancli.protocols.shape.FeedForward`."""

    styles: ClassVar = {"w1": "column", "w2": "row", "w3": "column"}

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.w1 = nn.Linear(spec.dim, spec.hidden, bias=spec.bias)
        self.w2 = nn.Linear(spec.hidden, spec.dim, bias=spec.bias)
        self.w3 = nn.Linear(spec.dim, spec.hidden, bias=spec.bias) if spec.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, dim] to [B, S, dim]."""
        hidden = ACTIVATIONS[self.activation](self.w1(x))
        return self.w2(hidden if self.w3 is None else hidden * self.w3(x))
