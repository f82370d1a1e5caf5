"""Steps computed twice, to find a device that computes wrong numbers: the callback `recheck`.

Each rank takes checksums of local values in the order of computation: inputs and outputs of modules, their
gradients, and the gradients of parameters before they are reduced over ranks; reduction spreads a wrong
number to all ranks. The rank with the earliest difference computed it; ranks that received it differ first at
a received value.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from titancli import TitanError, phase
from titancli.distributed.together import Ranks, name_ranks
from titancli.errors import RecipeError
from titancli.observe.metrics import collector
from titancli.parallel.wrapped import is_wrapped

if TYPE_CHECKING:
    from titan_proof import Recheck as Config
    from titancli import Engine
    from titancli.engine.step import Backward

SAME, COMPUTED, RECEIVED, REDUCED = range(4)
"""Kinds of the first difference between the two passes of a rank."""


class Record(NamedTuple):
    """A checksum of a value on a rank."""

    name: str
    received: bool
    """Whether the value came from another pipeline stage."""
    checksum: Tensor


class Finding(NamedTuple):
    """The first difference between the two passes of a rank."""

    kind: int
    place: int
    """The index in the list of records."""
    name: str


class Rechecks:
    """Computes every `every`th step twice."""

    def __init__(self, config: Config, *, engine: Engine, run: Any = None) -> None:
        """
        Raises:
            RecipeError: the device would not reproduce its numbers.
        """
        refuse_unreproducible(engine.device, deterministic=engine.recipe.debug.deterministic)
        self._every, self._engine = config.every, engine

    def around_backward(self, backward: Backward) -> AbstractContextManager[None] | None:
        due = backward.is_first and backward.step.number % self._every == 0
        return self._twice(backward) if due else None

    @contextmanager
    def _twice(self, backward: Backward) -> Iterator[None]:
        engine = self._engine
        recheck = Passes(engine.parts, engine.placement, compiled=engine.recipe.compile.enable)
        with phase("recheck"), recheck.rehearsed():
            backward.compute()
        backward.forget()
        with recheck.recorded():
            yield
        with phase("recheck"):
            recheck.compare(engine.ranks.on_the_cpu, backward.step.number, engine.device)


class Passes:
    """Two passes over the same batches, from the same weights, generators and buffers."""

    def __init__(self, parts: Sequence[Any], placement: Any, *, compiled: bool) -> None:
        """
        Args:
            placement: of pipeline stages; None without a pipeline.
            compiled: whether blocks are compiled.
        """
        self._parts, self._placement, self._compiled = parts, placement, compiled
        self._passes: list[list[Record]] = []
        self._reduced: list[dict[str, Tensor]] = []

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Run the first pass in the block; afterwards everything but gradients is restored."""
        with ExitStack() as stack:
            stack.enter_context(collector.muted())
            buffers = [(b, b.detach().clone()) for part in self._parts for b in part.buffers()]
            with self.recorded():
                yield
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Take checksums of the values computed in the block."""
        records: list[Record] = []
        with ExitStack() as stack:
            for number, part in zip(self._numbers(), self._parts, strict=True):
                self._watch(part, number, records, stack)
            yield
        self._passes.append(records)
        named = (named for part in self._parts for named in part.named_parameters())
        self._reduced.append({name: checksum(p.grad) for name, p in named if p.grad is not None})

    def _numbers(self) -> Sequence[int]:
        return (0,) if self._placement is None else self._placement.mine

    def _watch(self, part: nn.Module, number: int, records: list[Record], stack: ExitStack) -> None:
        last = 0 if self._placement is None else len(self._placement) - 1
        seen: set[int] = set()
        for path, module in part.named_modules():
            # Hooks of a module whose forward is compiled, or that has FSDP2 hooks, run outside compiled code;
            # others would be compiled as well.
            own = not self._compiled and next(module.parameters(recurse=False), None) is not None
            outside = isinstance(module, FSDPModule) or is_wrapped(module)
            if path and not own and not outside:
                continue
            sent = (not path and number > 0, not path and number < last)
            watcher = _Watcher(path or "the model", sent, records, seen, stack)
            stack.enter_context(_removed(module.register_forward_pre_hook(watcher.before, with_kwargs=True)))
            stack.enter_context(_removed(module.register_forward_hook(watcher.after)))

    def finding(self) -> Finding:
        """Return the first difference between this rank's two passes."""
        first, second = self._passes
        equal = _equal([r.checksum for r in first], [r.checksum for r in second])
        for place, (record, same) in enumerate(zip(first, equal, strict=False)):
            if not same or record.name != second[place].name:
                return Finding(RECEIVED if record.received else COMPUTED, place, record.name)
        if len(first) != len(second):
            return Finding(COMPUTED, min(len(first), len(second)), "the number of modules that ran")
        one, other = self._reduced
        for name, same in zip(one, _equal(list(one.values()), list(other.values())), strict=False):
            if not same:
                return Finding(REDUCED, 0, f"the reduced gradient of {name}")
        return Finding(SAME, 0, "")

    def compare(self, ranks: Ranks, step: int, device: torch.device) -> None:
        """Compare the two passes on every rank. Collective.

        Raises:
            TitanError: the passes of some rank differ; raised on all ranks.
        """
        mine = self.finding()
        stage = 0 if self._placement is None else self._placement.rank
        table = ranks.numbers([mine.kind, mine.place, stage])
        if all(kind == SAME for kind, _, _ in table):
            return
        own = (mine.name, f"host {socket.gethostname()}, device {device}")
        findings = ranks.gather(own)
        raise _error(step, suspects(table), table, findings)


class _Watcher:
    """The hooks of one module."""

    def __init__(
        self,
        name: str,
        sent: tuple[bool, bool],
        records: list[Record],
        seen: set[int],
        stack: ExitStack,
    ) -> None:
        self._name, self._records, self._seen, self._stack = name, records, seen, stack
        self._input_is_received, self._gradient_is_received = sent

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._add(f"the input of {self._name}", (args, kwargs), received=self._input_is_received)
        for name, parameter in module.named_parameters():  # FSDP2 has gathered them by now
            if id(parameter) not in self._seen and parameter.requires_grad and parameter.is_leaf:
                self._seen.add(id(parameter))
                full = f"{self._name}.{name}" if self._name != "the model" else name
                self._stack.enter_context(
                    _removed(parameter.register_post_accumulate_grad_hook(self._parameter_hook(full)))
                )

    def _parameter_hook(self, name: str) -> Any:
        return lambda parameter: self._add(f"the gradient of {name}", parameter.grad)

    def after(self, module: nn.Module, args: Any, out: Any) -> None:
        self._add(f"the output of {self._name}", out)
        what, received = f"the gradient of the output of {self._name}", self._gradient_is_received
        for tensor in _tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._add(what, gradient, received=received))

    def _add(self, what: str, values: Any, *, received: bool = False) -> None:
        for tensor in _tensors(values):
            self._records.append(Record(what, received, checksum(tensor)))


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _tensors(values: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(values) if hasattr(values, "unit") else values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() > 0]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits, int64, on its device: any single flipped bit changes it."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if local.is_complex():
        local = torch.view_as_real(local)
    if not local.numel():  # an empty shard: fewer rows than ranks
        return torch.zeros((), dtype=torch.int64, device=local.device)
    bits = local.contiguous().view(_INTEGERS[local.element_size()])
    rows = bits.reshape(-1, bits.shape[-1] if bits.ndim else 1).sum(1, dtype=torch.int64)
    odd = torch.arange(1, 2 * len(rows), 2, device=rows.device)
    return (rows * odd).sum()


def _equal(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    """Return which numbers of two lists are equal, up to the shorter length, in one read to the host."""
    count = min(len(one), len(other))
    if not count:
        return []
    home = one[0].device  # offloaded tensors are on the CPU
    first, second = (torch.stack([number.to(home) for number in side[:count]]) for side in (one, other))
    equal: list[bool] = (first == second).tolist()
    return equal


def suspects(table: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks that probably computed wrong numbers: those with the earliest difference.

    Args:
        table: the kind of difference, the index of the record and the pipeline rank, for each rank.
    """
    kinds = {kind for kind, _, _ in table}
    kind = next(kind for kind in (COMPUTED, RECEIVED, REDUCED) if kind in kinds)
    # Records of different stages have no common order.
    first = {
        stage: min(p for k, p, s in table if (k, s) == (kind, stage)) for k, _, stage in table if k == kind
    }
    return [rank for rank, (k, place, stage) in enumerate(table) if k == kind and place == first[stage]]


def _error(
    step: int, ranks: list[int], table: Sequence[Sequence[int]], findings: Sequence[tuple[str, str]]
) -> TitanError:
    name, where = findings[ranks[0]]
    kind = table[ranks[0]][0]
    places = "; ".join(f"rank {rank}: {findings[rank][1]}" for rank in ranks) if len(ranks) > 1 else where
    verb = {COMPUTED: "computed", RECEIVED: "received", REDUCED: "reduced"}[kind]
    return TitanError(
        f"step {step} was computed twice from the same state, and {name_ranks(ranks)} ({places}) {verb} "
        f"different numbers; the first that differs is {name}",
        hint="the step was not applied: test the device or exclude its host, and resume the run from its "
        "last checkpoint. If other devices show the same, a plugin's code is not deterministic, or draws "
        "random numbers from a generator of its own",
    )


def refuse_unreproducible(device: torch.device, *, deterministic: bool) -> None:
    """Check that the device computes deterministically.

    Raises:
        RecipeError: the device would not reproduce its numbers.
    """
    if device.type != "cpu" and not deterministic:
        raise RecipeError(
            f"the callback recheck needs debug.deterministic = true on a {device.type} device, on which two "
            "computations of the same step differ without it",
            hint="add debug.deterministic=true, or remove the callback",
        )
