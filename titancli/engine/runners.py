"""Execution of batches by a model: whole on this rank, or in stages (`titancli.engine.pipelined`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from titancli.engine.inputs import checked
from titancli.observe.pace import pace
from titancli.observe.phases import phase
from titancli.parallel.fsdp import reduce_after
from titancli.parallel.unsharded import summed_in_float32, summed_over_ranks, whole_on_ranks

if TYPE_CHECKING:
    from titancli.distributed.local import RowCut
    from titancli.engine.experts import RouterLosses
    from titancli.protocols.batch import Batch
    from titancli.protocols.result import LossResult

Sums = dict[str, Tensor]
"""`loss`, `weight` and metrics of a loss: fp32 scalars, summed over this rank's micro-batches."""


class Runner(Protocol):
    """Runs batches through the model. Collective: every rank passes equally many batches of the same
    shapes."""

    exchanging: bool
    """Whether messages to other ranks may be in flight; never between calls."""
    router_losses: RouterLosses
    rows_multiple: int
    """The number of rows of a batch must be a multiple of this."""

    def forward(self, batch: Batch, loss: Any) -> Any:
        """Return the loss of the batch, on every rank with a part of it; the caller has disabled
        gradients."""

    def forward_backward(self, batches: Sequence[Batch], loss: Any) -> Sums:
        """Add the gradients of the loss's sum over all batches, reduced at the end of the call."""
        ...


class WholeModel:
    """The whole model on this rank, run on one micro-batch after the other."""

    exchanging = False
    rows_multiple = 1

    def __init__(
        self, model: Any, router_losses: RouterLosses, *, accumulate: str, row_cut: RowCut | None = None
    ) -> None:
        self.router_losses = router_losses
        self._model, self._accumulate, self._row_cut = model, accumulate, row_cut

    @cached_property
    def _whole(self) -> list[Any]:
        # At the first step: parameters are allocated after this object is built, and then stay.
        return whole_on_ranks([self._model])

    def forward(self, batch: Batch, loss: Any) -> Any:
        return self._model(**inputs_of(self._model, batch, self._row_cut), batch=batch, loss=loss)

    def forward_backward(self, batches: Sequence[Batch], loss: Any) -> Sums:
        sums: Sums = {}
        own, alone = self.router_losses, len(batches) == 1
        device = next(iter(batches[0].values())).device
        pace.begin(device)
        unsharded = self._accumulate == "unsharded" and not alone
        with (
            own.of_call(),
            summed_over_ranks(self._whole),
            summed_in_float32(self._model) if unsharded else nullcontext(lambda: None) as add_gradients,
        ):
            if own and not alone:
                own.count_beforehand(batches, loss, self.forward)
            for number, batch in enumerate(batches, start=1):
                last = number == len(batches)
                reduce_after(self._model, last=last, each=self._accumulate == "sharded")
                counting: AbstractContextManager[list[Tensor]] = own.counted() if alone else nullcontext([])
                add_up(sums, self._micro_batch(batch, loss, counting, add_gradients, first=number == 1))
        return sums

    def _micro_batch(
        self,
        batch: Batch,
        loss: Any,
        counting: AbstractContextManager[list[Tensor]],
        add_gradients: Callable[[], None],
        *,
        first: bool,
    ) -> LossResult:
        """Add the gradients of a micro-batch, and return its loss."""
        with phase("forward"), counting as weights:
            result = checked(self.forward(batch, loss), loss)
            weights.append(result.weight)
        if first:
            pace.mark(result.sum.device)
        with phase("backward"):
            result.sum.backward()
            add_gradients()
        return result


def inputs_of(model: Any, batch: Batch, row_cut: RowCut | None) -> dict[str, Tensor]:
    """Return the inputs of the model in a batch; under context parallel this rank's part of the rows."""
    inputs = {name: batch[name] for name in model.inputs if name in batch}
    return inputs if row_cut is None else row_cut.inputs(inputs, model.sequence_dim)


def add_up(sums: Sums, result: LossResult) -> None:
    """Add a micro-batch's numbers to the sums."""
    for name, value in {"loss": result.sum, "weight": result.weight, **result.metrics}.items():
        value = value.detach().float()
        sums[name] = sums[name] + value if name in sums else value
