"""NEFTune: noise on embeddings in training."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titan_optimizers import Neftune
from titancli import TitanError
from titancli.layout.degrees import Degrees
from titancli.protocols import ConverterDefaults


class NoisyEmbeddings(ConverterDefaults):
    """The converter: embeddings of tokens get a class that adds noise."""

    def __init__(self, config: Neftune, *, mesh: Degrees, compile: bool) -> None:
        self.config, self._row_parts = config, mesh.cp

    def convert(self, model: nn.Module) -> None:
        """Change the embedding of tokens in place.

        Raises:
            TitanError: the model has no embedding of tokens.
        """
        embedding: Any = next((one for one in model.modules() if isinstance(one, nn.Embedding)), None)
        if embedding is None:
            raise TitanError("neftune: the model has no nn.Embedding", hint="remove the converter")
        kind: Any = type(embedding)
        embedding.__class__ = _noisy(kind)
        embedding.noise_alpha, embedding.row_parts = self.config.alpha, self._row_parts

    def after_step(self, model: nn.Module) -> None:
        """Do nothing: no value is derived from the weights."""

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return the parameter, which has no class of its own."""
        return tensor


@cache
def _noisy(kind: Any) -> Any:
    class Noisy(kind):
        """An embedding with noise; `super` is that of tensor parallelism, where there is one."""

        noise_alpha: float
        row_parts: int
        """The number of ranks that share a row's tokens."""

        def forward(self, tokens: Tensor) -> Tensor:
            found: Tensor = super().forward(tokens)
            if not (self.training and torch.is_grad_enabled()):
                return found
            size = self.noise_alpha / math.sqrt(tokens.shape[-1] * self.row_parts * found.shape[-1])
            return found + torch.empty_like(found).uniform_(-size, size)

    return Noisy
