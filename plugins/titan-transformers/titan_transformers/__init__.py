"""Causal language models of transformers, by their config.json. This file imports no torch."""

from __future__ import annotations

from pathlib import Path

from titancli import hookimpl


@hookimpl
def titan_components() -> list[type]:
    from titan_transformers.config import HFCausalLM

    return [HFCausalLM]


@hookimpl
def titan_recipes() -> Path:
    return Path(__file__).parent / "recipes"
