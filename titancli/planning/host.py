"""What a rank keeps in the host's memory, how much of it travels in a step, and the time that this adds.

With `parallelize.cpu_offload` gathering begins with a copy of the shards to the device, and reduction ends
with one of gradients back. Offloaded activations go out in forward and come back in backward. Copies are made
beside the computation, in both directions at once, and add time where they take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from titancli.planning.memory import numbers_at_rest
from titancli.planning.pipeline import in_flight
from titancli.planning.workload import Workload, groups, moved_blocks, reshards, stages


@dataclass(frozen=True)
class Host:
    """One rank's part of the host; bytes."""

    memory: float
    forward: tuple[float, float]
    """Copied to the device and to the host in the forwards of a step."""
    backward: tuple[float, float]

    def exposed(self, rate: float, forward: float, backward: float) -> float:
        """Return the seconds that copies take beyond those of forward and backward."""
        return max(0.0, max(self.forward) / rate - forward) + max(0.0, max(self.backward) / rate - backward)


def host(work: Workload, pp_rank: int) -> Host | None:
    """Return what a rank keeps on the host; None: nothing."""
    memory = up = again = gradients = activations = 0.0
    for stage, count in zip(stages(work, pp_rank), in_flight(work, pp_rank), strict=True):
        kinds = [work.blueprint.kinds[number] for number in stage.blocks]
        moved = moved_blocks(work, stage)
        kept = sum(work.piece(kinds[place], work.recomputed(place)).kept for place in moved)
        memory, activations = memory + kept * count, activations + kept * work.passes
        if work.offloaded:
            blocks = [work.cut().parameters[kind] for kind in kinds]
            for part in (stage.front, stage.back, *blocks):
                for g in groups("", part, work):
                    size, trained = g.own * work.stored, g.own * g.trained
                    twice = work.reshard == "always" if part is stage.back else reshards(work, g.ranks)
                    memory += size + trained * (work.stored + work.optimizer_state)
                    up += size * (1 if work.degrees.pp > 1 else work.passes)
                    again += size * work.passes * (twice and not (part is stage.front and work.cut().tied))
                    gradients += trained * work.stored * (1 if work.unsharded else work.passes)
    for one in work.frozen if work.offloaded else ():
        size = numbers_at_rest(one, pp_rank) * one.stored
        memory, up = memory + size, up + size * work.passes
    return Host(memory, (up, activations), (again + activations, gradients)) if memory else None
