"""How the tokens of a whole call fall to the experts, which the load-balancing loss is made of.

Its gradient weighs each expert by its share of *all* tokens (Qiu et al., arXiv 2501.11873: balance over the
global batch, not within each micro-batch), so that no layout, and no number of micro-batches, changes it. The
shares must be known before the first backward: they are counted in the forward where a call is one
micro-batch, and else in a forward of all of them beforehand, which costs about a third of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titancli.engine.given import Logits, LogProbs
from titancli.models.blocks.moe import moe_layers
from titancli.parallel.fsdp import reshard

if TYPE_CHECKING:
    from titancli.data.batch import Batch


class ExpertLoad:
    """The layers of this rank that have the loss; falsy where none has."""

    def __init__(self, parts: Sequence[Any], groups: Sequence[dist.ProcessGroup | None]) -> None:
        """
        Args:
            groups: over all of which together every token is counted once.
        """
        self._parts, self._groups = parts, groups
        layers = (layer for part in parts for layer in moe_layers(part).values())
        self._layers = [layer for layer in layers if layer.config.aux_loss_coeff]

    def __bool__(self) -> bool:
        return bool(self._layers)

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Forget the shares at the end, so that no other call takes them for its own."""
        try:
            yield
        finally:
            for layer in self._layers:
                layer.load = None

    def count_beforehand(
        self, batches: Sequence[Batch], loss: Any, forward: Callable[[Batch, Any], Any]
    ) -> None:
        """Count the tokens of all batches in a forward of their own. Collective."""
        unscored = Logits() if loss.output == "model" else LogProbs()
        with torch.no_grad(), self.counted():
            for batch in batches:
                forward(batch, unscored)
        for part in self._parts:
            reshard(part)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the tokens of the forwards inside, and have the layers know their shares. Collective."""
        for layer in self._layers:
            layer.counting = torch.zeros(layer.config.num_experts, dtype=torch.int64, device=layer.device)
        try:
            yield
            self._share([layer.counting for layer in self._layers])
        finally:
            for layer in self._layers:
                layer.counting = None

    def _share(self, counts: list[Any]) -> None:
        if not counts:
            return
        total = torch.cat(counts)
        for group in self._groups:
            dist.all_reduce(total, group=group)
        for layer, count in zip(self._layers, total.split([len(count) for count in counts]), strict=True):
            layer.load = layer.share_of(count)
