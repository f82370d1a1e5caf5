"""What of each parameter lies on a rank, at rest and gathered."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from titancli.models.shape import Parameter
from titancli.planning.job import Job

EXPERTS = "experts"
"""The name of groups of experts."""


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers and reduces together, in numbers (not bytes) of one rank."""

    name: str
    whole: float
    """Gathered: what tensor and expert parallelism leave of them."""
    padded: float
    """The same as it is sent, every shard of one size."""
    own: float
    """At rest."""
    largest: float
    """Of the largest parameter at rest."""
    ranks: int
    """That they are gathered from."""

    def joined(self, other: Group) -> Group:
        return Group(
            self.name,
            self.whole + other.whole,
            self.padded + other.padded,
            self.own + other.own,
            max(self.largest, other.largest),
            max(self.ranks, other.ranks),
        )


def local_shape(parameter: Parameter, tp: int, ep: int) -> tuple[float, ...]:
    """What tensor and expert parallelism leave of a parameter on one rank."""
    first, *rest = parameter.shape
    if parameter.style in ("column", "vocab"):
        return (first / tp, *rest)
    if parameter.style == "row" and rest:
        return (first, rest[0] / tp, *rest[1:])
    if parameter.style == "expert":
        return (first / ep, *rest)
    return parameter.shape


def groups(name: str, parameters: Iterable[Parameter], job: Job) -> list[Group]:
    """The FSDP2 groups that these parameters make: dense ones, and experts, which lie on other ranks."""
    listed = list(parameters)
    dense = [p for p in listed if p.style != "expert"]
    experts = [p for p in listed if p.style == "expert"]
    return [_group(n, part, job) for n, part in ((name, dense), (EXPERTS, experts)) if part]


def _group(name: str, parameters: Iterable[Parameter], job: Job) -> Group:
    ranks = job.expert_fsdp if name == EXPERTS else job.fsdp
    shapes = [local_shape(parameter, job.degrees.tp, job.degrees.ep) for parameter in parameters]
    # Experts that are fewer than the ranks are cut along the next dimension, as in `titancli.parallel.fsdp`.
    few = name == EXPERTS and min(shape[0] for shape in shapes) < ranks
    cut = int(few and all(len(shape) > 1 and shape[1] % ranks == 0 for shape in shapes))
    own = [math.ceil(shape[cut] / ranks) * math.prod(shape) / shape[cut] for shape in shapes]
    each = [
        Group(name, math.prod(shape), n * ranks, n, n, ranks) for shape, n in zip(shapes, own, strict=True)
    ]
    return reduce(Group.joined, each)


def reshards(job: Job, ranks: int) -> bool:
    """Whether gathered parameters are freed after forward: see `titancli.parallel.fsdp`."""
    if job.reshard == "default":
        return ranks > 1 and job.degrees.pp == 1
    return job.reshard == "always"


@dataclass(frozen=True)
class Stage:
    """What a rank runs in one piece."""

    front: tuple[Parameter, ...]
    """The embedding, where it has that; with tied weights the final norm as well."""
    blocks: tuple[int, ...]
    back: tuple[Parameter, ...]
    """The final norm and the output, where it has these and they are a group of their own."""
    has_head: bool


def stages(job: Job, pp_rank: int) -> list[Stage]:
    shape = job.shape
    found = []
    for names in job.stage_modules(pp_rank):
        front = [p for n, p in (("tok_embeddings", shape.embedding),) if n in names]
        back = [p for n, p in (("norm", shape.norm), ("output", shape.output)) if n in names]
        if shape.tied:
            front, back = [*front, *back[:1]], []
        blocks = tuple(int(n.split(".")[1]) for n in names if n.startswith("layers."))
        found.append(Stage(tuple(front), blocks, tuple(back), "output" in names))
    return found
