"""What the parts of a model take on a rank, measured: a forward and a backward on meta, a block of each kind.

What a part takes is told from what lived when (`titancli.planning.trace`). A part's input counts as its own,
its output as the next one's.
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
from titancli.planning.blueprint import Cut
from titancli.planning.kernels import Kernels
from titancli.planning.stand_in import rows_of
from titancli.planning.trace import Timeline, Trace
from titancli.recipe.schema import Recipe
from titancli.registry.component import build

FRONT, BACK = "front", "back"
Part = int | str
"""A kind of block; `FRONT`, what comes before the blocks; `BACK`, the last norm, the output and the loss."""


@dataclass(frozen=True)
class Work:
    """One operator on a rank."""

    flops: float
    moved: float
    """Bytes read and written."""
    sends: tuple[str, str, float] | None
    """A collective: its name, the mesh dimension, and the bytes of the whole (gathered) tensor."""

    def times(self, share: float) -> Work:
        sends = None if self.sends is None else (*self.sends[:2], self.sends[2] * share)
        return Work(self.flops * share, self.moved * share, sends)


@dataclass(frozen=True)
class Piece:
    """What a part takes in one pass, in bytes of one rank."""

    forward: float
    """The most in forward."""
    kept: float
    """What stays from forward to backward."""
    backward: float
    """The most in backward, without gradients of parameters."""
    gradients_at_most: float
    """And those that are there then."""
    gradients: float
    """Those of all its parameters."""
    experts_done: tuple[float, float]
    """When its experts have their gradients, which are reduced then: what else is there, and gradients."""
    operators: tuple[Work, ...]
    """Of forward, and of backward."""

    def times(self, share: float) -> Piece:
        """What it would take about, if it had this share of the tokens."""
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
    """Which operators belong to which part, in the order in which they ran."""

    trace: Trace
    compiled: bool
    """Whether blocks are."""
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
    """One forward and backward, and which part each moment belongs to."""

    def __init__(self, cut: Cut, compiled: bool) -> None:
        self.cut = cut
        self.trace = Trace()
        self.forward, self.backward = _Spans(self.trace, compiled), _Spans(self.trace, compiled)
        self.turn = 0
        """The moment at which backward begins."""
        self.stream = 0.0
        """Bytes of what passes between blocks."""
        self.leaves: set[int] = set()
        """Storages of these."""
        self.experts_done: dict[Part, int] = {}
        """The moment at which the experts of a block have their gradients, by kind."""

    def run(self, recipe: Recipe, rows: int, device: str) -> float:
        """Return the bytes of the rows."""
        model, loss = self.cut.model, build(recipe.loss)
        batch = rows_of(recipe, model.inputs, loss, rows, torch.device("meta"), documents=device == "cpu")
        inputs = {name: batch[name] for name in model.inputs if name in batch}
        if model_row_cut := getattr(model, "row_cut", None):
            inputs = model_row_cut.inputs(inputs, model.sequence_dim)
        self.trace.know([*model.parameters(), *model.buffers(), *batch.values(), *inputs.values()])
        with ExitStack() as stack:
            for kind, block in self.cut.blocks.items():
                self._follow(kind, block, stack)
            for entered in (meta_stands_for(device), _as_written(self.trace), Kernels(device), self.trace):
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
        """Note when a block begins and ends, both ways."""
        experts = [p for p in block.parameters() if id(p) in self._experts and p.requires_grad]
        left = set(map(id, experts))

        def entered(_: nn.Module, args: Any, kwargs: Any) -> Any:
            x = given = _stream(args, kwargs)
            if not x.requires_grad:  # nothing before it is trained; before others of its kind something is
                x = given + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
                self.trace.sizes[self.trace.number(given)] = 0.0  # in whose place it is
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
    """Hidden states: the first numbers with a fraction among what a block is given, or returns."""
    return next(x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point())


def _backward(total: Tensor) -> None:
    """`total.backward()`, which itself would be a function that a TorchFunctionMode is asked for, and then is
    off until it is done; what runs again in backward needs it."""
    engine: Any = torch.autograd.Variable._execution_engine
    given = (torch.ones_like(total),)
    engine.run_backward((total,), given, False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def _as_written(trace: Trace) -> Iterator[None]:
    """Have the loss's arithmetic, where it would be compiled, run as it is written, and be told apart."""

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
    """Of a model, cut as for one rank."""

    pieces: dict[Part, Piece]
    stream: float
    """Bytes of what passes between blocks."""
    batch: float
    """Bytes of the rows."""

    def times(self, share: float) -> Measured:
        """See `Piece.times`."""
        pieces = {part: piece.times(share) for part, piece in self.pieces.items()}
        return Measured(pieces, self.stream * share, self.batch * share)


def measure(cut: Cut, recipe: Recipe, rows: int, device: str, *, compiled: bool) -> Measured:
    """Run `rows` rows through a cut model.

    Args:
        device: whose kernels run, "cpu" or "cuda".
        compiled: whether what is between them is compiled.
    """
    fused = device == "cuda" and recipe.compile.loss(on_gpu=True)
    cut.model.output.loss_backend = recipe.compile.backend if fused else None
    one = _Pass(cut, compiled)
    batch = one.run(recipe, rows, device)
    gradients = {one.trace.number(p.grad) for p in cut.model.parameters() if p.grad is not None}
    for number in gradients:
        if one.trace.ops[one.trace.born[number]].func is torch.ops.aten.add.Tensor:
            # The sum of two, as of a tied weight. Autograd adds in place where nobody watches.
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
            Work(one.trace.ops[i].flops, timeline.moved[i], one.trace.ops[i].sends)
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
    )


def _born(timeline: Timeline, begin: int, end: int) -> set[int]:
    return {number for number, born in enumerate(timeline.born) if begin <= born < end}
