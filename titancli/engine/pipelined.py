"""Execution of batches by a model that is split into pipeline stages.

Training uses torch's schedules and stages, with shapes given in advance instead of exchanged. Without
gradients no schedule is needed: each micro-batch goes through the stages in order.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from titancli.distributed import process_group
from titancli.distributed.together import Ranks
from titancli.engine.inputs import checked
from titancli.engine.runners import Sums, add_up, inputs_of
from titancli.errors import TitanError
from titancli.layout.stages import StageError, check_microbatches
from titancli.observe.phases import phase
from titancli.parallel.unsharded import held, summed_over_ranks, whole_on_ranks
from titancli.protocols.batch import Batch
from titancli.protocols.result import LossResult

if TYPE_CHECKING:
    from titancli.distributed.local import RowCut
    from titancli.distributed.mesh import Mesh
    from titancli.engine.experts import RouterLosses
    from titancli.parallel.pipeline import Placement
    from titancli.recipe.schema import Pipeline

SHORT = {
    "1F1B": "GPipe",
    "Interleaved1F1B": "LoopedBFS",
    "InterleavedZeroBubble": "LoopedBFS",
    "DualPipeV": "ZBVZeroBubble",
}
"""The schedule for a step with too few micro-batches, such as the last one before the data ends: one with the
same placement that takes any number of them. Only the order of the work differs."""

KEPT_SCHEDULES = 2
"""Number of cached schedules, each with the buffers of its micro-batches: a full step and a short one."""


class Stage(PipelineStage):
    """torch's stage; it passes its micro-batch to the runner."""

    def __init__(self, runner: PipelinedModel, part: Any, index: int, hidden: torch.Size) -> None:
        self._runner = runner
        count = len(runner.placement)
        # requires_grad: received states need a gradient.
        states = torch.empty(hidden, dtype=runner.dtype, device="meta", requires_grad=True)
        total = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        super().__init__(
            part,
            index,
            count,
            runner.device,
            input_args=() if index == 0 else (states,),
            output_args=(total if index == count - 1 else states,),
            group=runner.group,
        )

    def forward_maybe_with_nosync(self, *received: Tensor, **tensors: Any) -> Tensor:
        return self._runner.forward_backward_part(self.submod, received, tensors["batch"])

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep gradients: torch clears them here when a schedule first runs, after trying out shapes. The
        shapes are given here, and the gradients are those of earlier calls."""


class PipelinedModel:
    """The stages of this rank: a Runner whose micro-batches are `pipeline.microbatch_size` rows.

    Results and sums of the last stage are broadcast to every rank of the pipeline.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        placement: Placement,
        section: Pipeline,
        mesh: Mesh,
        router_losses: RouterLosses,
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        row_cut: RowCut | None = None,
    ) -> None:
        """
        Args:
            parts: this rank's stages, in the order of `placement.mine`.
            width: the width of the hidden states.
            dtype: the dtype of the hidden states.
        """
        self.placement, self.device, self.dtype = placement, device, dtype
        self.group: Any = mesh.pp_group
        self._parts = dict(zip(placement.mine, parts, strict=True))
        self.router_losses, self._section, self._width = router_losses, section, width
        self.rows_multiple = section.microbatch_size
        self._row_cut = row_cut
        self._cut = mesh.degrees.cp * mesh.degrees.tp
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._loss: Any = None
        self._unit = 1
        self._sums: Sums = {}
        self.exchanging = False

    @property
    def _has_last(self) -> bool:
        return self.placement.rank == self.placement.last

    # ----------------------------------------------------------------------------------------- training

    def forward_backward(self, batches: Sequence[Batch], loss: Any) -> Sums:
        whole = self._prepared(_joined(batches))
        rows = self._section.microbatch_size
        if whole.rows % rows or rows % whole.unit:
            raise TitanError(
                f"{whole.rows} rows (units of {whole.unit}) cannot be split into micro-batches of {rows}",
                hint="change pipeline.microbatch_size",
            )
        schedule = self._schedule(whole.rows // rows, self._hidden(whole, rows))
        self._loss, self._unit, self._sums = loss, whole.unit, {}
        tensors = dict(whole)
        parts = self._parts.values()
        with ExitStack() as stack:
            stack.enter_context(self.router_losses.of_call())
            stack.enter_context(phase("forward_backward"))
            stack.enter_context(summed_over_ranks(whole_on_ranks(parts)))
            for part in parts:
                stack.enter_context(held(part))
            if self.router_losses:
                self.router_losses.count_beforehand(batches, loss, self.forward)
            self.exchanging = True  # and stays so if something raises
            try:
                # The target is ignored: the stage has computed the loss.
                schedule.step(batch=tensors, target=next(iter(tensors.values())), return_outputs=False)
            except RuntimeError as error:  # torch wraps the error of a stage
                if error.__cause__ is not None:
                    raise error.__cause__ from None
                raise
        sums, self._sums, self._loss = self._sums, {}, None
        found = self._everywhere(sums)
        self.exchanging = False
        return found

    def forward_backward_part(
        self, part: Any, received: tuple[Tensor, ...], tensors: dict[str, Tensor]
    ) -> Tensor:
        """Run a micro-batch through one stage of a schedule: return hidden states, or the sum of the loss."""
        made = self._run(part, Batch(tensors, unit=self._unit), self._loss, *received)
        if part.output is None:
            return made
        result = checked(made, self._loss)
        add_up(self._sums, result)
        return result.sum

    def _schedule(self, count: int, hidden: torch.Size) -> Any:
        """Return torch's schedule for `count` micro-batches of hidden states of one shape."""
        key = (count, hidden)
        if key not in self._schedules:
            while len(self._schedules) >= KEPT_SCHEDULES:
                self._schedules.popitem(last=False)
            stages = [Stage(self, part, index, hidden) for index, part in self._parts.items()]
            kind = get_schedule_class(self._schedule_name(count))
            several: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            self._schedules[key] = kind(several, count, loss_fn=_the_loss_itself, scale_grads=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _schedule_name(self, count: int) -> str:
        name = self._section.schedule
        try:
            check_microbatches(name, dist.get_world_size(self.group), len(self.placement), count)
        except StageError:
            return SHORT[name]
        return name

    def _everywhere(self, sums: Sums) -> Sums:
        """Return the last stage's sums on every rank of the pipeline."""
        names = self.tell(sorted(sums))
        values = torch.empty(len(names), dtype=torch.float32, device=self.device)
        if self._has_last:
            torch.stack([sums[name] for name in names], out=values)
        dist.broadcast(values, group=self.group, group_src=self.placement.last)
        return dict(zip(names, values.unbind(), strict=True))

    # ---------------------------------------------------------------------------------- without gradients

    def forward(self, batch: Batch, loss: Any) -> Any:
        batch = self._prepared(batch)
        rows = math.gcd(self._section.microbatch_size, batch.rows)
        if rows % batch.unit:
            rows = batch.unit
        sends: list[tuple[Any, Tensor]] = []
        self.exchanging = True
        results = [self._through(piece, loss, sends) for piece in batch.split(rows)]
        for work, _ in sends:
            process_group.wait(work)
        found = self._spread(results)
        self.exchanging = False
        return found

    def _through(self, batch: Batch, loss: Any, sends: list[tuple[Any, Tensor]]) -> Any:
        """Run a micro-batch through this rank's stages; return the result on the rank with the last stage.

        Ranks send and receive in the order of the stages, so there is no deadlock.
        """
        holders, me = self.placement.holders, self.placement.rank
        made: Any = None
        for stage, part in self._parts.items():
            received = () if stage == 0 else (made,)
            if stage > 0 and holders[stage - 1] != me:
                hidden = torch.empty(self._hidden(batch, batch.rows), dtype=self.dtype, device=self.device)
                process_group.wait(dist.irecv(hidden, group=self.group, group_src=holders[stage - 1]))
                received = (hidden,)
            made = self._run(part, batch, loss, *received)
            if stage + 1 < len(holders) and holders[stage + 1] != me:
                sends.append((dist.isend(made, group=self.group, group_dst=holders[stage + 1]), made))
        return checked(made, loss) if isinstance(made, LossResult) else made

    def _spread(self, results: list[Any]) -> Any:
        """Return the last stage's results of all micro-batches on every rank of the pipeline."""
        described, values = None, None
        if self._has_last:
            described, values = _described(results)
        names, shape, dtype = self.tell(described)
        if values is None:
            values = torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(values, group=self.group, group_src=self.placement.last)
        if names is None:
            return values
        total, weight, *others = values.unbind()
        return LossResult(total, weight, dict(zip(names[2:], others, strict=True)))

    # ------------------------------------------------------------------------------------------ helpers

    def _run(self, part: Any, batch: Batch, loss: Any, *received: Tensor) -> Any:
        inputs = inputs_of(part, batch, self._row_cut)
        if received:
            inputs[part.inputs[0]] = received[0]
        if part.output is not None:
            return part(**inputs, batch=batch, loss=loss)
        made: Tensor = part(**inputs).contiguous()
        if made.shape != self._hidden(batch, batch.rows) or made.dtype != self.dtype:
            raise TitanError(
                f"a stage of {type(part).__name__} returned hidden states {list(made.shape)} "
                f"{made.dtype}, but the next stage expects {list(self._hidden(batch, batch.rows))} "
                f"{self.dtype}",
                hint="their width must be the `dim` of the model's config",
            )
        return made

    def _prepared(self, batch: Batch) -> Batch:
        """Add positions, which later stages cannot count: they see no tokens, and perhaps a part of a row."""
        part = next(iter(self._parts.values()))
        if "positions" in batch or "positions" not in part.inputs:
            return batch
        counted = torch.arange(self._length(batch), device=self.device)
        return Batch({**batch, "positions": counted.expand(batch.rows, -1)}, unit=batch.unit)

    def _length(self, batch: Batch) -> int:
        part = next(iter(self._parts.values()))
        first = part.inputs[0]
        return batch[first].shape[part.sequence_dim[first]]

    def _hidden(self, batch: Batch, rows: int) -> torch.Size:
        """Return the shape of hidden states between stages."""
        return torch.Size((rows, self._length(batch) // self._cut, self._width))

    def tell(self, value: Any) -> Any:
        """Broadcast the last stage's picklable value to every rank of the pipeline, over gloo."""
        return Ranks(self.group).broadcast(value, self.placement.last)


def _joined(batches: Sequence[Batch]) -> Batch:
    """Return all rows of a call as one batch."""
    first = batches[0]
    if len(batches) == 1:
        return first
    shapes = {str({name: tuple(batch[name].shape[1:]) for name in sorted(batch)}) for batch in batches}
    if len(shapes) > 1:
        raise TitanError(
            f"with pipeline parallelism all batches of a call must have the same shape, "
            f"not {', '.join(shapes)}"
        )
    return Batch({name: torch.cat([b[name] for b in batches]) for name in first}, unit=first.unit)


def _described(results: list[Any]) -> tuple[tuple[list[str] | None, tuple[int, ...], torch.dtype], Tensor]:
    """Return the results of all micro-batches as one tensor, and the metadata that the other ranks need."""
    if all(isinstance(result, LossResult) for result in results):
        sums: Sums = {}
        for result in results:
            add_up(sums, result)
        values = torch.stack(list(sums.values()))
        return (list(sums), tuple(values.shape), values.dtype), values
    if all(isinstance(result, Tensor) for result in results):
        values = torch.cat(results).contiguous()
        return (None, tuple(values.shape), values.dtype), values
    raise TitanError(
        f"with pipeline parallelism a loss must return a LossResult or a tensor, not "
        f"{type(results[0]).__name__}"
    )


def _the_loss_itself(output: Tensor, target: Any) -> Tensor:
    return output
