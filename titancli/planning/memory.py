"""The memory of one rank through a step: what is always there, and what forward, loss, backward and
optimizer add.

The order of things is that of FSDP2 (`torch.distributed.fsdp`): a group's parameters are gathered before it
runs (into one flat buffer, then copied to their places; the flat one goes when the next group's arrives),
gathered again in backward while the group above still works, and its gradients are copied into a buffer of
the reduce dtype whose predecessor is freed just before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from titancli.models.shape import Parameter
from titancli.planning.blocks import BlockMemory, block_memory
from titancli.planning.head import HeadMemory, embedding_peak, head_memory
from titancli.planning.job import Job
from titancli.planning.ledger import CLASSES
from titancli.planning.pipeline import in_flight
from titancli.planning.shards import Group, Stage, groups, reshards, stages

FORWARD_FIRST = ("GPipe", "LoopedBFS")
"""Schedules in which all micro-batches are through forward before the first goes back."""
INTEGERS = 3 * 8
"""Bytes of each token's entries in a batch: tokens, targets, positions."""


@dataclass
class Tally:
    """What is taken at the moment by class, and the worst moment so far."""

    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    peak: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    moment: str = ""

    def add(self, kind: str, size: float) -> None:
        self.now[kind] += size

    def look(self, moment: str, **more: float) -> None:
        """Compare this moment, with what is taken for its length only, to the worst one."""
        if sum(self.now.values()) + sum(more.values()) > sum(self.peak.values()):
            self.peak = {kind: size + more.get(kind, 0.0) for kind, size in self.now.items()}
            self.moment = moment


@dataclass(frozen=True)
class RankMemory:
    """The worst moment of one rank."""

    pp_rank: int
    parameters: float
    """Numbers at rest on it."""
    classes: dict[str, float]
    """Bytes by class."""
    moment: str

    @property
    def total(self) -> float:
        return sum(self.classes.values())


def numbers_at_rest(job: Job, pp_rank: int) -> float:
    """Numbers of parameters that lie on a rank."""
    total = 0.0
    for stage in stages(job, pp_rank):
        parts = [(stage.front, 1), (stage.back, 1)]
        parts += [(block.parameters, count) for block, _, count in job.kinds(stage.blocks)]
        total += sum(count * g.own for part, count in parts for g in groups("", part, job))
    return total


def rank_memory(job: Job, pp_rank: int = 0) -> RankMemory:
    """The worst moment of an optimizer step, the first one (which has no optimizer state yet) aside."""
    return _Step(job, pp_rank).run()


class _Step:
    def __init__(self, job: Job, pp_rank: int) -> None:
        self.job, self.pp_rank = job, pp_rank
        self.stages = stages(job, pp_rank)
        self.tally = Tally()
        self._groups: dict[int, list[Group]] = {}
        self._blocks: dict[tuple[int, str], BlockMemory] = {}
        self.in_flight = in_flight(job, pp_rank)
        self.forward_first = job.degrees.pp > 1 and job.pipeline.schedule in FORWARD_FIRST

    # ---------------------------------------------------------------------------------------- parts

    def groups(self, number: int) -> list[Group]:
        """Of a block: its own, and its experts'."""
        block = self.job.shape.blocks[number]
        if id(block) not in self._groups:
            self._groups[id(block)] = groups("block", block.parameters, self.job)
        return self._groups[id(block)]

    def block(self, number: int) -> BlockMemory:
        block, recompute = self.job.shape.blocks[number], self.job.recomputed(number)
        key = (id(block), recompute)
        if key not in self._blocks:
            self._blocks[key] = block_memory(block, self.job, recompute)
        return self._blocks[key]

    def end(self, parameters: tuple[Parameter, ...]) -> Group | None:
        return groups("end", parameters, self.job)[0] if parameters else None

    def of(self, stage: Stage) -> Iterator[Group]:
        for end in (stage.front, stage.back):
            yield from groups("end", end, self.job)
        for number in stage.blocks:
            yield from self.groups(number)

    # ----------------------------------------------------------------------------------------- step

    def run(self) -> RankMemory:
        job, tally = self.job, self.tally
        every = [g for stage in self.stages for g in self.of(stage)]
        own = sum(g.own for g in every)
        largest = max(g.largest for g in every)
        at_rest = 0.0 if job.offloaded else own
        tally.add("parameters", at_rest * job.stored)
        tally.add("optimizer", at_rest * job.optimizer_state)
        tally.add("activations", job.local_rows * job.seq_len * INTEGERS + self._angles())
        self._accumulated(every)
        self._between_stages()
        # Where all go forward first, the last stage's backward finds the most; the others' comes after it.
        followed = range(len(self.stages))
        for stage in followed[-1:] if self.forward_first else followed:
            self._pass(stage)
        if job.unsharded:
            self._reduce_at_the_end(every)
        extra = job.optimizer_extra * (own if job.optimizer_extra_all else largest)
        tally.now["activations"] -= self._held
        tally.now["communication"] = tally.now["loss"] = 0.0
        tally.now["gradients"] = at_rest * job.stored
        tally.look("optimizer step", optimizer=0.0 if job.offloaded else extra)
        return RankMemory(self.pp_rank, own, tally.peak, tally.moment)

    def _angles(self) -> float:
        widths = [block.attention.head_dim for block in self.job.shape.blocks]
        return self.job.tokens * max(widths) * 4  # cosine and sine, fp32, of half a head

    def _accumulated(self, every: list[Group]) -> None:
        """Gradients that are there from earlier passes of the same step."""
        job = self.job
        if self.forward_first:
            return
        if job.unsharded:
            self.tally.add("gradients", sum(g.whole for g in every) * job.reduce)
        elif job.passes > 1 and not job.offloaded:
            replicas = job.reduce if job.degrees.dp_replicate > 1 else 0
            self.tally.add("gradients", sum(g.own for g in every) * (job.stored + replicas))

    def _between_stages(self) -> None:
        """What other micro-batches hold, and the buffers that they arrive in."""
        self._held = 0.0
        if self.job.degrees.pp == 1:
            return
        stream, buffers = self.job.stream, 0.0
        for number, stage in enumerate(self.stages):
            kept = sum(self.block(i).kept for i in stage.blocks) + 2 * stream
            self._held += self.in_flight[number] * kept
            if stage.has_head:  # each micro-batch that is through the loss has its gradients from there
                others = self.in_flight[number] - 1
                head = head_memory(self.job).kept
                self._held += others * head.get("activations", 0.0)
                self.tally.add("loss", others * head.get("loss", 0.0))
            buffers += self.job.passes * stream * ((not stage.front) + (not stage.has_head))
        # One micro-batch is followed in `_pass`: the last one that its stage has taken in.
        self.tally.add("activations", self._held)
        self.tally.add("communication", buffers)

    def _reduce_at_the_end(self, every: list[Group]) -> None:
        for g in every:
            self.tally.look("reduction", communication=g.padded * self.job.reduce)

    # ---------------------------------------------------------------------------------------- a pass

    def _pass(self, number: int) -> None:
        """Forward and backward of one micro-batch through one stage, on top of what is there."""
        stage, before = self.stages[number], dict(self.tally.now)
        if self.job.degrees.pp > 1:
            # The micro-batch that is followed here is one of those that are counted as held.
            kept = sum(self.block(i).kept for i in stage.blocks) + 2 * self.job.stream
            self.tally.add("activations", -min(1, self.in_flight[number]) * kept)
        others = [g for i, s in enumerate(self.stages) if i != number for g in self.of(s)]
        kept = sum(g.whole for g in others if not reshards(self.job, g.ranks))
        self.tally.add("communication", kept * self.job.compute)
        head = None
        if stage.has_head:
            head = head_memory(self.job)
        self._forward(stage, head)
        self._backward(stage, head)
        gradients = self.tally.now["gradients"]
        self.tally.now = before
        if not self.job.unsharded and self.job.passes == 1:
            self.tally.now["gradients"] = gradients

    def _forward(self, stage: Stage, head: HeadMemory | None) -> None:
        job, tally = self.job, self.tally
        flat, front, back = 0.0, self.end(stage.front), self.end(stage.back)
        if front:
            flat = self._gather(front, flat)
            tally.look("embedding", activations=embedding_peak(job))
            if not job.shape.tied:
                self._freed(front)
        for number in stage.blocks:
            for g in self.groups(number):
                flat = self._gather(g, flat, activations=job.stream)
            block = self.block(number)
            tally.look(f"forward, block {number}", activations=block.forward_peak)
            tally.add("activations", block.kept)
            for g in self.groups(number):
                self._freed(g)
        if head:
            if back:
                flat = self._gather(back, flat, activations=job.stream)
            tally.look("loss", **head.forward_peak)
            for kind, size in head.kept.items():
                tally.add(kind, size)
            if job.reshard == "always" and back:
                self._freed(back)
        tally.add("communication", -flat)

    def _gather(self, g: Group, flat: float, **more: float) -> float:
        """Gather a group in forward; returns the flat buffer that stays for now."""
        job, tally = self.job, self.tally
        whole = g.whole * job.compute
        if g.ranks == 1:
            tally.add("communication", whole)
            tally.look("gather", communication=g.largest * job.compute, **more)
            return flat
        padded = g.padded * job.compute
        cast = g.own * job.compute if job.stored != job.compute else 0.0
        tally.add("communication", padded)
        tally.look("gather", communication=cast, **more)
        tally.add("communication", whole)
        tally.look("gather", **more)
        tally.add("communication", -flat)
        return padded

    def _freed(self, g: Group) -> None:
        if reshards(self.job, g.ranks):
            self.tally.add("communication", -g.whole * self.job.compute)

    def _backward(self, stage: Stage, head: HeadMemory | None) -> None:
        job, tally = self.job, self.tally
        front, back = self.end(stage.front), self.end(stage.back)
        order = [*reversed(stage.blocks)]
        coming = [g for number in order for g in self.groups(number)]
        coming += [front] if front and not job.shape.tied else []
        ahead = self._prefetch(coming[0]) if order else 0.0
        waiting = 0.0
        if head:
            for kind, size in head.kept.items():
                tally.add(kind, -size)
            tally.look("loss, backward", **head.backward_peak)
            if back:
                waiting = self._reduce(back, waiting, activations=job.stream, dw=head.gradients)
            else:  # tied: the embedding's gradient is added to it
                tally.add("gradients", head.gradients)
        for number in order:
            block, parts = self.block(number), self.groups(number)
            for g in parts:
                self._arrive(g, ahead)
                del coming[0]
                ahead = self._prefetch(coming[0]) if coming else 0.0
            tally.add("activations", -block.kept)
            tally.look(f"backward, block {number}", **block.backward_peak)
            own, *experts = parts
            for g in experts:
                there = block.experts_done
                waiting = self._reduce(g, waiting, dw=there["gradients"], activations=there["activations"])
            dw = block.gradients * own.whole / sum(g.whole for g in parts)
            waiting = self._reduce(own, waiting, activations=job.stream, dw=dw)
        if front:
            if not job.shape.tied:
                self._arrive(front, ahead)
            dw = front.whole * job.compute
            tally.look("embedding, backward", gradients=dw, activations=embedding_peak(job, backward=True))
            if job.shape.tied and head:
                tally.add("gradients", -head.gradients)
            waiting = self._reduce(front, waiting, dw=dw)
        tally.add("communication", -waiting)

    def _prefetch(self, g: Group) -> float:
        if not reshards(self.job, g.ranks) or g.ranks == 1:
            return 0.0
        self.tally.add("communication", g.padded * self.job.compute)
        return g.padded * self.job.compute

    def _arrive(self, g: Group, flat: float) -> None:
        """A group that was freed after forward is there again."""
        if reshards(self.job, g.ranks):
            self.tally.add("communication", g.whole * self.job.compute)
            self.tally.look("gather in backward", activations=self.job.stream)
        self.tally.add("communication", -flat)

    def _reduce(self, g: Group, waiting: float, *, dw: float, **more: float) -> float:
        """After a group's backward: its parameters go, its gradients are summed over ranks; returns the
        buffer that stays until the next group's turn."""
        job, tally = self.job, self.tally
        if job.unsharded:
            tally.look("gradients in the reduce dtype", gradients=dw, **more)
            if self.forward_first:
                tally.add("gradients", g.whole * job.reduce)
            return 0.0
        tally.add("communication", -g.whole * job.compute - waiting)
        buffer, own = g.padded * job.reduce, g.own * job.reduce
        tally.add("communication", buffer)
        tally.look("reduction", gradients=dw, **more)
        alone = own if g.ranks == 1 else 0.0
        tally.look("reduction", gradients=own, communication=alone, **more)
        cast = g.own * job.stored if job.stored != job.reduce else 0.0
        tally.look("reduction", gradients=own + cast, **more)
        if job.passes == 1 and not job.offloaded:
            tally.add("gradients", g.own * job.stored)
        return buffer
