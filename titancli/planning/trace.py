"""Trace a step on tensors without memory (meta): what each operator reads, writes, computes and sends, and
the lifetime of each storage.

Two views of a trace: operator by operator as it ran (`Trace.timeline`), and as compiled code would run it
(`Trace.compiled`). There, all operators between two that have kernels of their own are fused: intermediates
never reach memory, and those that backward needs are recomputed from the inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from titancli.models.blocks.declared import IMPLEMENTATIONS
from titancli.planning.meter import plain_tensors, taken_inside
from titancli.planning.traffic import FREE, KINDS, moved_by

_aten = torch.ops.aten
OWN_KERNELS = (
    *(*KINDS["products"], *KINDS["attention"], "convolution", "embedding", "index_put"),
    *("scatter", "sort", "topk", "cumsum"),
)
"""Parts of the names of aten operators that a compiler does not fuse with others."""


@dataclass(slots=True)
class Op:
    """One call of an operator."""

    func: Any
    reads: list[int]
    """Storages, by index."""
    writes: list[int]
    flops: float
    moved: float
    """Bytes read and written."""
    inside: int
    """Bytes of temporaries while it runs, without its results."""
    sends: tuple[str, str, float] | None
    """A collective: its name, its group's name, and the bytes of the whole (gathered) tensor."""
    own_kernel: bool
    """Whether a compiler would leave it unfused."""
    bits: int = 16
    """Of a product, the bits of its narrowest operands' numbers, at most 16."""


@dataclass
class Timeline:
    """Lifetimes of storages: operator i runs between the moments i and i + 1."""

    sizes: list[float]
    """The size of each storage."""
    born: list[int]
    died: list[int]
    moved: list[float]
    """Bytes that each operator moves."""
    inside: list[int]
    _during: list[float] = field(default_factory=list)
    _made: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        steps, self._made = [0.0] * (len(self.moved) + 2), [0.0] * (len(self.moved) + 2)
        for size, born, died in zip(self.sizes, self.born, self.died, strict=True):
            steps[born] += size
            self._made[born] += size
            steps[died] -= size
        self._during = list(accumulate(steps))

    def alive(self, moment: int) -> float:
        """Return the bytes alive between two operators."""
        return self._during[moment] - self._made[moment]

    def most(self, begin: int, end: int) -> tuple[float, int]:
        """Return the peak bytes while any of these operators runs, and the operator with that peak."""
        if begin == end:
            return self.alive(begin), begin
        at = max(range(begin, end), key=lambda i: self._during[i] + self.inside[i])
        return self._during[at] + self.inside[at], at

    def of(self, storages: Iterable[int], moment: int) -> float:
        """Return the bytes of these storages while an operator runs."""
        return sum(self.sizes[s] for s in storages if self.born[s] <= moment < self.died[s])


class Trace(TorchDispatchMode):
    """A mode that records the operators called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.sizes: list[float] = []
        self.born: list[int] = []
        self.died: list[int | None] = []
        self._numbers: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.joining = False
        """Whether the current operators belong to compiled code."""

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Register the storages of tensors made before, whose memory is counted elsewhere."""
        for tensor in (one for given in tensors for one in (given, *plain_tensors(given))):
            self.number(tensor, 0.0)

    def number(self, tensor: Tensor, size: float | None = None) -> int:
        """Return the index of a tensor's storage."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._numbers:
            here = self._numbers[key] = len(self.sizes)
            self.sizes.append(float(storage.nbytes()) if size is None else size)
            self.born.append(len(self.ops))
            self.died.append(None)

            def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
                self._numbers.pop(key)
                self._watched.pop(key)
                self.died[here] = len(self.ops)

            self._watched[key] = weakref.ref(storage, gone)
        return self._numbers[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].dtype.is_floating_point else 1
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        reads, writes = ([*map(self.number, plain_tensors(x))] for x in ((args, kwargs), out))
        self.ops.append(
            Op(
                func,
                reads,
                writes,
                _flops(func, args, kwargs, out),
                0.0 if func in FREE else moved_by(func, args, kwargs, out),
                taken_inside(func, args) if func in IMPLEMENTATIONS else 0,
                _sent(func, args, kwargs, out),
                not self.joining or _own_kernel(func),
                _bits(args),
            )
        )
        return out

    # ------------------------------------------------------------------------------------------ views

    def timeline(self) -> Timeline:
        """Return the lifetimes as the operators ran."""
        died = [len(self.ops) + 1 if at is None else at for at in self.died]
        return Timeline(
            self.sizes, self.born, died, [op.moved for op in self.ops], [op.inside for op in self.ops]
        )

    def compiled(self, backward: int, kept: Iterable[int]) -> Timeline:
        """Return the lifetimes as compiled code would have them.

        Args:
            backward: the moment at which backward begins.
            kept: storages that enter or leave the compiled code.
        """
        lies = [False] * len(self.sizes)  # whether it reaches memory
        used = [0] * len(self.sizes)  # moment of the last use
        for number in kept:
            lies[number] = True
        for at, op in enumerate(self.ops):
            for number in (*op.reads, *op.writes):
                used[number] = at + 1
                lies[number] |= op.own_kernel
        timeline = self.timeline()
        died = [
            last if born < backward < at and last <= backward else at
            for born, at, last in zip(timeline.born, timeline.died, used, strict=True)
        ]  # drop what activation checkpointing keeps without a use in backward
        for number in kept:
            died[number] = timeline.died[number]
        self._from_anchors(lies, died, backward)
        moved = [
            op.moved
            if op.own_kernel
            else min(op.moved, sum(self.sizes[n] for n in {*op.reads, *op.writes} if lies[n]))
            for op in self.ops
        ]
        sizes = [size if there else 0.0 for size, there in zip(self.sizes, lies, strict=True)]
        return Timeline(sizes, timeline.born, died, moved, timeline.inside)

    def _from_anchors(self, lies: list[bool], died: list[int], backward: int) -> None:
        """Extend the lifetimes of sources: whatever backward needs that never reached memory is recomputed
        from them."""
        sources: dict[int, set[int]] = {}
        for at, op in enumerate(self.ops):
            for number in op.writes:
                if lies[number] or number in sources:
                    continue
                sources[number] = {
                    source
                    for read in op.reads
                    for source in ({read} if lies[read] else sources.get(read, {read}))
                }
            if at + 1 == backward:
                break
        for number, anchors in sources.items():
            if died[number] > backward:
                for anchor in anchors:
                    lies[anchor] = True
                    died[anchor] = max(died[anchor], died[number])


def _bits(args: Any) -> int:
    dtypes = {one.dtype for x in args if isinstance(x, Tensor) for one in (x, *plain_tensors(x))}
    if torch.float4_e2m1fn_x2 in dtypes:
        return 4
    return 8 if any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes) else 16


def _own_kernel(func: Any) -> bool:
    if func.namespace != "aten":
        return True
    name = func.overloadpacket.__name__.strip("_")
    return any(part in name if len(part) > 3 else part == name for part in OWN_KERNELS)


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of an operator by torch's formula; of causal attention only those of the pairs
    of query and key that are seen."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0.0
    given = _named(func, args, kwargs) if "attention" in func.overloadpacket.__name__ else {}
    if "key" not in given:
        return float(formula(*args, **kwargs, out_val=out) * _share_seen(given))
    # torch 2.11 counts only as many heads of keys as of queries
    shared = {
        name: given[name][:, :1].expand(-1, given["query"].shape[1], -1, -1) for name in ("key", "value")
    }
    return float(formula(*(given | shared).values(), out_val=out) * _share_seen(given))


def _share_seen(given: dict[str, Any]) -> float:
    """Return the fraction computed of the query-key pairs that torch counts for an attention's arguments:
    about half of the square if it is causal."""
    if not (given.get("is_causal") or given.get("causal")):
        return 1.0
    ours = "q" in given
    q, k = (given["q"], given["k"]) if ours else (given["query"], given["key"])
    length, keys = q.shape[1 if ours else 2], k.shape[1 if ours else 2]
    wide = min(keys, given.get("window") or keys)
    return seen(length, keys, wide) / (length * wide)


def seen(length: int, keys: int, window: int) -> float:
    """Return the number of query-key pairs if the queries are the last of the keys and each sees at most
    `window`."""
    ahead = keys - length
    few = max(0, min(length, window - ahead - 1))
    return length * window - few * (window - ahead) + few * (few + 1) / 2


def _sent(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[str, str, float] | None:
    name = func.overloadpacket.__name__
    if func.namespace == "titancli" and name.startswith("ring_"):
        given = _named(func, args, kwargs)
        times = 1 if name == "ring_forward" else 2  # backward also passes the gradients of keys and values
        return "send/recv", given["name"], times * given["size"] * 2 * _bytes(given["k"])
    if func.namespace != "_c10d_functional" or name == "wait_tensor":
        return None
    given = _named(func, args, kwargs)
    whole = max(_bytes(args[0]), _bytes(out))
    if "all_to_all" in name:
        return "all-to-all", given["group_name"], whole
    if name.startswith("all_reduce"):
        return "all-reduce", given["group_name"], 2 * whole
    return "all-gather / reduce-scatter", given["group_name"], whole


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())
