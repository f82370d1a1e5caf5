"""A model with a fault that shows only when a step is done."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titancli.models.blocks.decoder import Decoder


def build(config: Any, *, seq_len: int) -> Decoder:
    return FaultyModel(config)


class FaultyModel(Decoder):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.fault == "style":
            self.tensor_plan = {k: v for k, v in self.tensor_plan.items() if "_norm" not in k}

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        fault = self.config.fault
        if fault == "shape":
            torch.mm(self.tok_embeddings.weight, self.tok_embeddings.weight)
        elif fault == "outside":  # of the module whose weight FSDP2 has gathered
            torch.mm(torch.ones(3, self.config.vocab_size), self.tok_embeddings.weight)
        elif fault == "code":
            1 / len(tokens[:0])
        elif fault == "values":
            tokens.nonzero()
        result = super().forward(tokens, *args, **kwargs)
        return result._replace(sum=_Backward.apply(result.sum)) if fault == "backward" else result


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return {}["backward"]
