"""NEFTune: noise on embeddings in training."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from torch import Tensor, nn

from titan_optimizers import Neftune
from titancli import TitanError
from titancli.distributed.local import RowCut
from titancli.layout.degrees import Degrees
from titancli.protocols import ConverterDefaults


class NoisyEmbeddings(ConverterDefaults):
    """The converter: embeddings of tokens get a class that adds noise."""

    def __init__(self, config: Neftune, *, mesh: Degrees, compile: bool) -> None:
        self.config = config

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
        embedding.noise_alpha = self.config.alpha / getattr(embedding, "later_factor", 1.0)

    def after_step(self, model: nn.Module) -> None:
        """Do nothing: no value is derived from the weights."""

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return the parameter, which has no class of its own."""
        return tensor


@cache
def _noisy(kind: Any) -> Any:
    class Noisy(kind):
        """An embedding with noise; `super` is that of tensor parallelism, where there is one.

        Each rank draws the noise of whole rows and keeps its part: the noise of a row does not depend on how
        it is split.
        """

        noise_alpha: float
        row_cut: RowCut | None = None
        """How context parallelism splits rows; `tokens` are this rank's part."""
        token_cut: RowCut | None = None
        """How tensor parallelism splits that part; what is returned is this rank's part of it."""

        def forward(self, tokens: Tensor) -> Tensor:
            found: Tensor = super().forward(tokens)
            if not self.training:
                return found
            cuts = [cut for cut in (self.row_cut, self.token_cut) if cut is not None]
            rows, part, width = found.shape
            length = part * math.prod(cut.group.size for cut in cuts)
            size = self.noise_alpha / math.sqrt(length * width)
            noise = found.new_empty(rows, length, width)
            for row in noise:  # so that rows have the same noise however a pipeline batches them
                row.uniform_(-size, size)
            for cut in cuts:
                noise = cut.cut(noise, 1)
            return found + noise

    return Noisy
