"""What the sums are made of: a recipe on so many ranks of one device, as numbers; and what of each parameter
lies on a rank, at rest and gathered."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, Literal

from titancli.layout.degrees import Degrees
from titancli.layout.stages import cut, stages_of
from titancli.models.shape import Attention, Block, Decoder, Parameter
from titancli.observe.peaks import Device
from titancli.recipe.schema import Pipeline, Recipe, needs_dataset
from titancli.registry.component import component_info
from titancli.registry.defaults import (
    LossConfigDefaults,
    OptimizerConfigDefaults,
    ParallelizeConfigDefaults,
    with_defaults,
)

BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS = 2
"""Numbers that an optimizer keeps of each parameter, where it does not say: Adam's."""
CHUNK = {"cpu": 64 * 2**20, "gpu": 512 * 2**20, "compiled": 2**30}
"""Bytes of the logits of one chunk of the loss, of fp32 ones but where it is compiled on a GPU:
`titancli.losses.chunked`."""
TILE = 128
"""What the rows of a chunk are a multiple of, if they are more: the same."""
EXPERTS = "experts"
"""The name of groups of experts."""

Engine = Literal["cpu", "gpu", "compiled"]
"""What runs the operations: CPU kernels (a norm is several), GPU kernels (a norm is one), or torch.compile on
a GPU, which runs what stands between two products as one kernel and keeps only what a product reads."""


@dataclass(frozen=True)
class Workload:
    """One rank's share of a run. Sizes of numbers are bytes."""

    shape: Decoder
    degrees: Degrees
    device: Device
    rows: int
    """That pass through the model together."""
    local_rows: int
    """That a rank has at hand."""
    passes: int
    """Forward and backward passes of one optimizer step, of `rows` rows each."""
    seq_len: int
    stored: int
    """Of a parameter."""
    compute: int
    reduce: int
    """Of a gradient while it is summed over ranks."""
    recompute: str
    """What activation checkpointing recomputes: "none", "op", "products", "full", every n-th block ("2"), or
    what the compiler makes of a budget ("budget 0.5")."""
    compiled: bool
    reshard: str
    unsharded: bool
    """Gradients are summed over ranks once a step, and are whole until then."""
    context: str
    """How attention sees whole rows: "allgather" of keys and values, "ulysses" (heads for sequence),
    "ring"."""
    offloaded: bool
    """Parameters, gradients and optimizer state are in the CPU's memory."""
    full_logits: bool
    """The loss is computed on all logits at once."""
    fused_loss: bool
    """The loss is compiled on a GPU: no logits in fp32 are made, and products are added up in it."""
    optimizer_state: float
    """Of a parameter, in all."""
    optimizer_extra: float
    """That a step takes, for each number of the largest parameter or, with `optimizer_extra_all`, of all."""
    optimizer_extra_all: bool
    pipeline: Pipeline

    @cached_property
    def alone(self) -> bool:
        """Whether no other rank has a shard or a replica of this rank's parameters, which does without FSDP2:
        `titancli.parallel.alone`."""
        experts = any(p.style == "expert" for block in self.shape.blocks for p in block.parameters)
        ranks = max(self.fsdp, self.degrees.dp_replicate, self.expert_fsdp if experts else 1)
        rounded = self.degrees.pp > 1 and self.stored < BYTES["float32"]
        return ranks == 1 and not rounded and not self.offloaded

    @property
    def casts(self) -> float:
        """Bytes of the copy of a parameter that a rank alone computes with; 0 where it needs none, or has
        them for all micro-batches of a pipeline (`held`)."""
        return self.compute if self.stored != self.compute and self.degrees.pp == 1 else 0.0

    @property
    def held(self) -> float:
        """Bytes of such a copy that a pipeline has from its first micro-batch to its last."""
        return self.compute if self.alone and self.stored != self.compute and self.degrees.pp > 1 else 0.0

    # ------------------------------------------------------------------------------------- tokens

    @property
    def engine(self) -> Engine:
        if not self.device.is_gpu:
            return "cpu"
        return "compiled" if self.compiled else "gpu"

    @property
    def row_tokens(self) -> float:
        """Of one row on this rank."""
        return self.seq_len / self.degrees.cp

    @property
    def tokens(self) -> float:
        """That this rank's share of the matrices works on in one pass."""
        return self.rows * self.row_tokens

    @property
    def stream_tokens(self) -> float:
        """Of the residual stream: tensor parallelism cuts it along the sequence."""
        return self.tokens / self.degrees.tp

    @property
    def stream(self) -> float:
        """Bytes of the residual stream."""
        return self.stream_tokens * self.shape.dim * self.compute

    @property
    def head(self) -> Workload:
        """What passes the final norms and the output: also the hidden states of multi-token prediction."""
        return replace(self, rows=self.rows * (1 + self.shape.mtp_layers))

    @property
    def tokens_per_step(self) -> float:
        """Of all ranks."""
        return self.rows * self.passes * self.seq_len * self.degrees.dp

    @property
    def chunk_rows(self) -> int:
        """Tokens whose logits the loss makes together."""
        kind = "compiled" if self.fused_loss else "gpu" if self.device.is_gpu else "cpu"
        number = self.compute if self.fused_loss else BYTES["float32"]
        most = int(CHUNK[kind] // (number * self.shape.vocab_size / self.degrees.tp))
        return most - most % TILE if most > TILE else max(1, most)

    def seen(self, attention: Attention) -> float:
        """Keys that a query attends to, on average over a row."""
        chunk = min(attention.chunk or self.seq_len, self.seq_len)
        whole, rest = divmod(self.seq_len, chunk)

        def pairs(length: int) -> float:
            window = min(attention.window or length, length)
            return window * length - (window - 1) * window / 2

        return (whole * pairs(chunk) + pairs(rest)) / self.seq_len

    # ------------------------------------------------------------------------------------- blocks

    def recomputed(self, place: int) -> str:
        """What is recomputed of a block at this place of its stage: "none", "op", "products" or "full"."""
        if self.recompute.isdigit():
            return "none" if (place + 1) % int(self.recompute) else "full"
        return self.recompute

    def kinds(self, numbers: Iterable[int]) -> list[tuple[Block, str, int]]:
        """Of a stage's blocks, those that are alike once: a block, what is recomputed of it, and how many
        such."""
        blocks = self.shape.blocks
        found: dict[tuple[int, str], tuple[Block, str, int]] = {}
        for place, number in enumerate(numbers):
            key = (id(blocks[number]), self.recomputed(place))
            count = found[key][2] if key in found else 0
            found[key] = (blocks[number], key[1], count + 1)
        return list(found.values())

    @property
    def fsdp(self) -> int:
        """Ranks that a dense parameter is sharded over."""
        return self.degrees.dp_shard * self.degrees.cp

    @property
    def expert_fsdp(self) -> int:
        """Ranks that an expert's parameter is sharded over, beside those that have other experts."""
        return self.fsdp * self.degrees.tp // self.degrees.ep

    @property
    def stages(self) -> int:
        return len(self._parts())

    def stage_modules(self, rank: int) -> list[list[str]]:
        """The module names of each stage that a rank of the pipeline has."""
        parts = self._parts()
        if self.degrees.pp == 1:
            return parts
        schedule = self.pipeline.schedule
        return [parts[stage] for stage in stages_of(schedule, self.degrees.pp, rank, len(parts))]

    def _parts(self) -> list[list[str]]:
        layers = len(self.shape.blocks)
        if self.degrees.pp == 1:
            return [["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "output"]]
        return cut(self.pipeline, self.degrees.pp, layers)


def workload(recipe: Recipe, shape: Decoder, degrees: Degrees, device: Device) -> Workload:
    """The numbers of a checked recipe."""
    training, section = recipe.training, recipe.activation_checkpoint
    accumulation = recipe.accumulation(degrees)
    rows, passes = training.local_batch_size, accumulation
    if degrees.pp > 1:
        rows = recipe.pipeline.microbatch_size
        passes = training.local_batch_size * accumulation // rows
    recompute = section.selective_ac_option if section.mode == "selective" else section.mode
    if section.mode == "memory_budget":
        recompute = f"budget {section.memory_budget}"
    plan = with_defaults(ParallelizeConfigDefaults, recipe.parallelize)
    stored, reduce = BYTES[training.dtype], BYTES[training.mixed_precision_reduce]
    state, extra, extra_all = _optimizer(recipe.optimizer, stored, device)
    return Workload(
        shape=shape,
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
        reshard=plan.reshard_after_forward,
        unsharded=degrees.pp > 1 or (training.accumulate == "unsharded" and accumulation > 1),
        context=plan.context_parallel,
        offloaded=device.is_gpu and plan.cpu_offload,
        full_logits=_is(recipe.loss, "cross_entropy_full"),
        fused_loss=device.is_gpu and recipe.compile.loss(on_gpu=True),
        optimizer_state=state,
        optimizer_extra=extra,
        optimizer_extra_all=extra_all,
        pipeline=recipe.pipeline,
    )


def assumed(recipe: Recipe, *, described: bool) -> list[str]:
    """What nobody tells, and what is taken instead; a sentence each."""
    if not described:
        name = component_info(recipe.model).name
        return [
            f"the config of the model {name} does not declare its sizes (it has no `shape()`): "
            "memory, traffic and speed are not estimated"
        ]
    found = []
    if recipe.converters:
        names = ", ".join(component_info(config).name for config in recipe.converters)
        found.append(f"computed without the converters ({names})")
    if with_defaults(OptimizerConfigDefaults, recipe.optimizer).state_bytes(4) is None:
        name = component_info(recipe.optimizer).name
        found.append(
            f"the optimizer {name} does not declare its state: two fp32 numbers per parameter are assumed"
        )
    if not needs_dataset(recipe.loop):
        kl_coef = with_defaults(LossConfigDefaults, recipe.loss).kl_coef
        copy = " and the reference model" if kl_coef > 0 else ""
        found.append(
            f"a step of the loop {component_info(recipe.loop).name} is assumed to be one micro-batch "
            f"per rank, without sampling{copy}"
        )
    elif not (_is(recipe.loss, "cross_entropy") or _is(recipe.loss, "cross_entropy_full")):
        found.append(f"the loss {component_info(recipe.loss).name} is assumed to be computed in chunks")
    if not _is(recipe.parallelize, "decoder"):
        name = component_info(recipe.parallelize).name
        found.append(f"the plan {name} is assumed to shard the model like titan's decoder")
    return found


def _optimizer(config: Any, stored: int, device: Device) -> tuple[float, float, bool]:
    """Bytes of state for each number of a parameter; what a step takes beside that, and of how many
    numbers."""
    told = with_defaults(OptimizerConfigDefaults, config).state_bytes(stored)
    state = MOMENTS * 4.0 if told is None else told
    if not _is(config, "adamw"):
        return state, 0.0, False
    if config.state_dtype == "float32" and stored == 4:
        extra = {"fused": 0.0, "foreach": 4.0, "for-loop": 8.0}[config.implementation]
        return state, extra, config.implementation == "foreach"
    if not device.is_gpu or config.implementation == "fused":
        return state, 0.0, False  # a CPU does a little at a time
    copies = 2 * (config.state_dtype == "bfloat16") + 2 * (stored == 2)  # of moments; of gradient and weight
    return state, 4.0 * (2 + copies + 4), False  # and what random bits are made of


def _is(config: Any, name: str) -> bool:
    """Whether it is titan's own component of that name."""
    return component_info(config).name == name and type(config).__module__.startswith("titancli.")


# -------------------------------------------------------------------------------- parameters on a rank


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


def groups(name: str, parameters: Iterable[Parameter], work: Workload) -> list[Group]:
    """The FSDP2 groups that these parameters make: dense ones, and experts, which lie on other ranks."""
    listed = list(parameters)
    dense = [p for p in listed if p.style != "expert"]
    experts = [p for p in listed if p.style == "expert"]
    return [_group(n, part, work) for n, part in ((name, dense), (EXPERTS, experts)) if part]


def _group(name: str, parameters: Iterable[Parameter], work: Workload) -> Group:
    ranks = work.expert_fsdp if name == EXPERTS else work.fsdp
    shapes = [local_shape(parameter, work.degrees.tp, work.degrees.ep) for parameter in parameters]
    # Experts that are fewer than the ranks are cut along the next dimension, as in `titancli.parallel.fsdp`.
    few = name == EXPERTS and min(shape[0] for shape in shapes) < ranks
    cut = int(few and all(len(shape) > 1 and shape[1] % ranks == 0 for shape in shapes))
    own = [math.ceil(shape[cut] / ranks) * math.prod(shape) / shape[cut] for shape in shapes]
    each = [
        Group(name, math.prod(shape), n * ranks, n, n, ranks) for shape, n in zip(shapes, own, strict=True)
    ]
    return reduce(Group.joined, each)


def reshards(work: Workload, ranks: int, recompute: str | None = None) -> bool:
    """Whether gathered parameters are freed after forward: see `titancli.parallel.fsdp`. A rank alone keeps
    what it has cast for a block of which nothing is run again: `recompute`, of the block."""
    if work.alone:
        return (recompute or work.recompute) != "none" and work.degrees.pp == 1
    if work.reshard == "default":
        return ranks > 1 and work.degrees.pp == 1
    return work.reshard == "always"


@dataclass(frozen=True)
class Stage:
    """What a rank runs in one piece."""

    front: tuple[Parameter, ...]
    """The embedding, where it has that; with tied weights the final norm as well."""
    blocks: tuple[int, ...]
    back: tuple[Parameter, ...]
    """The final norm and the output, where it has these and they are a group of their own."""
    has_head: bool


def stages(work: Workload, pp_rank: int) -> list[Stage]:
    shape = work.shape
    found = []
    for names in work.stage_modules(pp_rank):
        front = [p for n, p in (("tok_embeddings", shape.embedding),) if n in names]
        back = [p for n, p in (("norm", shape.norm), ("output", shape.output)) if n in names]
        if shape.tied:
            front, back = [*front, *back[:1]], []
        blocks = tuple(int(n.split(".")[1]) for n in names if n.startswith("layers."))
        found.append(Stage(tuple(front), blocks, tuple(back), "output" in names))
    return found
