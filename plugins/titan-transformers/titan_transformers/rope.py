"""RoPE whose frequencies transformers chooses by the longest row in a batch, limited to lengths where all
rows agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from titancli.errors import TitanError


@dataclass(frozen=True)
class GrowingRope:
    """RoPE whose frequencies transformers chooses by the longest row in a batch."""

    kind: str
    """transformers' name: dynamic, or longrope."""
    length: int
    """Length up to which rows have the same frequencies, whatever else is in the batch."""

    def refuse(self, config: Any, tokens: int) -> None:
        """Check that rows of this length do not depend on the batch.

        Raises:
            TitanError: they would.
        """
        if tokens > self.length:
            raise TitanError(
                f"{config.model_type}: rows of {tokens} tokens; beyond {self.length}, RoPE of the type "
                f"{self.kind} depends on the longest row in a batch",
                hint=f"use rows of at most {self.length} tokens, or generate from one row at a time",
            )


def growing_rope(base: nn.Module) -> GrowingRope | None:
    """Return the RoPE with the smallest limit. `dynamic` is kept from growing: it would keep its grown
    frequencies for shorter rows, and it reads positions to the host in every forward."""
    found = []
    modules: Iterator[Any] = base.modules()
    for module in modules:
        types = getattr(module, "rope_type", None)
        by_layer = types if isinstance(types, dict) else {None: types or ""}
        for layer, kind in by_layer.items():
            if kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer is None else parameters[layer]
                found.append(GrowingRope(kind, int(parameters["original_max_position_embeddings"])))
            elif "dynamic" in kind:
                found.append(GrowingRope(kind, int(module.original_max_seq_len)))
        if any("dynamic" in kind for kind in by_layer.values()):
            still = {layer: "default" if "dynamic" in kind else kind for layer, kind in by_layer.items()}
            module.rope_type = still if isinstance(types, dict) else still[None]
    return min(found, key=lambda rope: rope.length, default=None)
