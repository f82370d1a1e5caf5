"""Muon. This file has the config and imports no torch; `optimizer.py` has the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from titancli import Component, Slot, component, hookimpl

if TYPE_CHECKING:
    from titancli import Recipe


@component("optimizer", "muon", target="titan_muon.optimizer:build")
class Muon:
    """Muon: orthogonalized momentum for matrices, and another optimizer for all other parameters.

    Keller Jordan, https://kellerjordan.github.io/posts/muon; for large models arXiv 2502.16982.
    """

    lr: Annotated[float, Ge(0)] = 0.02
    """Peak learning rate of the matrices; about that of AdamW with adjust_lr = "match_rms_adamw"."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    ns_steps: Annotated[int, Gt(0), Lt(100)] = 5
    """Number of Newton-Schulz iterations."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """Scale updates by the square root of max(1, rows / columns), or to the size of AdamW's updates."""
    roles: list[Literal["matrix", "embedding", "output", "router", "modulation", "other"]] = field(
        default_factory=lambda: ["matrix"]
    )
    """Roles of the matrices that Muon updates, as declared by the model; the fallback updates all others,
    by default including the routers of experts. (A softmax ignores one direction of a router's rows: the
    gradient there is rounding error, which orthogonalization would amplify to the size of the rest.)"""
    exclude: list[str] = field(default_factory=list)
    """Name patterns of further matrices that the fallback updates."""
    fallback: Annotated[Component, Slot("optimizer")] | None = None
    """The optimizer for all other parameters; None: adamw with its defaults."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if isinstance(self.fallback, Muon):
            yield "fallback", "the fallback is for parameters that are not matrices and cannot be muon itself"


@hookimpl
def titan_components() -> list[type]:
    return [Muon]
