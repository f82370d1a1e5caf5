"""A dry run: one step of any rank of any number of ranks, in this process, without memory or a device.

The engine is built as for a run, on a process group whose collectives do nothing. The model is sharded on
meta first; then its parts, and everything computed from them, are fake tensors, which have shapes but no
values. (In the other order tensor parallel fails.) So shapes, dtypes, shards and all components of a step are
those of the run."""

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
from titancli.planning.meter import Meter
from titancli.planning.stand_in import on_a_cpu, rows_of
from titancli.planning.step_errors import blamed
from titancli.planning.traffic import Traffic
from titancli.protocols.batch import Batch

if TYPE_CHECKING:
    from titancli.layout.degrees import Degrees
    from titancli.recipe.schema import Recipe

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankCheck:
    """The memory of a step on one rank: bytes of its own parts, as the step allocates them."""

    rank: int
    place: dict[str, int]
    """The coordinate of the rank along each degree of the mesh."""
    parameters: int
    """The number of parameters in this rank's parts."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    """Peak of live bytes, with CPU kernels and without compilation."""
    seconds: float


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run."""

    world: int
    ranks: list[RankCheck]
    left_out: list[str]
    """Settings of the recipe that the dry run ignores, in words."""


def dry_run(recipe: Recipe, world: int, ranks: Sequence[int] | None = None) -> DryRun:
    """Dry-run a step of each of these ranks, one after the other; None: the first rank of every pipeline
    stage.

    Nothing is compiled, no weights are loaded and no data is read. At most two micro-batches are run, or all
    with a pipeline. Values read from tensors are 1, and tokens go to experts in turn.

    Raises:
        UsageError: a rank does not exist.
        TitanError: the run would fail, or something cannot be computed on fake tensors; names the rank.
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
    """Return the traffic and waits of rank 0 in a step, by verb: `forward_backward` and `optim_step`.

    The step is that of `dry_run`: nothing compiled, and at most two micro-batches.

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
    """Return the first rank of each pipeline stage; the other ranks of a stage do the same."""
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
    """Return the number of parameters; the bytes of parameters, gradients and optimizer state; and the peak.

    Args:
        traffic: receives the traffic of each verb, if given.
    """
    with ExitStack() as stack:
        meter = Meter()

        def fill(parts: list[Any]) -> None:
            # From here to the end of the step all tensors are fake; the sharded model is on meta.
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(meter)
            for part in parts:
                allocate(part, CPU)
                for experts in moe_layers(part).values():
                    experts.force_load_balance()

        engine = build_engine(Engine, recipe, device=CPU, frozen=False, fill=fill)
        if isinstance(engine.runner, PipelinedModel):
            # The last stage broadcasts nothing here; these are the metrics that every loss has.
            engine.runner.tell = lambda value: value or ["loss", "weight"]  # type: ignore[method-assign]
        if engine.optimizer is not None:
            initialise_state(engine.optimizer)  # the peak is that of later steps
        parameters = [parameter for _, parameter in engine.named_parameters()]
        batches = _batches(engine, recipe)
        with _counted(engine, "forward_backward", traffic):
            engine.forward_backward(batches)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        counted = (sum(local(p).numel() for p in parameters), _bytes(parameters), _bytes(gradients))
        if engine.guard is not None:
            engine.guard.too_many()  # as a loop calls before each step, which then reads nothing
        with _counted(engine, "optim_step", traffic):
            engine.optim_step()
        states = engine.optimizer.state.values() if engine.optimizer else ()
        kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return *counted, _bytes(kept), meter.peak


@contextmanager
def _counted(engine: Engine, verb: str, traffic: dict[str, Traffic] | None) -> Iterator[None]:
    """Count the traffic of a verb in the block, if `traffic` is given."""
    if traffic is None:
        yield
        return
    groups = engine.optimizer.param_groups if engine.optimizer else []
    # torch keeps step counts on the host, except for fused kernels; titan's are on the device.
    on_host = [g for g in groups if "fused" in g and not g["fused"]]
    states = [engine.optimizer.state[p] for g in on_host for p in g["params"]]  # type: ignore[union-attr]
    with Traffic({id(state["step"]) for state in states if "step" in state}) as traffic[verb]:
        yield


def _batches(engine: Engine, recipe: Recipe) -> list[Batch]:
    """Return batches of the recipe's sizes. Memory is constant from the second micro-batch on.

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
    """Create a process group whose collectives return at once and change nothing."""
    hook = sys.excepthook  # torch prefixes tracebacks with the rank from now on
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # errors are raised as well
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        process_group.destroy()
        log.setLevel(level)
        sys.excepthook = hook


@contextmanager
def _random_state() -> Iterator[None]:
    """Restore the process's generators, which building a model may draw from."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
