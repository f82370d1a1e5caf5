"""A recipe on a given number of ranks as numbers: batches and dtypes, measured parts, and each rank's
parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch

from titancli.layout.degrees import Degrees
from titancli.layout.stages import cut as cut_stages
from titancli.layout.stages import stages_of
from titancli.observe.peaks import Device
from titancli.planning.blueprint import Blueprint, Cut, Parameter, cut
from titancli.planning.measure import Measured, Piece, measure
from titancli.planning.stand_in import other_dispatcher
from titancli.planning.step_errors import blamed
from titancli.recipe.schema import Pipeline, Recipe, needs_dataset
from titancli.registry.component import component_info

BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS = 2
"""Numbers of state per parameter element assumed for an optimizer that does not declare them: Adam's."""
EXPERTS = "experts"
"""Name of the groups of experts."""


@dataclass(frozen=True)
class Workload:
    """One rank's share of a run. Sizes per element are in bytes."""

    recipe: Recipe
    blueprint: Blueprint
    degrees: Degrees
    device: Device
    rows: int
    """Rows that pass through the model together."""
    local_rows: int
    """Rows of a rank's local batch."""
    passes: int
    """Forward and backward passes in one optimizer step, of `rows` rows each."""
    seq_len: int
    stored: int
    """Bytes of an element of a parameter at rest."""
    compute: int
    reduce: int
    """Bytes of an element of a gradient while it is summed over ranks."""
    recompute: str
    """Activation checkpointing: "none", "op", "products", "full", every n-th block ("2"), or the
    compiler's choice within a budget ("budget 0.5")."""
    compiled: bool
    graphs: str
    """`compile.cuda_graphs`; "none" without a GPU."""
    reshard: str
    unsharded: bool
    """Whether gradients stay whole until one reduction at the end of the step."""
    offloaded: bool
    """Whether parameters, gradients and optimizer state are in the CPU's memory."""
    keeps_on_host: bool
    """Whether blocks move what they keep for backward to the host's memory."""
    optimizer_state: float
    """Total optimizer state per parameter element."""
    optimizer_extra: float
    """Temporaries of a step, per element of the largest parameter or, with `optimizer_extra_all`, of all
    parameters."""
    optimizer_extra_all: bool
    pipeline: Pipeline
    like: Workload | None = None
    """A workload with the same model, from which measurements are scaled; collectives it does not have are
    not added."""

    @cached_property
    def alone(self) -> bool:
        """Return whether no other rank has a shard or replica of this rank's parameters, so that FSDP2 is
        not used, see `titancli.parallel.unsharded`."""
        experts = self.expert_fsdp if self.blueprint.has_experts else 1
        ranks = max(self.fsdp, self.degrees.dp_replicate, experts)
        rounded = self.degrees.pp > 1 and self.stored < BYTES["float32"]
        return ranks == 1 and not rounded and not self.offloaded

    @property
    def held(self) -> float:
        """Return the bytes per element of the compute copy that pipeline ranks without FSDP2 keep from the
        first micro-batch to the last."""
        return self.compute if self.alone and self.stored != self.compute and self.degrees.pp > 1 else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens of all ranks in a step."""
        return self.rows * self.passes * self.seq_len * self.degrees.dp

    @property
    def frozen(self) -> Iterator[Workload]:
        """Yield the frozen models beside the trained one; the reference of adapters is their base."""
        for recipe in self.recipe.loop.frozen_models(self.recipe):
            if recipe is not self.recipe:
                blueprint: Any = self._known(
                    ("beside", repr(recipe.model)), partial(Blueprint, recipe, self.device)
                )
                yield workload(recipe, blueprint, recipe.degrees(self.degrees.world), self.device)
            elif not self.blueprint.has_adapters:
                yield self

    # ----------------------------------------------------------------------------------- measured

    @property
    def _kernels(self) -> str:
        return "cuda" if self.device.is_gpu else "cpu"

    @property
    def _usual(self) -> str:
        """Return the recomputation mode of the first block; any mode's measurement has the front and the
        back."""
        first = self.recomputed(0)
        return "none" if first.startswith("budget") else first

    def cut(self, recompute: str | None = None) -> Cut:
        """Return a rank's shard of the model in its compute dtype.

        With FSDP2 or a pipeline, parameters are cast outside of the blocks; a rank without either casts
        inside, from the stored dtype.
        """
        mode = recompute or self._usual
        inside = self.alone and self.degrees.pp == 1
        dtype = self.recipe.training.dtype if inside else self.recipe.training.mixed_precision_param
        layout = (self.degrees.tp, self.degrees.cp, self.degrees.ep)
        key = ("cut", layout, self._kernels, dtype, mode, str(self.recipe.parallelize))
        given = (self.blueprint, self.recipe, self.degrees, self._kernels, getattr(torch, dtype), mode)
        found: Cut = self._known(key, lambda: cut(*given))
        return found

    def measured(self, recompute: str | None = None) -> Measured:
        """Return the measurements of all parts with blocks recomputing as given: "none", "full" or an
        operation's name."""
        mode = recompute or self._usual
        found: Measured
        if self.like is not None:
            other, share = self.like.measured(mode), self._share / self.like._share
            found = self._known(("scaled", id(other), share), lambda: other.times(share))
            return found
        one, compiled = self.cut(mode), self.compiled and self.device.is_gpu
        found = self._known(
            ("measured", id(one), self.rows, compiled),
            lambda: measure(one, self.recipe, self.rows, self._kernels, compiled=compiled),
        )
        return found

    def _known(self, key: Any, make: Callable[[], Any]) -> Any:
        known = self.blueprint.known
        if key not in known:
            try:
                known[key] = make()
            except Exception as error:
                raise blamed(error, self.recipe, f"rank 0 of {self.degrees.world}") from error
        return known[key]

    @property
    def _share(self) -> float:
        return self.rows / self.degrees.cp / self.degrees.tp

    def piece(self, part: int | str, recompute: str | None = None) -> Piece:
        """Return the measurement of a kind of block, of the front or of the back."""
        if recompute is None or not recompute.startswith("budget"):
            return self.measured(recompute).pieces[part]
        least, most = (self.measured(mode).pieces[part] for mode in ("full", "none"))
        share = float(recompute.split()[1])  # 0: as full checkpointing; 1: as the compiler prefers
        return replace(most, kept=least.kept + share * (most.kept - least.kept))

    # ------------------------------------------------------------------------------------- blocks

    def recomputed(self, place: int) -> str:
        """Return what is recomputed in the block at this index of its stage: "none", "op", "products" or
        "full"."""
        if self.recompute.isdigit():
            return "none" if (place + 1) % int(self.recompute) else "full"
        return self.recompute

    def kinds(self, numbers: Iterable[int]) -> Counter[tuple[int, str]]:
        """Count a stage's blocks by kind and recomputation."""
        kinds = self.blueprint.kinds
        return Counter((kinds[number], self.recomputed(place)) for place, number in enumerate(numbers))

    @property
    def fsdp(self) -> int:
        """Return the number of ranks that a dense parameter is sharded over."""
        return self.degrees.dp_shard * self.degrees.cp

    @property
    def expert_fsdp(self) -> int:
        """Return the number of ranks that an expert's parameter is sharded over, within its
        expert-parallel rank."""
        return self.fsdp * self.degrees.tp // self.degrees.ep

    @property
    def stages(self) -> int:
        return len(self._parts())

    def stage_modules(self, rank: int) -> list[list[str]]:
        """Return the module names of each stage that a pipeline rank holds."""
        parts = self._parts()
        if self.degrees.pp == 1:
            return parts
        schedule = self.pipeline.schedule
        return [parts[stage] for stage in stages_of(schedule, self.degrees.pp, rank, len(parts))]

    def _parts(self) -> list[list[str]]:
        (before, after), layers = self.blueprint.ends, len(self.blueprint.kinds)
        if self.degrees.pp == 1:
            return [[*before, *(f"layers.{i}" for i in range(layers)), *after]]
        return cut_stages(self.pipeline, self.degrees.pp, layers, before=before, after=after)


def workload(recipe: Recipe, blueprint: Blueprint, degrees: Degrees, device: Device) -> Workload:
    """Return the workload of a checked recipe."""
    training, section = recipe.training, recipe.activation_checkpoint
    accumulation = recipe.accumulation(degrees)
    rows, passes = training.local_batch_size, accumulation
    if degrees.pp > 1:
        rows = recipe.pipeline.microbatch_size
        passes = training.local_batch_size * accumulation // rows
    recompute = section.selective_ac_option if section.mode == "selective" else section.mode
    if section.mode == "memory_budget":
        recompute = f"budget {section.memory_budget}"
    plan = recipe.parallelize
    stored, reduce = BYTES[training.dtype], BYTES[training.mixed_precision_reduce]
    state, extra, extra_all = _optimizer(recipe.optimizer, stored, device)
    return Workload(
        recipe=recipe,
        blueprint=blueprint,
        degrees=degrees,
        device=device,
        rows=rows,
        local_rows=training.local_batch_size,
        passes=passes,
        seq_len=training.seq_len,
        stored=stored,
        compute=BYTES[training.mixed_precision_param],
        reduce=reduce,
        recompute=recompute,
        compiled=recipe.compile.enable,
        graphs=recipe.compile.cuda_graphs if device.is_gpu else "none",
        reshard=plan.reshard_after_forward,
        unsharded=degrees.pp > 1 or (training.accumulate == "unsharded" and accumulation > 1),
        offloaded=device.is_gpu and plan.cpu_offload,
        keeps_on_host=device.is_gpu and any(one.offloads_activations for one in recipe.callbacks),
        optimizer_state=state,
        optimizer_extra=extra,
        optimizer_extra_all=extra_all,
        pipeline=recipe.pipeline,
    )


def assumed(recipe: Recipe, blueprint: Blueprint) -> list[str]:
    """Return a sentence for each assumption about what the recipe does not determine."""
    found = []
    if blueprint.left_out:
        found.append(f"computed without the converters ({', '.join(blueprint.left_out)})")
    if recipe.optimizer.state_bytes(4) is None:
        name = component_info(recipe.optimizer).name
        found.append(
            f"the optimizer {name} does not declare its state: two fp32 numbers per parameter are assumed"
        )
    if recipe.parallelize.cpu_offload:
        found.append("the optimizer steps on the CPU, whose time is not in the speed")
    if not needs_dataset(recipe.loop):
        name = component_info(recipe.loop).name
        found.append(f"a step of the loop {name} is assumed to be one micro-batch per rank, without sampling")
    if recipe.mesh.ep != 1 and (other := other_dispatcher(recipe)):
        found.append(f"the dispatcher {other} is assumed to send what all_to_all sends")
    if not _is(recipe.parallelize, "decoder"):
        name = component_info(recipe.parallelize).name
        found.append(f"the plan {name} is assumed to shard the model like titan's decoder")
    return found


def _optimizer(config: Any, stored: int, device: Device) -> tuple[float, float, bool]:
    """Return the optimizer's bytes of state per parameter element, the temporaries of a step, and whether
    these are per element of all parameters."""
    declared = config.state_bytes(stored)
    state = MOMENTS * 4.0 if declared is None else declared
    if not _is(config, "adamw"):
        return state, 0.0, False
    if config.state_dtype == "float32" and stored == 4:
        extra = {"fused": 0.0, "foreach": 4.0, "for-loop": 8.0}[config.implementation]
        return state, extra, config.implementation == "foreach"
    if not device.is_gpu or config.implementation == "fused":
        return state, 0.0, False  # a CPU works in small chunks
    copies = 2 * (config.state_dtype == "bfloat16") + 2 * (stored == 2)  # of moments; of gradient and weight
    return state, 4.0 * (2 + copies + 4), False  # and temporaries of the random bits


def _is(config: Any, name: str) -> bool:
    """Return whether a config is titan's own component of that name."""
    return component_info(config).name == name and type(config).__module__.startswith("titancli.")


# -------------------------------------------------------------------------------- parameters on a rank


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers and reduces together; counts of elements on one rank."""

    name: str
    whole: float
    """Gathered: sharded by tensor and expert parallelism only."""
    padded: float
    """Gathered with padding: all shards of equal size."""
    own: float
    """At rest."""
    largest: float
    """Largest parameter at rest."""
    ranks: int
    """Number of ranks they are gathered from."""
    trained: float
    """Fraction of them that has gradients."""
    spared: float = 0.0  # elements' worth of memory at rest, by a tensor class of its own

    def joined(self, other: Group) -> Group:
        own = self.own + other.own
        return Group(
            self.name,
            self.whole + other.whole,
            self.padded + other.padded,
            own,
            max(self.largest, other.largest),
            max(self.ranks, other.ranks),
            (self.trained * self.own + other.trained * other.own) / own,
            self.spared + other.spared,
        )


def groups(name: str, parameters: Iterable[Parameter], work: Workload) -> list[Group]:
    """Return the FSDP2 groups of these parameters: dense ones, and experts, which are sharded over other
    ranks."""
    listed = list(parameters)
    dense = [p for p in listed if not p.is_expert]
    experts = [p for p in listed if p.is_expert]
    return [_group(n, part, work) for n, part in ((name, dense), (EXPERTS, experts)) if part]


def _group(name: str, parameters: list[Parameter], work: Workload) -> Group:
    ranks = work.expert_fsdp if name == EXPERTS else work.fsdp
    shapes = [parameter.shape or (1,) for parameter in parameters]
    # Experts fewer than the ranks are sharded along the next dimension, as in `titancli.parallel.fsdp`.
    few = name == EXPERTS and min(shape[0] for shape in shapes) < ranks
    at = int(few and all(len(shape) > 1 and shape[1] % ranks == 0 for shape in shapes))
    own = [math.ceil(shape[at] / ranks) * math.prod(shape) / shape[at] for shape in shapes]
    at_rest = [(p.bytes_per_value or work.stored) / work.stored for p in parameters]
    each = [
        Group(name, math.prod(shape), n * ranks, n, n * p.is_trained, ranks, float(p.is_trained), n - n * r)
        for p, shape, n, r in zip(parameters, shapes, own, at_rest, strict=True)
    ]
    return reduce(Group.joined, each)


def reshards(work: Workload, ranks: int) -> bool:
    """Return whether gathered parameters are freed after forward, see `titancli.parallel.fsdp`."""
    if work.alone:
        return False
    if work.reshard == "default":
        return ranks > 1 and work.degrees.pp == 1
    return work.reshard == "always"


@dataclass(frozen=True)
class Stage:
    """A pipeline stage of a rank."""

    front: tuple[Parameter, ...]
    """The embedding, on the first stage; with tied weights also the modules after the blocks."""
    blocks: tuple[int, ...]
    back: tuple[Parameter, ...]
    """The modules after the blocks, on the last stage, unless tied."""
    has_head: bool


def moved_blocks(work: Workload, stage: Stage) -> range:
    """Return the indices of the blocks that move what they keep to the host: without a pipeline all but the
    last, whose backward comes next."""
    return range(work.keeps_on_host * (len(stage.blocks) - (work.degrees.pp == 1)))


def stages(work: Workload, pp_rank: int) -> list[Stage]:
    before, after = work.blueprint.ends
    found, one = [], work.cut()
    for names in work.stage_modules(pp_rank):
        front = one.front if any(name in names for name in before) else ()
        back = one.back if any(name in names for name in after) else ()
        if one.tied:
            front, back = (*front, *back), ()
        blocks = tuple(int(n.split(".")[1]) for n in names if n.startswith("layers."))
        found.append(Stage(front, blocks, back, after[-1] in names))
    return found
