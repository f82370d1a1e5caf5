"""Losses of preference pairs. This file has the configs and imports no torch; `losses.py` has the code."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from titancli import component, hookimpl


@component("loss", "ipo", target="titan_preference.losses:Ipo")
class Ipo:
    """Identity preference optimization (IPO, arXiv 2310.12036): a margin of 1 / (2 beta), and no more.

    Log-ratios are means over an answer's tokens, so that long and short answers have the same margin.
    """

    learns_from_pairs: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    beta: Annotated[float, Gt(0)] = 0.1
    """Strength of the pull towards the reference model, τ in the paper."""


@component("loss", "simpo", target="titan_preference.losses:Simpo")
class Simpo:
    """Simple preference optimization (SimPO, arXiv 2405.14734): without a reference model."""

    learns_from_pairs: ClassVar[bool] = True

    beta: Annotated[float, Gt(0)] = 2.0
    """Factor of the mean log-probability of an answer's tokens."""
    gamma: Annotated[float, Ge(0)] = 1.0
    """Margin by which the chosen answer is to win."""


@component("loss", "orpo", target="titan_preference.losses:Orpo")
class Orpo:
    """Odds ratio preference optimization (ORPO, arXiv 2403.07691): fine-tuning and preference in one loss.

    It needs no reference model, and starts from a base model.
    """

    learns_from_pairs: ClassVar[bool] = True

    beta: Annotated[float, Gt(0)] = 0.1
    """Weight of the odds ratio, λ in the paper."""


@hookimpl
def titan_components() -> list[type]:
    return [Ipo, Simpo, Orpo]
