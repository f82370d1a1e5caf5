"""Tensor parallel with sequence parallel, from a model's `tensor_plan`.

Parameters become DTensors, so that FSDP2, the gradient norm, optimizers and checkpoints know what each rank
has of them. The forwards compute on local tensors with collectives in the open
(`titancli.distributed.collectives`): that compiles block by block, which torch's own `parallelize_module`
with sequence parallel does not.

What runs between the blocks is cut along the sequence. A *region* is a module that has a "row" matrix: it
gathers the sequence when it is entered, works on its own heads or columns, and leaves with a sum over the
ranks, of which each keeps its part of the sequence. Source: Megatron-LM (arXiv 1909.08053, 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import embedding, linear, rms_norm

from titancli.distributed.collectives import Group, gather, reduce_scatter
from titancli.distributed.local import SEQUENCE, RowCut, call_with, local, slots
from titancli.errors import TitanError
from titancli.parallel.wrapped import wrap

PLACEMENT: dict[str, Placement] = {
    "column": Shard(0),
    "row": Shard(1),
    "vocab": Shard(0),
    "norm": Replicate(),
    "replicate": Replicate(),
}
WHOLE = "whole vocab"
"""In place of "vocab", where the ranks do not divide the vocabulary: each has all of it, and works on its
part of the sequence."""


def on_local_parameters(block: nn.Module, mesh: DeviceMesh) -> None:
    """Have a block's forward find its parameters local already.

    For compiled forwards: under activation checkpointing torch would save a DTensor's mesh among a graph's
    tensors, and fail. The forward must not be run again in backward outside of the compiled code.
    """
    wrap(block, "forward", partial(_with_local_parameters, block, mesh, block.forward))


def _with_local_parameters(
    block: nn.Module, mesh: DeviceMesh, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    def is_cut(parameter: Any) -> bool:  # experts lie on another mesh
        return isinstance(parameter, DTensor) and parameter.device_mesh == mesh

    return call_with(slots(block.modules(), is_cut), local, forward, *args, **kwargs)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a model on meta in place: its parameters by its plan, and its forwards to match.

    Raises:
        TitanError: a parameter has no style in the plan, or no even parts, or belongs to a module of a class
            that cannot be cut.
    """
    group = Group.of(mesh.get_group())
    styles = dict(_styles(model, group.size))
    distribute(model, mesh, styles)
    for path, module in model.named_modules():
        own = {
            name: styles[f"{path}.{name}" if path else name]
            for name, _ in module.named_parameters(recurse=False)
            if (f"{path}.{name}" if path else name) in styles
        }
        if own or getattr(module, "tensor_parallel", None) is not None:
            _prepare(path, module, own, group)
        if any(
            styles.get(f"{path}.{child}.weight" if path else f"{child}.weight") == "row"
            for child, _ in module.named_children()
        ):
            kind: Any = type(module)
            _make(path, module, _region_of(kind))._tensor_group = group


def _styles(model: nn.Module, ranks: int) -> Iterator[tuple[str, str]]:
    plan: Mapping[str, str] = model.tensor_plan  # type: ignore[assignment]
    added = dict(_added_styles(model, plan))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        style = added.get(name) or _planned(name, plan)
        if style is None:
            raise TitanError(
                f"the model's tensor_plan has no style for {name}",
                hint='add one; "replicate" keeps it whole on each rank',
            )
        if style not in (*PLACEMENT, "expert"):
            raise TitanError(
                f"the model's tensor_plan has {style!r} for {name}, which is not a style",
                hint=f"the styles are {', '.join(PLACEMENT)}, and expert",
            )
        if style == "vocab" and parameter.shape[0] % ranks:
            style = WHOLE
        if style != "expert":  # cut over another mesh
            yield name, style


def _planned(name: str, plan: Mapping[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def _added_styles(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the styles of parameters that a converter has added to modules; they follow from their weight's
    style."""
    for path, module in model.named_modules():
        if path and callable(own := getattr(module, "tensor_plan", None)):
            for name, style in own(_planned(f"{path}.weight", plan)).items():
                yield f"{path}.{name}", style


def distribute(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
    """Cut parameters on meta in place, by the style of each."""
    done: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full_name = f"{path}.{name}" if path else name
            style = styles.get(full_name)
            if style is None:
                continue
            if id(parameter) not in done:
                # A row matrix's bias is whole: it is added once, after the sum.
                place = (
                    Replicate()
                    if style == "row" and parameter.ndim == 1
                    else PLACEMENT.get(style, Replicate())
                )
                _refuse_uneven(full_name, parameter, place, mesh.size())
                cut = distribute_tensor(parameter.detach(), mesh, [place], src_data_rank=None)
                done[id(parameter)] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
            setattr(module, name, done[id(parameter)])


def _refuse_uneven(name: str, parameter: Tensor, place: Placement, ranks: int) -> None:
    """Forwards take parts to be equal: which rows of a vocabulary a rank has, they know from its number."""
    if isinstance(place, Shard) and parameter.shape[place.dim] % ranks:
        shape = list(parameter.shape)
        raise TitanError(
            f"{name} {shape} cannot be sharded into {ranks} equal parts along dimension {place.dim}",
            hint=f"use a mesh.tp that divides {shape[place.dim]}",
        )


def _prepare(path: str, module: Any, styles: Mapping[str, str], group: Group) -> None:
    """Give a module the forward that computes on its local parameters."""
    style = styles.get("weight")
    if getattr(module, "tensor_parallel", None) is not None:
        # The output, a converter's linear, a router, …: it knows best what its parts are worth.
        module.tensor_parallel(group, style)
    elif isinstance(module, nn.Embedding) and style in ("vocab", WHOLE):
        kind: Any = type(module)
        made = _make(path, module, _vocabulary_of(kind, style == "vocab"))
        made._tensor_group, made.token_cut = group, RowCut(group, head_tail=False)
    elif type(module) is nn.Linear:
        _make(path, module, _Linear)._adds_bias = group.rank == 0 or style != "row"
    elif type(module) is nn.RMSNorm:
        _make(path, module, _RMSNorm)
    elif not getattr(module, "takes_local_parameters", False):
        raise TitanError(
            f"{path or 'the model'} ({type(module).__name__}) has parameters in the tensor_plan, but is "
            f"not a Linear, RMSNorm or Embedding",
            hint="let it compute with titancli.distributed.local.local(parameter), and declare this "
            "with takes_local_parameters = True",
        )


def _make(path: str, module: Any, kind: type[nn.Module]) -> Any:
    """Give a module a class whose forward is for cut parameters.

    Not a forward to each module: torch.compile knows functions on modules by their identity, so that it would
    compile each block anew, and give up after eight.

    Raises:
        TitanError: the module has a forward that its class has not.
    """
    if "forward" in vars(module):
        raise TitanError(
            f"{path} ({type(module).__name__}) has its own forward, but tensor parallelism changes that "
            f"of its class",
            hint="define forward as a method of a class",
        )
    module.__class__ = kind
    return module


@cache
def _region_of(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (_Region, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _Region(nn.Module):
    """Enters with a part of the sequence, and leaves with a part of the sum.

    That part is the first argument, or `hidden_states`, and what comes out or the first of what does: so
    transformers' modules have it.
    """

    _tensor_group: Group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group = self._tensor_group
        part = args[0] if args else kwargs["hidden_states"]
        # Rows that were flattened to tokens [N, dim] are gathered as such.
        dim = min(SEQUENCE, part.ndim - 2)
        if args:
            args = (gather(part, dim, group), *args[1:])
        else:
            kwargs["hidden_states"] = gather(part, dim, group)
        out = super().forward(*args, **kwargs)
        if isinstance(out, tuple):
            return reduce_scatter(out[0], dim, group), *out[1:]
        return reduce_scatter(out, dim, group)


class _Linear(nn.Linear):
    _adds_bias: bool

    def forward(self, x: Tensor) -> Tensor:
        bias = local(self.bias) if self.bias is not None else None
        if bias is not None and not self._adds_bias:
            bias = bias * 0  # keeps its place in the graph: its gradient here is zero, not missing
        return linear(x, local(self.weight), bias)


class _RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, local(self.weight), self.eps)


class _Embedding(nn.Embedding):
    """Maps [B, S] to this rank's part of the sequence, [B, S / tp, dim]."""

    _tensor_group: Group
    token_cut: RowCut
    """How the sequence is split, for classes that do more (`_vocabulary_of`)."""

    def _refuse_odd(self, tokens: Tensor) -> None:
        length, ranks = tokens.shape[SEQUENCE], self._tensor_group.size
        if length % ranks:
            raise TitanError(
                f"rows of {length} tokens cannot be sharded over the {ranks} ranks of mesh.tp",
                hint=f"make their length a multiple of {ranks}",
            )


class _WholeEmbedding(_Embedding):
    """Each rank has all words."""

    def forward(self, tokens: Tensor) -> Tensor:
        self._refuse_odd(tokens)
        own = tokens.chunk(self._tensor_group.size, SEQUENCE)[self._tensor_group.rank]
        return embedding(own, local(self.weight), self.padding_idx)


class _VocabEmbedding(_Embedding):
    """Each rank has some of the words."""

    def forward(self, tokens: Tensor) -> Tensor:
        self._refuse_odd(tokens)
        weight = local(self.weight)
        ids = tokens - self._tensor_group.rank * weight.shape[0]
        mine = (ids >= 0) & (ids < weight.shape[0])
        found = embedding(ids.clamp(0, weight.shape[0] - 1), weight, self._padding_row(weight.shape[0]))
        return reduce_scatter(torch.where(mine[..., None], found, 0.0), SEQUENCE, self._tensor_group)

    def _padding_row(self, rows: int) -> int | None:
        """Return the index of this rank's row that gets no gradient; None if it is on another rank."""
        row = -1 if self.padding_idx is None else self.padding_idx - self._tensor_group.rank * rows
        return row if 0 <= row < rows else None


@cache
def _vocabulary_of(kind: Any, cut: bool) -> type[nn.Module]:
    """For a class of embedding that does more: its own forward, above the one for a part of the rows."""
    own = _VocabEmbedding if cut else _WholeEmbedding
    if kind is nn.Embedding:
        return own
    return type(kind.__name__, (kind, own), {"__module__": kind.__module__, "__doc__": kind.__doc__})
