"""The estimate for a recipe on a given number of ranks, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from titancli.layout.degrees import Degrees
from titancli.observe.peaks import Device
from titancli.planning.blueprint import Blueprint
from titancli.planning.host import host
from titancli.planning.memory import RankMemory, rank_memory
from titancli.planning.pipeline import bubble
from titancli.planning.speed import Flow, Speed, flows, speed
from titancli.planning.step_errors import blamed
from titancli.planning.workload import Workload, assumed, workload
from titancli.recipe.schema import Recipe
from titancli.registry.component import component_info

CONTEXT = 2 * 2**30
"""Bytes of GPU memory outside torch's allocator: CUDA's context, NCCL's buffers."""
RESERVED = 0.27
"""Bytes that torch's allocator reserves beyond the estimate, per byte that comes and goes in a step
(parameters and optimizer state are allocated once and stay). The maximum over the published runs in
docs/plan.md, listed in tests/planning/test_published.py: 0.17 to 0.27, and below zero for one run that is
overestimated."""


@dataclass(frozen=True)
class Estimate:
    """The estimate for a model that takes rows of tokens."""

    work: Workload
    ranks: list[RankMemory]
    """Memory of every pipeline rank."""

    # Lazy: `advice.remedy` tries many recipes that do not fit, and never needs their speed.
    @cached_property
    def flows(self) -> list[Flow]:
        """Return the collectives of the rank with the highest peak memory."""
        return flows(self.work, self.worst.pp_rank)

    @cached_property
    def speed(self) -> Speed | None:
        return speed(self.work)

    @cached_property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def reserve(self) -> float:
        """Return the bytes that the allocator takes beyond those of tensors, on the rank where these are
        highest."""
        still = ("parameters", "optimizer", "frozen")
        return RESERVED * max(rank.total - sum(rank.classes[one] for one in still) for rank in self.ranks)

    @property
    def limit(self) -> float | None:
        """Return the bytes available to tensors, without `reserve`; None if the device's memory is
        unknown."""
        memory = self.work.device.memory
        return None if memory is None else memory - CONTEXT - self.reserve

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.worst.total <= self.limit


def estimate(
    recipe: Recipe, degrees: Degrees, device: Device, *, like: Workload | None = None, measured: bool = True
) -> Estimate | None:
    """Estimate a recipe that `check_world` accepts; None for a model that takes other inputs than rows of
    tokens.

    Args:
        like: the workload of another recipe with the same model, whose blueprint is reused.
        measured: whether to measure the parts, or to scale their measurements from `like`.

    Raises:
        TitanError: a step of the model fails; the error names the component.
    """
    try:
        blueprint = Blueprint(recipe, device) if like is None else like.blueprint
    except Exception as error:
        raise blamed(error, recipe, f"rank 0 of {degrees.world}") from error
    if "tokens" not in blueprint.model.inputs:
        return None
    work = workload(recipe, blueprint, degrees, device)
    if not measured:
        work = replace(work, like=like)
    return Estimate(work, [rank_memory(work, rank) for rank in range(degrees.pp)])


def as_data(recipe: Recipe, degrees: Degrees, device: Device, found: Estimate | None) -> dict[str, Any]:
    """Return the document of `titan plan --json`, without the verdict."""
    name = component_info(recipe.model).name
    document = {
        "recipe": recipe.name,
        "model": name,
        "gpu": device.name,
        "world": degrees.world,
        "mesh": asdict(degrees),
        "notes": [
            f"the model {name} does not take rows of tokens: memory, traffic and speed are not estimated"
        ],
        "parameters": None,
        "memory": None,
        "host": None,
        "copies": None,
        "compute": None,
        "collectives": [],
        "pipeline": None,
        "speed": None,
    }
    if found is None:
        return document
    work = found.work
    flops = work.blueprint.flops_per_token
    return document | {
        "notes": assumed(recipe, work.blueprint),
        "parameters": {"model": work.blueprint.size, "rank": round(found.worst.parameters)},
        "memory": _memory(found),
        "host": _host(found),
        "copies": _copies(recipe, work),
        "compute": {"flops_per_token": flops, "flops_per_step": flops * work.tokens_per_step},
        "collectives": [
            {"name": f.name, "over": f.over, "ranks": f.ranks, "bytes": round(f.size), "link": f.link}
            | {"seconds": f.seconds}
            for f in found.flows
        ],
        "pipeline": _pipeline(work),
        "speed": None if found.speed is None else asdict(found.speed),
    }


def _memory(found: Estimate) -> dict[str, Any]:
    return {
        "limit_bytes": None if found.limit is None else round(found.limit),
        "peak_bytes": round(found.worst.total),
        "moment": found.worst.moment,
        "classes": {kind: round(size) for kind, size in found.worst.classes.items()},
        "ranks": [
            {"pp_rank": rank.pp_rank, "peak_bytes": round(rank.total), "moment": rank.moment}
            for rank in found.ranks
        ],
    }


def _host(found: Estimate) -> dict[str, Any] | None:
    """Return what the rank with the most of it keeps in the host's memory, and how it travels."""
    ranks = [host(found.work, rank) for rank in range(found.work.degrees.pp)]
    there = max(filter(None, ranks), key=lambda one: one.memory, default=None)
    if there is None:
        return None
    rate = found.work.device.host_rate
    up, down = (a + b for a, b in zip(there.forward, there.backward, strict=True))
    return {
        "bytes": round(there.memory),
        "to_device_bytes": round(up),
        "to_host_bytes": round(down),
        "seconds": None if rate is None else max(up, down) / rate,
        "exposed_seconds": None if found.speed is None else found.speed.host,
    }


def _copies(recipe: Recipe, work: Workload) -> dict[str, Any] | None:
    """Return the size of the copies of the state in the memory of nodes; None: there are none."""
    copies, nodes = recipe.checkpoint.copies, -(-work.degrees.world // work.device.node)
    states = copies.states(nodes) if recipe.checkpoint.enable and copies is not None else 0
    if not states:
        return None
    size = work.blueprint.size * (work.stored + work.optimizer_state) / nodes
    return {"nodes": nodes, "bytes_per_node": round(states * size)}


def _pipeline(work: Workload) -> dict[str, Any] | None:
    if work.degrees.pp == 1:
        return None
    return {
        "schedule": work.pipeline.schedule,
        "stages": work.stages,
        "microbatches": work.passes,
        "bubble": bubble(work),
    }
