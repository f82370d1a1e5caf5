"""The split of a model into pipeline stages, and the requirements of the schedules. Torch-free arithmetic.

The rule of the automatic cut is torchtitan's: the layers by which the first and last stage are lighter count
as layers too, all are spread evenly, and earlier stages take the remainder. The requirements on micro-batches
are those of torch's own classes (`torch/distributed/pipelining/schedules.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from titancli.errors import RecipeError
from titancli.registry.component import section

BEFORE, AFTER = ("tok_embeddings",), ("norm", "output")
"""The modules of a decoder that stand before and after its `layers`."""


@dataclass(frozen=True)
class Schedule:
    """The requirements of one pipeline schedule."""

    stages: tuple[int, int | None]
    """Minimum and maximum number of stages per rank; None: no maximum."""
    v_shaped: bool = False
    """Rank r holds stages r and last - r; otherwise r, r + pp, r + 2 pp, …"""
    splits_backward: bool = False
    """Gradients of inputs and of weights are made apart: neither with resharding nor with compile."""
    rounds: bool = False
    """Micro-batches go in rounds of at least pp, all of one length."""
    at_least_stages: bool = False
    """Needs as many micro-batches as there are stages."""

    @property
    def usual_stages(self) -> int:
        """Stages of a rank where the recipe does not say."""
        return 1 if self.stages == (1, 1) else 2


SCHEDULES = {
    "GPipe": Schedule((1, 1)),
    "1F1B": Schedule((1, 1), at_least_stages=True),
    "Interleaved1F1B": Schedule((2, None), rounds=True),
    "LoopedBFS": Schedule((2, None)),
    "InterleavedZeroBubble": Schedule((2, None), rounds=True, splits_backward=True),
    "ZBVZeroBubble": Schedule((2, 2), v_shaped=True, splits_backward=True),
    "DualPipeV": Schedule((2, 2), v_shaped=True, splits_backward=True, at_least_stages=True),
}


ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@section
class Pipeline:
    """Pipeline parallelism (mesh.pp): how the model is split into stages, and the schedule."""

    effect: ClassVar = "speed"
    schedule: ScheduleName = "1F1B"
    """Pipeline schedule. The last five run several stages per rank; the last three split the backward
    pass."""
    microbatch_size: Annotated[int, Gt(0)] = 1
    """Sequences per pipeline micro-batch."""
    layers_per_stage: Annotated[int, Gt(0)] | None = None
    """Layers per stage; None: as many as give one stage per rank, or two for schedules with several."""
    first_stage_less_layers: Annotated[int, Ge(0)] = 1
    """How many fewer layers the first stage gets, to compensate for the embedding."""
    last_stage_less_layers: Annotated[int, Ge(0)] = 1
    """How many fewer layers the last stage gets, to compensate for the output layer."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Explicit list of the modules of every stage, instead of the automatic split: `[["tok_embeddings",
    "layers.0"], …]`."""


class StageError(RecipeError):
    """A pipeline that does not fit the model; `key` says which field of the recipe is wrong."""

    def __init__(self, key: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.key = key

    def __reduce__(self):
        return StageError, (self.key, self.message, self.hint)


def cut(
    pipeline: Pipeline,
    pp: int,
    n_layers: int,
    *,
    before: Sequence[str] = BEFORE,
    after: Sequence[str] = AFTER,
) -> list[list[str]]:
    """Return the names of every stage's modules, in the order of the model. Only this function decides which
    stage has a module.

    Args:
        pp: ranks of the pipeline; the number of stages is a multiple of it.
        n_layers: blocks, named `layers.0` and on.
        before: the model's modules before `layers`; the first stage has them.
        after: those after `layers`; the last stage has them.

    Raises:
        StageError: says which field does not fit, and what would.
    """
    parts = pipeline.module_fqns_per_model_part
    if parts is not None:
        _check_count("pipeline.module_fqns_per_model_part", len(parts), pp, pipeline.schedule)
        return in_order(parts, n_layers, before, after)
    first, last = pipeline.first_stage_less_layers, pipeline.last_stage_less_layers
    per_rank = SCHEDULES[pipeline.schedule].usual_stages
    stages = pp * per_rank
    if stages > n_layers + first + last and pipeline.layers_per_stage is None:
        most = (n_layers + first + last) // per_rank
        message = f"{n_layers} layers are too few for {stages} stages"
        raise StageError("mesh.pp", message, f"use mesh.pp = {most} at most")
    if pipeline.layers_per_stage is not None:
        stages = math.ceil((n_layers + first + last) / pipeline.layers_per_stage)
        _check_count("pipeline.layers_per_stage", stages, pp, pipeline.schedule)
    counts = layer_counts(n_layers, stages, first, last)
    starts = [sum(counts[:i]) for i in range(stages)]
    named = [
        [f"layers.{i}" for i in range(start, start + n)] for start, n in zip(starts, counts, strict=True)
    ]
    named[0] = [*before, *named[0]]
    named[-1] = [*named[-1], *after]
    return named


def layer_counts(n_layers: int, stages: int, first_less: int = 1, last_less: int = 1) -> list[int]:
    """Layers of each stage. The first and the last may come out with none: they have modules of their own.

    Raises:
        StageError: one end is lighter than it can be.
    """
    if stages == 1:
        return [n_layers]
    total = n_layers + first_less + last_less
    share, rest = divmod(total, stages)
    counts = [share + (i < rest) for i in range(stages)]
    for at, end, less in ((0, "first", first_less), (-1, "last", last_less)):
        if counts[at] < less:
            # Fewer layers less make the others' share smaller as well.
            most = max(
                k for k in range(less) if (total - less + k + (stages - 1 if not at else 0)) // stages >= k
            )
            message = (
                f"the {end} stage cannot be {less} layers smaller than the others, which have {counts[at]}"
            )
            raise StageError(f"pipeline.{end}_stage_less_layers", message, f"use {most} at most")
        counts[at] -= less
    return counts


def in_order(
    parts: Sequence[Sequence[str]], n_layers: int, before: Sequence[str], after: Sequence[str]
) -> list[list[str]]:
    """Explicit parts with each part's names in the model's order.

    Raises:
        StageError: a module is missing, unknown or named twice, or a part holds what comes before another's.
    """
    key = "pipeline.module_fqns_per_model_part"
    known = [*before, *(f"layers.{i}" for i in range(n_layers)), *after]
    place = {name: i for i, name in enumerate(known)}
    named = [name for part in parts for name in part]
    unknown = [name for name in named if name not in place]
    if unknown:
        hint = f"its modules are {_shorten(before, n_layers, after)}"
        raise StageError(key, f"the model has no {_list(unknown)}", hint)
    missing = [name for name in known if name not in named]
    if missing:
        raise StageError(key, f"no part has {_list(missing)}", "every module must be in exactly one part")
    twice = sorted({name for name in named if named.count(name) > 1}, key=place.__getitem__)
    if twice:
        raise StageError(
            key, f"more than one part has {_list(twice)}", "every module must be in exactly one part"
        )
    if empty := [i for i, part in enumerate(parts) if not part]:
        raise StageError(key, f"part {empty[0]} has no modules", "remove it")
    ordered = [sorted(part, key=place.__getitem__) for part in parts]
    flat = [name for part in ordered for name in part]
    if flat != known:
        wrong = next(a for a, b in zip(flat, known, strict=True) if a != b)
        raise StageError(key, f"{wrong} comes too early", "the parts must follow the order of the model")
    return ordered


def stage_ranks(schedule: str, pp: int, stages: int) -> list[int]:
    """Return for each stage the rank within the pipeline that holds it."""
    ranks = [i % pp for i in range(stages)]
    if SCHEDULES[schedule].v_shaped:
        ranks = [i if i < pp else stages - 1 - i for i in range(stages)]
    return ranks


def stages_of(schedule: str, pp: int, rank: int, stages: int) -> list[int]:
    """Return the stages that one rank of the pipeline holds, first to last."""
    return [stage for stage, holder in enumerate(stage_ranks(schedule, pp, stages)) if holder == rank]


def check_microbatches(schedule: str, pp: int, stages: int, count: int) -> None:
    """Check that a schedule can run this many micro-batches of one optimizer step.

    Raises:
        StageError: with the nearest numbers that fit.
    """
    kind = SCHEDULES[schedule]
    if kind.at_least_stages and count < stages:
        message = f"{schedule} over {stages} stages needs at least {stages} micro-batches, not {count}"
        raise StageError(
            "pipeline.microbatch_size", message, "give each rank more rows, or use smaller micro-batches"
        )
    rounds = max(1, count // pp)
    if kind.rounds and count % rounds:
        fitting = [n for n in range(1, 2 * count) if n % max(1, n // pp) == 0]
        near = sorted((max(n for n in fitting if n < count), min(n for n in fitting if n > count)))
        message = (
            f"{schedule} over {pp} ranks runs in rounds of equal length, which {count} "
            f"micro-batches cannot form"
        )
        raise StageError("pipeline.microbatch_size", message, f"{near[0]} or {near[1]} micro-batches fit")


def _check_count(key: str, stages: int, pp: int, schedule: str) -> None:
    """Stages must fill every rank with as many as the schedule runs."""
    least, most = SCHEDULES[schedule].stages
    per_rank, rest = divmod(stages, pp)
    if not rest and least <= per_rank and (most is None or per_rank <= most):
        return
    wanted = f"{least * pp}" if most == least else f"{least * pp}, {(least + 1) * pp}, {(least + 2) * pp}, …"
    message = f"{schedule} cannot run {stages} stages on {pp} pipeline ranks"
    raise StageError(key, message, f"use {wanted} stages")


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shorten(before: Sequence[str], n_layers: int, after: Sequence[str]) -> str:
    return ", ".join([*before, f"layers.0 … layers.{n_layers - 1}", *after])
