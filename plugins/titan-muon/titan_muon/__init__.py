"""Muon. This file has the config and imports no torch; `optimizer.py` has the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from titancli import Component, Slot, component, hookimpl

if TYPE_CHECKING:
    from titancli import Recipe

EXCLUDED = ("tok_embeddings.weight", "output.weight", "*bias")


@component("optimizer", "muon", target="titan_muon.optimizer:build")
class Muon:
    """Muon: momentum made orthogonal, for matrices; another optimizer for all else.

    Keller Jordan, https://kellerjordan.github.io/posts/muon; for large models arXiv 2502.16982.
    """

    lr: Annotated[float, Ge(0)] = 0.02
    """Peak learning rate of the matrices; about the one of AdamW with adjust_lr = "match_rms_adamw"."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """How much of the mean of gradients is kept."""
    nesterov: bool = True
    """Look one step ahead."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled: times the learning rate."""
    ns_steps: Annotated[int, Gt(0), Lt(100)] = 5
    """Newton-Schulz iterations."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """Times the root of max(1, rows / columns), or to the size of AdamW's updates."""
    exclude: list[str] = field(default_factory=lambda: list(EXCLUDED))
    """Patterns of names of matrices that the other optimizer gets; their rows are no directions."""
    fallback: Annotated[Component, Slot("optimizer")] | None = None
    """The other optimizer, for vectors and for what is excluded; None: adamw as it is by default."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if isinstance(self.fallback, Muon):
            yield "fallback", "the fallback gets what is no matrix, and must be another optimizer than muon"


@hookimpl
def titan_components() -> list[type]:
    return [Muon]
