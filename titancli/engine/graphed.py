"""Micro-batches replayed as CUDA graphs (`compile.cuda_graphs`, `titancli.parallel.graphs`).

The first passes compute as usual: they compile, and allocate what stays. Then forward and backward of the
recipe's loss are captured for micro-batches of that shape, one graph for the whole ("step") or two for each
block ("blocks"), once for a step without gradients and once for those that add to them. The optimizer, and
whatever hooks do between, stays outside and finds gradients where it always does.

What no graph fits is computed as usual, with the same numbers: another shape, another loss, a pass in which
hooks watch modules, gradients that some other pass has begun. If parameters move, or a module is set to
compute something else, all is captured anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titancli.engine.inputs import checked
from titancli.engine.runners import WholeModel
from titancli.errors import RecipeError
from titancli.models.blocks.moe import moe_layers
from titancli.observe.metrics import Reading, collector
from titancli.observe.pace import pace
from titancli.observe.phases import phase
from titancli.parallel.graphs import Blocks, Pool, Slots, Watch
from titancli.protocols.batch import Batch
from titancli.protocols.result import LossResult

if TYPE_CHECKING:
    from titancli.engine.experts import RouterLosses
    from titancli.recipe.schema import Recipe

logger = logging.getLogger(__name__)

Run = Callable[[Batch, Callable[[], LossResult], Callable[[], None]], LossResult]
"""Replays a micro-batch, given what computes it as usual, and what is called after its backward."""
WARM_UP = 2
"""Passes over micro-batches of a shape before it is captured."""


class GraphedModel(WholeModel):
    """The whole model on this rank, whose micro-batches are replayed."""

    def __init__(
        self, model: Any, router_losses: RouterLosses, *, recipe: Recipe, loss: Any, device: torch.device
    ) -> None:
        """
        Raises:
            RecipeError: something cannot be replayed.
        """
        super().__init__(model, router_losses, accumulate=recipe.training.accumulate)
        refuse(model, router_losses, device)
        self._loss, self._device = loss, device
        self._recomputes = recipe.activation_checkpoint.mode in ("full", "selective")
        self._blocks = Blocks(model.layers) if recipe.compile.cuda_graphs == "blocks" else None
        self._watch = Watch(model)
        self._told: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._passes: Counter[Any] = Counter()
        self._captured: tuple[Any, list[Any]] | None = None
        """The shape of the micro-batches that graphs are for, and the model's state at their capture."""
        self._graphs: dict[tuple[int, ...], _Captured] = {}
        """By what the slots hold before the pass."""
        vars(self).pop("_slots", None)
        vars(self).pop("_pool", None)

    @cached_property
    def _slots(self) -> Slots:
        return Slots(self._model if self._blocks is None else self._model.layers)

    @cached_property
    def _pool(self) -> Pool:
        return Pool()

    def _micro_batch(
        self, batch: Batch, loss: Any, counting: Any, add_gradients: Callable[[], None], *, first: bool
    ) -> LossResult:
        # Without what the host knows of documents: their kernel would be replayed with the sizes of one.
        batch = Batch({name: value.detach() for name, value in batch.items()}, unit=batch.unit)
        usual = partial(super()._micro_batch, batch, loss, counting, add_gradients, first=first)
        if self._captured is not None and self._captured[1] != self._watch.state():
            logger.info("parameters were moved or modules changed: CUDA graphs are captured anew")
            self._forget()
        shape = frozenset((name, value.shape, value.dtype) for name, value in batch.items())
        if why := self._unfit(shape, loss):
            if why not in self._told:
                logger.warning("%s, and computed without CUDA graphs", why)
            self._told.add(why)
            return usual()
        held = self._slots.held()
        if self._captured is None and (self._passes[shape] < WARM_UP or any(held)):
            self._passes[shape] += 1
            return self._warm_up(usual, is_last=self._passes[shape] == WARM_UP)
        if held not in self._graphs:
            if not self._slots.owns(held):
                return usual()
            self._graphs[held] = self._capture(batch)
            self._captured = shape, self._watch.state()
        left, reports, run = self._graphs[held]
        self._slots.fill(left)
        result = run(batch, usual, add_gradients)
        for name, reading in reports.items():
            collector.add(name, reading.value, reading.reduce, reading.count)
        return result

    def _unfit(self, shape: Any, loss: Any) -> str | None:
        """Return why a micro-batch cannot be replayed, as the beginning of a sentence."""
        if self._watch.is_observed():
            return "micro-batches are observed by hooks of modules"
        if self._blocks is None and loss is not self._loss:
            return "micro-batches have another loss than the recipe's"
        if self._captured is not None and shape != self._captured[0]:
            return "micro-batches have another shape than those before"
        return None

    def _warm_up(self, usual: Callable[[], LossResult], *, is_last: bool) -> LossResult:
        """Compute as usual.

        Raises:
            RecipeError: recomputed activations would draw other random numbers.
        """
        before = torch.cuda.get_rng_state(self._device)  # on the host
        with self._blocks.recording() if self._blocks is not None and is_last else nullcontext():
            result = usual()
        if self._recomputes and not torch.equal(before, torch.cuda.get_rng_state(self._device)):
            raise RecipeError(
                "compile.cuda_graphs: the model draws random numbers (dropout), and what is computed again "
                "in backward would draw others",
                hint='set compile.cuda_graphs = "none", or activation_checkpoint.mode = "none"',
            )
        return result

    def _capture(self, batch: Batch) -> _Captured:
        with collector.captured() as reports:
            run = self._capture_step(batch) if self._blocks is None else self._blocks.capture(self._pool)
        return _Captured(self._slots.left(), reports.drain(), run)

    def _capture_step(self, batch: Batch) -> Run:
        placed = Batch({name: value.clone() for name, value in batch.items()}, unit=batch.unit)

        def forward_backward() -> LossResult:
            result = checked(self.forward(placed, self._loss), self._loss)
            result.sum.backward()
            return result._replace(sum=result.sum.detach())

        replay, result = self._pool.capture(forward_backward)

        def run(batch: Batch, usual: Any, add_gradients: Callable[[], None]) -> LossResult:
            with phase("forward_backward"):
                for name, value in placed.items():
                    value.copy_(batch[name])
                replay()
                add_gradients()
            pace.mark(self._device)
            metrics = {name: value.clone() for name, value in result.metrics.items()}
            return LossResult(result.sum.clone(), result.weight.clone(), metrics)

        return run


class _Captured(NamedTuple):
    """The graphs of a pass."""

    left: list[Tensor | None]
    """What it leaves in the slots."""
    reports: dict[str, Reading]
    run: Run


def refuse(model: Any, router_losses: RouterLosses, device: torch.device) -> None:
    """Refuse models of which no graph can be made.

    Raises:
        RecipeError: says why.
    """
    own = model.token_counts().keys() - moe_layers(model).keys()
    if device.type != "cuda":
        why = f"they need a GPU, but this is a {device.type}"
    elif isinstance(model, FSDPModule):
        why = "FSDP2, which holds this model, gathers parameters to other addresses each time"
    elif router_losses:
        why = (
            f"model.moe.{router_losses.names[0]} needs the tokens per expert of all micro-batches beforehand"
        )
    elif own:
        why = f"{sorted(own)[0]} counts tokens per expert in a way of its own"
    else:
        return
    raise RecipeError(f"compile.cuda_graphs: {why}", hint='set compile.cuda_graphs = "none"')
