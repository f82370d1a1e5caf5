"""The memory of one rank through a step: the constant part, and what forward, loss, backward and optimizer
add.

Memory of blocks is measured (`titancli.planning.measure`). The order of events around the blocks is FSDP2's
(`torch.distributed.fsdp`): a group's parameters are gathered before it runs (into one flat buffer, then
copied out; the flat buffer is freed when the next group's arrives) and gathered again in backward while the
group above still works; its gradients are copied into a buffer of the reduce dtype, and the previous group's
buffer is freed just before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from titancli.planning.blueprint import Parameter
from titancli.planning.measure import BACK, FRONT, Piece
from titancli.planning.pipeline import in_flight
from titancli.planning.workload import Group, Stage, Workload, groups, moved_blocks, reshards, stages

CLASSES = ("parameters", "gradients", "optimizer", "activations", "loss", "communication", "frozen")
"""Uses of memory."""
FORWARD_FIRST = ("GPipe", "LoopedBFS")
"""Schedules in which all micro-batches finish forward before the first goes backward."""


@dataclass
class Tally:
    """Current memory by class, and the highest total so far."""

    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    peak: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    moment: str = ""

    def add(self, kind: str, size: float) -> None:
        self.now[kind] += size

    def look(self, moment: str, **more: float) -> None:
        """Compare the current memory, plus `more` that is taken only at this moment, with the peak."""
        if sum(self.now.values()) + sum(more.values()) > sum(self.peak.values()):
            self.peak = {kind: size + more.get(kind, 0.0) for kind, size in self.now.items()}
            self.moment = moment


@dataclass(frozen=True)
class RankMemory:
    """The peak memory of one rank."""

    pp_rank: int
    parameters: float
    """Elements of its parameter shards."""
    classes: dict[str, float]
    """Bytes by class."""
    moment: str

    @property
    def total(self) -> float:
        return sum(self.classes.values())


def numbers_at_rest(work: Workload, pp_rank: int) -> float:
    """Return the number of parameter elements stored on a rank."""
    total = 0.0
    for stage in stages(work, pp_rank):
        parts = [(stage.front, 1), (stage.back, 1)]
        kinds = work.kinds(stage.blocks).items()
        parts += [(work.cut().parameters[kind], count) for (kind, _), count in kinds]
        total += sum(count * g.own for part, count in parts for g in groups("", part, work))
    return total


def rank_memory(work: Workload, pp_rank: int = 0) -> RankMemory:
    """Return the peak of an optimizer step other than the first, which has no optimizer state yet."""
    return _Step(work, pp_rank).run()


class _Step:
    def __init__(self, work: Workload, pp_rank: int) -> None:
        self.work, self.pp_rank = work, pp_rank
        self.stages = stages(work, pp_rank)
        self.tally = Tally()
        self._groups: dict[int, list[Group]] = {}
        self._blocks: dict[tuple[int, str], Piece] = {}
        self.front, self.back = work.piece(FRONT), work.piece(BACK)
        self.loss_beside = 0.0
        if work.graphs == "blocks":  # the loss is outside of graphs, and finds none of their memory free
            self.loss_beside = max(self.back.forward, self.back.kept + self.back.backward)
            self.back = replace(self.back, forward=0.0, kept=0.0, backward=0.0)
        self.stream = work.measured().stream
        self._places = {number: at for stage in self.stages for at, number in enumerate(stage.blocks)}
        self.in_flight = in_flight(work, pp_rank)
        self.forward_first = work.degrees.pp > 1 and work.pipeline.schedule in FORWARD_FIRST

    # ---------------------------------------------------------------------------------------- parts

    def groups(self, number: int) -> list[Group]:
        """Return the groups of a block: its own, and its experts'."""
        kind = self.work.blueprint.kinds[number]
        if kind not in self._groups:
            self._groups[kind] = groups("block", self.work.cut().parameters[kind], self.work)
        return self._groups[kind]

    def block(self, number: int) -> Piece:
        key = (self.work.blueprint.kinds[number], self.work.recomputed(self._places[number]))
        if key not in self._blocks:
            self._blocks[key] = self.work.piece(*key)
        return self._blocks[key]

    def end(self, parameters: tuple[Parameter, ...]) -> Group | None:
        return groups("end", parameters, self.work)[0] if parameters else None

    def of(self, stage: Stage) -> Iterator[Group]:
        for end in (stage.front, stage.back):
            yield from groups("end", end, self.work)
        for number in stage.blocks:
            yield from self.groups(number)

    # ----------------------------------------------------------------------------------------- step

    def run(self) -> RankMemory:
        work, tally = self.work, self.tally
        every = [g for stage in self.stages for g in self.of(stage)]
        own = sum(g.own for g in every)
        largest = max(g.largest for g in every)
        at_rest = 0.0 if work.offloaded else own - sum(g.spared for g in every)
        tally.add("parameters", at_rest * work.stored)
        beside = [numbers_at_rest(one, self.pp_rank) * one.stored for one in work.frozen]
        tally.add("frozen", 0.0 if work.offloaded else sum(beside))
        trained = sum(g.own * g.trained for g in every)
        tally.add("optimizer", 0.0 if work.offloaded else trained * work.optimizer_state)
        tally.add("activations", work.measured().batch * work.local_rows / work.rows)
        self._accumulated(every)
        self._between_stages()
        # Where all micro-batches go forward first, the last stage's backward starts with the most memory in
        # use.
        followed = range(len(self.stages))
        for stage in followed[-1:] if self.forward_first else followed:
            self._pass(stage)
        if work.unsharded and not (work.alone and work.degrees.pp > 1):
            self._reduce_at_the_end(every)
        extra = work.optimizer_extra * (trained if work.optimizer_extra_all else largest)
        tally.now["activations"] -= self._held
        tally.now["communication"] = tally.now["loss"] = 0.0
        tally.now["gradients"] = 0.0 if work.offloaded else trained * work.stored
        if work.graphs == "none":
            tally.look("optimizer step", optimizer=0.0 if work.offloaded else extra)
        else:  # what graphs use in a pass is theirs at all times
            tally.peak["optimizer"] += extra
            tally.peak["loss"] += self.loss_beside
        return RankMemory(self.pp_rank, own, tally.peak, tally.moment)

    def _accumulated(self, every: list[Group]) -> None:
        """Add gradients of earlier passes of the same step, and the compute copies that all passes share."""
        work = self.work
        self.tally.add("communication", sum(g.whole for g in every) * work.held)
        if self.forward_first:
            return
        if work.unsharded:
            number = work.stored if work.alone and work.degrees.pp > 1 else work.reduce
            self.tally.add("gradients", sum(g.whole * g.trained for g in every) * number)
        elif work.passes > 1 and not work.offloaded:
            replicas = work.reduce if work.degrees.dp_replicate > 1 else 0
            self.tally.add("gradients", sum(g.own * g.trained for g in every) * (work.stored + replicas))

    def _between_stages(self) -> None:
        """Add the activations of other micro-batches, and the buffers that they arrive in."""
        self._held = 0.0
        if self.work.degrees.pp == 1:
            return
        stream, buffers = self.stream, 0.0
        for number, stage in enumerate(self.stages):
            kept = self._kept(stage)
            self._held += self.in_flight[number] * kept
            if stage.has_head:  # every micro-batch past the loss has its gradients from there
                self.tally.add("loss", (self.in_flight[number] - 1) * self.back.kept)
            buffers += self.work.passes * stream * ((not stage.front) + (not stage.has_head))
        # `_pass` follows one micro-batch: the last one that entered its stage.
        self.tally.add("activations", self._held)
        self.tally.add("communication", buffers)

    def _kept(self, stage: Stage) -> float:
        """Return what a stage keeps of a micro-batch, including its input and output."""
        there = stage.blocks[len(moved_blocks(self.work, stage)) :]
        return self.front.kept + sum(self.block(i).kept for i in there) + 2 * self.stream

    def _reduce_at_the_end(self, every: list[Group]) -> None:
        there = sum(g.whole for g in every if not reshards(self.work, g.ranks)) * self.work.compute
        for g in every:
            more = {"communication": there + g.padded * self.work.reduce, "activations": -self._held}
            self.tally.look("reduction", **more)

    # ---------------------------------------------------------------------------------------- a pass

    def _pass(self, number: int) -> None:
        """Follow one micro-batch forward and backward through one stage, on top of the current memory."""
        stage, before = self.stages[number], dict(self.tally.now)
        if self.work.degrees.pp > 1:
            # The micro-batch followed here is already counted in `_held`.
            self.tally.add("activations", -min(1, self.in_flight[number]) * self._kept(stage))
        others = [g for i, s in enumerate(self.stages) if i != number for g in self.of(s)]
        kept = sum(g.whole for g in others if not self.work.alone and not reshards(self.work, g.ranks))
        self.tally.add("communication", kept * self.work.compute)
        self._forward(stage)
        self._backward(stage)
        gradients = self.tally.now["gradients"]
        self.tally.now = before
        if not self.work.unsharded and self.work.passes == 1:
            self.tally.now["gradients"] = gradients

    def _forward(self, stage: Stage) -> None:
        work, tally = self.work, self.tally
        flat, front, back = 0.0, self.end(stage.front), self.end(stage.back)
        if front:
            flat = self._gather(front, flat)
            tally.look("embedding", activations=self.front.forward)
            if not work.cut().tied:
                self._freed(front)
        tally.add("activations", self.front.kept)
        moved, leaving = moved_blocks(work, stage), 0.0
        for place, number in enumerate(stage.blocks):
            for g in self.groups(number):
                flat = self._gather(g, flat, activations=self.stream)
            block = self.block(number)
            tally.look(f"forward, block {number}", activations=block.forward)
            tally.add("activations", block.kept - leaving)
            leaving = block.kept if place in moved else 0.0
            for g in self.groups(number):
                self._freed(g)
        if stage.has_head:
            if back:
                flat = self._gather(back, flat, activations=self.stream)
            tally.look("loss", loss=self.back.forward)
            tally.add("loss", self.back.kept)
            if work.reshard == "always" and back:
                self._freed(back)
        tally.add("communication", -flat)

    def _gather(self, g: Group, flat: float, **more: float) -> float:
        """Gather a group in forward; return the size of the flat buffer that stays for now."""
        work, tally = self.work, self.tally
        if work.alone:
            return flat
        whole = g.whole * work.compute
        if work.degrees.pp > 1 and work.passes > 1 and not reshards(work, g.ranks):
            tally.add("communication", whole)  # resident since the first micro-batch
            return flat
        if g.ranks == 1:
            tally.add("communication", whole)
            tally.look("gather", communication=g.largest * work.compute, **more)
            return flat
        padded = g.padded * work.compute
        cast = g.own * work.compute if work.stored != work.compute else 0.0
        tally.add("communication", padded)
        tally.look("gather", communication=cast, **more)
        tally.add("communication", whole)
        tally.look("gather", **more)
        tally.add("communication", -flat)
        return padded

    def _freed(self, g: Group) -> None:
        if reshards(self.work, g.ranks):
            self.tally.add("communication", -g.whole * self.work.compute)

    def _backward(self, stage: Stage) -> None:
        work, tally = self.work, self.tally
        front, back = self.end(stage.front), self.end(stage.back)
        order = [*reversed(stage.blocks)]
        coming = [g for number in order for g in self.groups(number)]
        coming += [front] if front and not work.cut().tied else []
        ahead = self._prefetch(coming[0]) if order else 0.0
        waiting = tied = 0.0
        if stage.has_head:
            tally.add("loss", -self.back.kept)
            worst = {"loss": self.back.backward, "gradients": self._transient(self.back, back)}
            tally.look("loss, backward", **worst)
            if back:
                waiting = self._reduce(back, waiting, activations=self.stream, dw=self.back.gradients)
            else:  # tied: the embedding's gradient will be added to it
                tied = self.back.gradients
                tally.add("gradients", tied)
        moved = moved_blocks(work, stage)
        for number in order:
            block, parts = self.block(number), self.groups(number)
            if (place := self._places[number] - 1) in moved:  # on its way back
                tally.add("activations", self.block(stage.blocks[place]).kept)
            for g in parts:
                self._arrive(g, ahead)
                del coming[0]
                ahead = self._prefetch(coming[0]) if coming else 0.0
            tally.add("activations", -block.kept)
            worst = {"activations": block.backward, "gradients": self._transient(block, *parts)}
            tally.look(f"backward, block {number}", **worst)
            own, *experts = parts
            for g in experts:
                there, dw = block.experts_done
                waiting = self._reduce(g, waiting, dw=dw, activations=there)
            dw = block.gradients * own.whole / sum(g.whole for g in parts)
            waiting = self._reduce(own, waiting, activations=self.stream, dw=dw)
        tally.add("activations", -self.front.kept)
        if front:
            if not work.cut().tied and not work.alone:
                self._arrive(front, ahead)
            worst = {"activations": self.front.backward, "gradients": self._transient(self.front, front)}
            tally.look("embedding, backward", **worst)
            if not work.alone:
                tally.add("gradients", -tied)
            waiting = self._reduce(front, waiting, dw=self.front.gradients)
            if work.alone:
                tally.add("gradients", -tied)
        tally.add("communication", -waiting)

    def _transient(self, piece: Piece, *parts: Group | None) -> float:
        """Return the gradients that are new at the peak: without FSDP2 and with gradients of earlier
        passes, each is added to its own at once."""
        if not self.work.alone or self.work.passes == 1:
            return piece.gradients_at_most
        return min(
            piece.gradients_at_most, max(g.largest if g else math.inf for g in parts) * self.work.stored
        )

    def _prefetch(self, g: Group) -> float:
        if not reshards(self.work, g.ranks) or g.ranks == 1:
            return 0.0
        self.tally.add("communication", g.padded * self.work.compute)
        return g.padded * self.work.compute

    def _arrive(self, g: Group, flat: float) -> None:
        """Account for a group that is gathered again in backward."""
        if reshards(self.work, g.ranks):
            self.tally.add("communication", g.whole * self.work.compute)
            self.tally.look("gather in backward", activations=self.stream)
        self.tally.add("communication", -flat)

    def _reduce(self, g: Group, waiting: float, *, dw: float, **more: float) -> float:
        """Account for the end of a group's backward: its parameters are freed, its gradients summed over
        ranks.

        Returns:
            The size of the buffer that stays until the next group's reduction.
        """
        work, tally = self.work, self.tally
        if work.alone:
            if work.passes == 1 or self.forward_first:
                tally.add("gradients", g.own * g.trained * work.stored)
            return 0.0
        if work.unsharded:
            tally.look("gradients in the reduce dtype", gradients=dw, **more)
            if self.forward_first:
                tally.add("gradients", g.whole * g.trained * work.reduce)
            return 0.0
        tally.add("communication", -g.whole * work.compute - waiting)
        buffer, own = g.padded * g.trained * work.reduce, g.own * g.trained * work.reduce
        tally.add("communication", buffer)
        tally.look("reduction", gradients=dw, **more)
        alone = own if g.ranks == 1 else 0.0
        tally.look("reduction", gradients=own, communication=alone, **more)
        cast = g.own * g.trained * work.stored if work.stored != work.reduce else 0.0
        tally.look("reduction", gradients=own + cast, **more)
        if work.passes == 1 and not work.offloaded:
            tally.add("gradients", g.own * g.trained * work.stored)
        return buffer
