"""Measure the memory and work of a model's parts on a rank: forward and backward on meta, one block of each
kind.

A part's memory follows from tensor lifetimes (`titancli.planning.trace`). A part's input counts as its own,
its output as the next part's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from titancli.distributed.device import meta_stands_for
from titancli.losses import chunk
from titancli.models.loss import loss_in, module_of
from titancli.planning.blueprint import Cut
from titancli.planning.kernels import Kernels
from titancli.planning.stand_in import rows_of
from titancli.planning.trace import Timeline, Trace
from titancli.recipe.schema import Recipe
from titancli.registry.component import build_offered

FRONT, BACK = "front", "back"
Part = int | str
"""A kind of block; `FRONT`, the modules before the blocks; `BACK`, the last norm, the output and the loss."""


@dataclass(frozen=True)
class Work:
    """Work of one operator on a rank."""

    flops: float
    moved: float
    """Bytes read and written."""
    sends: tuple[str, str, float] | None
    """A collective: its name, the mesh dimension, and the bytes of the whole (gathered) tensor."""
    bits: int = 16
    """See `titancli.planning.trace.Op`."""

    def times(self, share: float) -> Work:
        sends = None if self.sends is None else (*self.sends[:2], self.sends[2] * share)
        return Work(self.flops * share, self.moved * share, sends, self.bits)


@dataclass(frozen=True)
class Piece:
    """Memory and work of a part in one pass on one rank; memory in bytes."""

    forward: float
    """Peak in forward."""
    kept: float
    """Kept from forward to backward."""
    backward: float
    """Peak in backward, without gradients of parameters."""
    gradients_at_most: float
    """Gradients of parameters alive at that peak."""
    gradients: float
    """Gradients of all its parameters."""
    experts_done: tuple[float, float]
    """Memory at the moment when its experts' gradients are ready to be reduced: everything else, and
    gradients."""
    operators: tuple[Work, ...]
    """Operators of forward, then of backward."""
    turn: int
    """Number of operators of forward."""

    def times(self, share: float) -> Piece:
        """Return an approximation for this share of the tokens."""
        operators = tuple(work.times(share) for work in self.operators)
        there, gradients = self.experts_done
        return replace(
            self,
            forward=self.forward * share,
            kept=self.kept * share,
            backward=self.backward * share,
            experts_done=(there * share, gradients),
            operators=operators,
        )


@dataclass
class _Spans:
    """The ranges of operators that belong to each part, in execution order."""

    trace: Trace
    compiled: bool
    """Whether blocks are compiled."""
    found: list[tuple[Part, int, int]] = field(default_factory=list)
    _open: tuple[Part, int] | None = None

    def begin(self, part: Part) -> None:
        self.end()
        self._open = (part, len(self.trace.ops))
        self.trace.joining = self.compiled and not isinstance(part, str)

    def end(self) -> None:
        if self._open is not None and self._open[1] < len(self.trace.ops):
            self.found.append((*self._open, len(self.trace.ops)))
        self._open = None

    def of(self, part: Part) -> list[tuple[int, int]]:
        return [(begin, end) for whose, begin, end in self.found if whose == part]


class _Pass:
    """One forward and backward pass, with the part that each operator belongs to."""

    def __init__(self, cut: Cut, compiled: bool) -> None:
        self.cut = cut
        self.trace = Trace()
        self.forward, self.backward = _Spans(self.trace, compiled), _Spans(self.trace, compiled)
        self.turn = 0
        """Moment at which backward begins."""
        self.stream = 0.0
        """Bytes of the activations passed between blocks."""
        self.leaves: set[int] = set()
        """Storages of these activations."""
        self.experts_done: dict[Part, int] = {}
        """Moment at which the gradients of a block's experts are ready, by kind."""

    def run(self, recipe: Recipe, rows: int, device: str) -> float:
        """Run the pass and return the bytes of its rows."""
        model = self.cut.model
        loss: Any = loss_in(model)
        if loss is None:
            loss = build_offered(recipe.loss, model=recipe.model)
            if (module := module_of(loss)) is not None:
                module.to("meta")
        batch = rows_of(recipe, model.inputs, loss, rows, torch.device("meta"))
        inputs = {name: batch[name] for name in model.inputs if name in batch}
        blocks = device == "cuda" and inputs.pop("document_ids", None) is not None  # no mask of S x S
        if model_row_cut := getattr(model, "row_cut", None):
            inputs = model_row_cut.inputs(inputs, model.sequence_dim)
        self.trace.know([*model.parameters(), *model.buffers(), *batch.values(), *inputs.values()])
        with ExitStack() as stack:
            for kind, block in self.cut.blocks.items():
                self._follow(kind, block, stack)
            kernels = Kernels(device, blocks)
            for entered in (meta_stands_for(device), _as_written(self.trace), kernels, self.trace):
                stack.enter_context(entered)
            self.forward.begin(FRONT)
            result = model(**inputs, batch=batch, loss=loss)
            self.forward.end()
            self.turn = len(self.trace.ops)
            self.backward.begin(BACK)
            _backward(result.sum)
            self.backward.end()
        return float(sum(x.nbytes for x in batch.values()))

    def _follow(self, kind: int, block: nn.Module, stack: ExitStack) -> None:
        """Record when a block begins and ends, in forward and backward."""
        experts = [p for p in block.parameters() if id(p) in self._experts and p.requires_grad]
        left = set(map(id, experts))

        def entered(_: nn.Module, args: Any, kwargs: Any) -> Any:
            x = given = _stream(args, kwargs)
            if not x.requires_grad:  # nothing is trained before it, unlike before others of its kind
                x = given + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
                self.trace.sizes[self.trace.number(given)] = 0.0  # the copy replaces it
            before = FRONT if not self.leaves else BACK
            if (number := self.trace.number(x)) not in self.leaves:
                x.register_hook(lambda _: self.backward.begin(before))
            self.leaves.add(number)
            self.stream = float(x.nbytes)
            self.forward.begin(kind)
            return tree_map(lambda value: x if value is given else value, (args, kwargs))

        def left_by(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self.forward.begin(BACK)
            y = _stream((out,), {})
            self.leaves.add(self.trace.number(y))
            if y.requires_grad:
                y.register_hook(lambda _: self.backward.begin(kind))

        def done(parameter: Tensor) -> None:
            left.discard(id(parameter))
            if not left:
                self.experts_done[kind] = len(self.trace.ops)

        handles: list[Any] = [
            block.register_forward_pre_hook(entered, with_kwargs=True),
            block.register_forward_hook(left_by, with_kwargs=True),
            *(p.register_post_accumulate_grad_hook(done) for p in experts),
        ]
        for handle in handles:
            stack.callback(handle.remove)

    @property
    def _experts(self) -> set[int]:
        return {id(p) for module in self.cut.model.experts.values() for p in module.parameters()}


def _stream(args: Any, kwargs: Any) -> Tensor:
    """Return the hidden states: the first floating-point tensor among a block's inputs or outputs."""
    return next(x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point())


def _backward(total: Tensor) -> None:
    """Run `total.backward()` below torch's Python function, so that a TorchFunctionMode stays on for
    recomputation. The mode would be off while that function runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    given = (torch.ones_like(total),)
    engine.run_backward((total,), given, False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def _as_written(trace: Trace) -> Iterator[None]:
    """Run the loss's arithmetic uncompiled where it would be compiled, and mark its operators as compiled."""

    def joined(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            trace.joining = backend is not None
            try:
                return function(*args)
            finally:
                trace.joining = False

        return run

    compiled, chunk.compiled = chunk.compiled, joined  # type: ignore[assignment]
    try:
        yield
    finally:
        chunk.compiled = compiled


@dataclass(frozen=True)
class Measured:
    """Measurements of a model that is sharded for one rank."""

    pieces: dict[Part, Piece]
    stream: float
    """Bytes of the activations passed between blocks."""
    batch: float
    """Bytes of the rows."""

    def times(self, share: float) -> Measured:
        """Return an approximation for this share of the tokens, see `Piece.times`."""
        pieces = {part: piece.times(share) for part, piece in self.pieces.items()}
        return Measured(pieces, self.stream * share, self.batch * share)


def measure(cut: Cut, recipe: Recipe, rows: int, device: str, *, compiled: bool) -> Measured:
    """Run `rows` rows through a model that is sharded for one rank.

    Args:
        device: the device whose kernels run, "cpu" or "cuda".
        compiled: whether operators between own kernels are compiled.
    """
    fused = device == "cuda" and recipe.compile.loss(on_gpu=True)
    cut.model.output.loss_backend = recipe.compile.backend if fused else None
    one = _Pass(cut, compiled)
    batch = one.run(recipe, rows, device)
    gradients = {one.trace.number(p.grad) for p in cut.model.parameters() if p.grad is not None}
    for number in gradients:
        if one.trace.ops[one.trace.born[number]].func is torch.ops.aten.add.Tensor:
            # The sum of two gradients, as of a tied weight. Without a dispatch mode, autograd adds them in
            # place.
            one.trace.born[number] += 1
    timeline = one.trace.timeline()
    if compiled or fused:
        timeline = one.trace.compiled(one.turn, one.leaves | gradients)
    parts: list[Part] = [FRONT, *cut.blocks, BACK]
    found = {part: _piece(one, part, timeline, gradients) for part in parts}
    cut.model.zero_grad()
    return Measured(found, one.stream, batch)


def _piece(one: _Pass, part: Part, timeline: Timeline, gradients: set[int]) -> Piece:
    kept = most = 0.0
    forward, backward = one.forward.of(part), one.backward.of(part)
    for begin, end in forward:
        there = timeline.alive(begin)
        most = max(most, kept + timeline.most(begin, end)[0] - there)
        kept += timeline.alive(end) - there
    comes = 0.0 if part == FRONT else one.stream
    goes = 0.0 if part == BACK else one.stream
    kept += comes - goes
    worst = at_most = own = 0.0
    done = (0.0, 0.0)
    if backward:
        begin, end = backward[0]
        others = timeline.alive(begin) - kept - goes
        worst, at = timeline.most(begin, end)
        at_most = timeline.of(gradients & _born(timeline, begin, at + 1), at)
        worst -= others + at_most
        own = sum(timeline.sizes[n] for b, e in backward for n in gradients & _born(timeline, b, e))
        if (moment := one.experts_done.get(part)) is not None:
            there = timeline.of(gradients & _born(timeline, begin, moment), moment - 1)
            done = (timeline.alive(moment) - others - there, there)

    def operators(spans: list[tuple[int, int]]) -> tuple[Work, ...]:
        return tuple(
            Work(one.trace.ops[i].flops, timeline.moved[i], one.trace.ops[i].sends, one.trace.ops[i].bits)
            for begin, end in spans
            for i in range(begin, end)
        )

    return Piece(
        comes + most,
        kept,
        worst,
        at_most,
        own + (one.cut.tied if part == BACK else 0),
        done,
        operators(forward) + operators(backward),
        sum(end - begin for begin, end in forward),
    )


def _born(timeline: Timeline, begin: int, end: int) -> set[int]:
    return {number for number, born in enumerate(timeline.born) if begin <= born < end}
