"""CUDA graphs: what a pass does on the device, captured once and then replayed by a single launch.

What Python does happens only in the capture: every address stays, inputs are copied to where they were, and
what backward writes (`Slots`) is where it was written first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titancli.errors import RecipeError, TitanError
from titancli.models.blocks.moe import moe_layers
from titancli.parallel.wrapped import wrap

T = TypeVar("T")
PLAIN = (bool, int, float, str, FunctionType, MethodType)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Pool:
    """Captures work into graphs that share memory: they must be replayed in the order of their capture."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of earlier passes: no graph could use it
        self._handle, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Capture work that ran before; return what replays it, and its results, which a replay fills.

        Raises:
            RecipeError: it does what cannot be captured, such as to read a number to the host.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may allocate and wait: they prepare batches and save checkpoints.
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            try:
                made = work()
            except BaseException as error:
                with suppress(Exception):  # what was raised first says why
                    graph.capture_end()
                if isinstance(error, TitanError | torch.OutOfMemoryError) or not isinstance(error, Exception):
                    raise
                raise RecipeError(
                    f"compile.cuda_graphs: a pass of this model and loss cannot be captured "
                    f"({type(error).__name__}: {str(error).splitlines()[0]})",
                    hint='set compile.cuda_graphs = "none"',
                ) from error
            graph.capture_end()
        return graph.replay, made


class Slots:
    """Where backward leaves what it adds up: gradients of parameters, and tokens per expert. Each is None
    until a step has it."""

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[Any, str]] = [(p, "grad") for p in module.parameters() if p.requires_grad]
        self._places += [(layer, "counted") for layer in moe_layers(module).values()]
        self._own: set[int] = {0}

    def held(self) -> tuple[int, ...]:
        """Return the address of what is in each, or 0."""
        found = (getattr(owner, name) for owner, name in self._places)
        return tuple(0 if value is None else value.data_ptr() for value in found)

    def owns(self, held: tuple[int, ...]) -> bool:
        """Return whether nothing is there but what graphs have left."""
        return self._own.issuperset(held)

    def left(self) -> list[Tensor | None]:
        """Return what a capture has left there, which is to be there after each replay."""
        self._own.update(self.held())
        return [getattr(owner, name) for owner, name in self._places]

    def fill(self, values: Sequence[Tensor | None]) -> None:
        for (owner, name), value in zip(self._places, values, strict=True):
            setattr(owner, name, value)


class Watch:
    """What a graph of a model takes for granted."""

    def __init__(self, model: nn.Module) -> None:
        self._model, modules = model, [*model.modules()]
        self._hooks = [vars(module)[name] for module in modules for name in HOOKS]
        self._built = sum(map(len, self._hooks))
        self._facts = [
            (vars(module), name)
            for module in modules
            for name in ("forward", *(key for key, value in vars(module).items() if isinstance(value, PLAIN)))
        ]

    @cached_property
    def _tensors(self) -> list[Tensor]:
        # At the first step: parameters are allocated after this object is built, and then stay.
        return [*self._model.parameters(), *self._model.buffers()]

    def is_observed(self) -> bool:
        """Return whether hooks were added to modules or parameters, which a replay would not call."""
        if sum(map(len, self._hooks)) != self._built:
            return True
        return any(tensor._backward_hooks or tensor._post_accumulate_grad_hooks for tensor in self._tensors)

    def state(self) -> list[Any]:
        """Return addresses, and the plain attributes of modules, by which Python decides."""
        addresses = [(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors]
        return [*addresses, *(facts.get(name) for facts, name in self._facts)]


# ----------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True, eq=False)
class Noted:
    """Stands for a tensor of a pass that was recorded."""

    like: Tensor
    """On meta."""


class Graphs(NamedTuple):
    """The graphs of a block."""

    inputs: list[Any]
    """Its arguments, where forward reads them."""
    forward: Callable[[], None]
    out: Tensor
    backward: Callable[[], None]


class Blocks:
    """The blocks of a model, whose forward and backward are graphs of their own; all else is computed as
    usual.

    Gradients of hidden states come and leave in buffers that all blocks share.
    """

    def __init__(self, layers: nn.ModuleDict) -> None:
        for module in layers.values():
            wrap(module, "forward", partial(self._forward, module.forward))
        self.recorded: dict[Any, tuple[list[Any], tuple[str, ...], Noted]] | None = None
        """Arguments, the names of the last of them, and results of the pass that was recorded, by forward, in
        its order; tensors as what stands for them. None: there is none."""
        self._recording: dict[int, tuple[Tensor, Noted]] | None = None
        """What stands for tensors, by `id`, while a pass is recorded."""
        self._replayed: dict[Any, Graphs] | None = None
        """Graphs by forward, while they are replayed."""
        self._ticket = torch.zeros((), requires_grad=True)
        """Has autograd call a block's backward where no input needs a gradient."""
        self._buffers: dict[Any, Tensor] = {}

    def _forward(self, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        given = [*args, *named.values()]
        if self._replayed is not None:
            return _Replayed.apply(self._ticket, self, self._replayed[forward], *given)
        out = forward(*args, **named)
        if self._recording is not None and self.recorded is not None:
            strange = [one for one in given if not isinstance(one, (Tensor, *PLAIN, type(None)))]
            if strange := strange + [out] * (not isinstance(out, Tensor) or forward in self.recorded):
                raise RecipeError(
                    f'compile.cuda_graphs = "blocks": a {type(strange[0]).__name__} goes into or comes out '
                    "of blocks, and their graphs have tensors alone, once in a pass",
                    hint='set compile.cuda_graphs = "step" or "none"',
                )
            self.recorded[forward] = ([*map(self._noted, given)], tuple(named), self._noted(out))
        return out

    def _noted(self, one: Any) -> Any:
        if not isinstance(one, Tensor) or self._recording is None:
            return one
        like = torch.empty_like(one, device="meta").requires_grad_(one.requires_grad)
        return self._recording.setdefault(id(one), (one, Noted(like)))[1]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the pass in the block."""
        self.recorded, self._recording = {}, {}
        try:
            yield
        finally:
            self._recording = None  # with the tensors: backward would wait for the stream of their graph

    def capture(self, pool: Pool) -> Callable[..., T]:
        """Capture the pass that was recorded, in its order; return what computes a micro-batch with graphs,
        given the batch and what computes it without them."""
        places: dict[Noted, Tensor] = {}
        graphs: dict[Any, Graphs] = {}
        made: list[tuple[Any, list[Any], Callable[[], None], Tensor]] = []
        for forward, (given, names, result) in (self.recorded or {}).items():
            inputs = [_placed(one, places) if isinstance(one, Noted) else one for one in given]
            count = len(inputs) - len(names)
            named = dict(zip(names, inputs[count:], strict=True))
            replay, out = pool.capture(partial(forward, *inputs[:count], **named))
            places[result] = out.detach()
            made.append((forward, inputs, replay, out))
        while made:
            forward, inputs, replay, out = made.pop()
            graphs[forward] = Graphs(inputs, replay, out.detach(), self._capture_backward(pool, inputs, out))

        def run(batch: Any, usual: Callable[[], T], add_gradients: Any) -> T:
            self._replayed = graphs
            try:
                return usual()
            finally:
                self._replayed = None

        return run

    def _capture_backward(self, pool: Pool, inputs: list[Any], out: Tensor) -> Callable[[], None]:
        arriving, buffers = self.buffer(out, 0), self.leaving(inputs)

        def backward() -> None:
            torch.autograd.backward(out, arriving)
            for one, buffer in zip(inputs, buffers, strict=True):
                if buffer is not None:
                    buffer.zero_() if one.grad is None else buffer.copy_(one.grad)
                    one.grad = None

        return pool.capture(backward)[0]

    def leaving(self, inputs: list[Any]) -> list[Tensor | None]:
        """Return the buffers of the gradients of a block's arguments."""
        wanted = [isinstance(one, Tensor) and one.requires_grad for one in inputs]
        return [self.buffer(one, sum(wanted[:n])) if wanted[n] else None for n, one in enumerate(inputs)]

    def buffer(self, like: Tensor, place: int) -> Tensor:
        """Return the buffer of gradients of this shape."""
        key = (place, like.shape, like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like).detach()
        return self._buffers[key]


def _placed(one: Noted, places: dict[Noted, Tensor]) -> Tensor:
    """Return where graphs read a tensor."""
    if one not in places:
        places[one] = torch.zeros_like(one.like, device="cuda").detach()
    return places[one].detach().requires_grad_(one.like.requires_grad)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, blocks: Blocks, graphs: Graphs, *given: Any) -> Tensor:
        for at, one in zip(graphs.inputs, given, strict=True):
            if isinstance(one, Tensor) and at.data_ptr() != one.data_ptr():
                at.detach().copy_(one)
        graphs.forward()
        ctx.blocks, ctx.graphs = blocks, graphs
        return graphs.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.blocks.buffer(ctx.graphs.out, 0).copy_(gradient)
        ctx.graphs.backward()
        leaving = ctx.blocks.leaving(ctx.graphs.inputs)
        return None, None, None, *(None if one is None else one.clone() for one in leaving)
