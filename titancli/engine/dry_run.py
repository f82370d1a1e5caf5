"""One step of one rank on as many ranks as are wanted, in this process, without memory and without a device.

The engine is built as it is for a run, on a process group whose collectives do nothing. The model is cut on
meta first; then its parts, and everything that is made of them, are fake tensors, which have shapes but no
values. (The other way round tensor parallel fails.) So shapes, dtypes, shards, and every component that takes
part in a step are those of the run."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titancli.distributed import process_group
from titancli.engine.build import build_engine
from titancli.engine.engine import Engine
from titancli.engine.first_weights import allocate
from titancli.engine.optimizer_state import initialise_state
from titancli.engine.pipelined import PipelinedModel
from titancli.errors import TitanError, UsageError
from titancli.models.blocks.moe import moe_layers
from titancli.planning.blame import blamed
from titancli.planning.meter import Meter
from titancli.planning.stand_in import on_a_cpu, rows_of
from titancli.planning.traffic import Traffic
from titancli.protocols.batch import Batch

if TYPE_CHECKING:
    from titancli.layout.degrees import Degrees
    from titancli.recipe.schema import Recipe

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankCheck:
    """What a step comes to on one rank: bytes of its own parts, as the step has allocated them."""

    rank: int
    place: dict[str, int]
    """Of the rank along each degree of the mesh."""
    parameters: int
    """Numbers in this rank's parts of the parameters."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    """The most that was alive at once, with the kernels of a CPU and uncompiled."""
    seconds: float


@dataclass(frozen=True)
class DryRun:
    """What was tried."""

    world: int
    ranks: list[RankCheck]
    left_out: list[str]
    """Settings of the recipe that a dry run does without, in words."""


def dry_run(recipe: Recipe, world: int, ranks: Sequence[int] | None = None) -> DryRun:
    """Run a step of each of these ranks, one after the other; None: the first rank of every pipeline stage.

    Nothing is compiled, no weights are loaded, no data is read; of several micro-batches two are run, under a
    pipeline all. Numbers that code reads out of tensors are 1, and experts are dealt out in turn.

    Raises:
        UsageError: there is no such rank.
        TitanError: what the run would fail of, or what cannot be followed on fake tensors; it names the rank.
    """
    degrees = recipe.degrees(world)
    ranks = first_ranks(degrees) if ranks is None else ranks
    if wrong := [rank for rank in ranks if not 0 <= rank < world]:
        raise UsageError(
            f"rank {wrong[0]} does not exist among {world} ranks",
            hint=f"ranks are numbered from 0 to {world - 1}",
        )
    if dist.is_initialized():
        raise TitanError("a dry run cannot be done in a process that already has a process group")
    recipe, left_out = on_a_cpu(recipe)
    return DryRun(world, [_check(recipe, degrees, rank) for rank in ranks], left_out)


def traffic_of(recipe: Recipe, world: int = 1) -> dict[str, Traffic]:
    """Return what rank 0 moves and waits for in a step, by verb: `forward_backward` and `optim_step`.

    A step as `dry_run` runs it: nothing compiled, and of several micro-batches two.

    Raises:
        TitanError: as for `dry_run`.
    """
    recipe, _ = on_a_cpu(recipe)
    recipe.degrees(world)
    found: dict[str, Traffic] = {}
    with _process_group(0, world), _random_state():
        _step(recipe, found)
    return found


def first_ranks(degrees: Degrees) -> list[int]:
    """Return the first rank of each pipeline stage: all others do the same as one of these."""
    return [stage * (degrees.world // degrees.pp) for stage in range(degrees.pp)]


def place_of(degrees: Degrees, rank: int) -> dict[str, int]:
    """Return the coordinate of a rank along each degree of the mesh."""
    place: dict[str, int] = {}
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        rank, place[name] = divmod(rank, getattr(degrees, name))
    return dict(reversed(place.items()))


def _check(recipe: Recipe, degrees: Degrees, rank: int) -> RankCheck:
    began, place = time.perf_counter(), place_of(degrees, rank)
    beside = [f"{name} {at}" for name, at in place.items() if getattr(degrees, name) > 1]
    where = f"rank {rank} of {degrees.world}" + (f" ({', '.join(beside)})" if beside else "")
    with _process_group(rank, degrees.world), _random_state():
        try:
            found = _step(recipe)
        except Exception as error:
            raise blamed(error, recipe, where) from error
    return RankCheck(rank, place, *found, seconds=time.perf_counter() - began)


def _step(recipe: Recipe, traffic: dict[str, Traffic] | None = None) -> tuple[int, int, int, int, int]:
    """Numbers of parameters; bytes of parameters, gradients and optimizer state; and of all at the peak.

    Args:
        traffic: is given what each verb moves, if that is counted.
    """
    with ExitStack() as stack:
        meter = Meter()

        def fill(parts: list[Any]) -> None:
            # From here to the end of the step all tensors are fake; what is cut already is on meta.
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(meter)
            for part in parts:
                allocate(part, CPU)
                for experts in moe_layers(part).values():
                    experts.force_load_balance()

        engine = build_engine(Engine, recipe, device=CPU, frozen=False, fill=fill)
        if isinstance(engine.runner, PipelinedModel):
            # What the last stage would tell the others does not come; these every loss has.
            engine.runner.tell = lambda value: value or ["loss", "weight"]  # type: ignore[method-assign]
        if engine.optimizer is not None:
            initialise_state(engine.optimizer)  # the peak is that of every step but the first
        parameters = [parameter for _, parameter in engine.named_parameters()]
        batches = _batches(engine, recipe)
        with _counted(engine, "forward_backward", traffic):
            engine.forward_backward(batches)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        counted = (sum(local(p).numel() for p in parameters), _bytes(parameters), _bytes(gradients))
        if engine.guard is not None:
            engine.guard.too_many()  # as a loop asks before each step: the step itself then reads nothing
        with _counted(engine, "optim_step", traffic):
            engine.optim_step()
        states = engine.optimizer.state.values() if engine.optimizer else ()
        kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return *counted, _bytes(kept), meter.peak


@contextmanager
def _counted(engine: Engine, verb: str, traffic: dict[str, Traffic] | None) -> Iterator[None]:
    """Count the traffic of a verb inside the block, if `traffic` is there for it."""
    if traffic is None:
        yield
        return
    groups = engine.optimizer.param_groups if engine.optimizer else []
    # torch keeps the count of steps on the host, but for its fused kernels; titan's own are on the device.
    on_host = [g for g in groups if "fused" in g and not g["fused"]]
    states = [engine.optimizer.state[p] for g in on_host for p in g["params"]]  # type: ignore[union-attr]
    with Traffic({id(state["step"]) for state in states if "step" in state}) as traffic[verb]:
        yield


def _batches(engine: Engine, recipe: Recipe) -> list[Batch]:
    """Rows of the recipe's sizes. From the second micro-batch on memory is what it is in all others.

    Raises:
        UsageError: the model does not take rows of tokens.
    """
    count = engine.settings.accumulation
    if engine.mesh.degrees.pp == 1:
        count = min(count, 2)
    rows = recipe.training.local_batch_size
    return [rows_of(recipe, engine.parts[0].inputs, engine.loss, rows, CPU) for _ in range(count)]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _process_group(rank: int, world: int) -> Iterator[None]:
    """A process group in which every collective is done at once, and changes nothing."""
    hook = sys.excepthook  # torch puts the rank before every traceback from now on
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what fails is raised too
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        process_group.destroy()
        log.setLevel(level)
        sys.excepthook = hook


@contextmanager
def _random_state() -> Iterator[None]:
    """Building a model may draw from the generators of the process."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
