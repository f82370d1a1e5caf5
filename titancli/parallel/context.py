"""Context parallel: the ranks of a group have parts of the same rows, and attention still sees all of them.

Everything but attention works on single tokens and does not notice. Two ways to cut a row:

- head-tail, for "allgather" and "ring": a row is 2 · cp pieces, and rank r has pieces r and 2 · cp - 1 - r,
  so that causal attention is the same work for all;
- contiguous, for "ulysses": the exchange gives each rank whole rows, where the work is even already.

Sources: keys and values gathered, Llama 3 (arXiv 2407.21783, section 3.3.2); heads exchanged for sequence,
DeepSpeed Ulysses (arXiv 2309.14509); the ring is in `titancli.parallel.ring`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titancli.distributed.collectives import Group, all_to_all
from titancli.distributed.local import RowCut
from titancli.distributed.mesh import Mesh
from titancli.errors import RecipeError, TitanError
from titancli.models.blocks.attention import Attention
from titancli.models.blocks.attention_window import WHOLE, Reach
from titancli.models.blocks.latent import LatentAttention
from titancli.parallel.ring import ring_attention, runs_here

SEQUENCE = 1
"""The sequence's dimension in [B, S, heads, head_dim]."""
TAKE_LAST = (Attention.core_attention, LatentAttention.core_attention)
"""Methods that know of queries that are the last of the keys; others are given a mask."""

Core = Callable[..., Tensor]
"""A module's own `core_attention`, of whole rows."""
OverRows = Callable[..., Tensor]
"""Attention of this rank's part of rows: q, k, v, mask and, where there are any, `sinks`."""


def context_parallel(model: Any, mesh: Mesh, how: str, *, device: torch.device, dtype: torch.dtype) -> None:
    """Have a model compute on this rank's part of its rows; in place.

    The plan sets `model.row_cut`, by which the engine cuts inputs, and that of each module that declares one
    (the output joins outputs by it). Attention is found by its method `core_attention(q, k, v, mask,
    causal)`, and modules that go through rows in order by `core_recurrence(per_head, mask, heads)`.

    Args:
        how: "allgather", "ulysses" or "ring".
        dtype: what attention computes in.

    Raises:
        RecipeError: the ring has no kernel here.
        TitanError: no module has such a method, or has heads that cannot be exchanged.
    """
    if mesh.cp_group is None:
        return
    if how == "ring" and not runs_here(device, dtype):
        raise RecipeError(
            f'parallelize.context_parallel = "ring" has no kernel for {dtype} on {device.type}',
            hint='use "allgather", or set training.mixed_precision_param = "bfloat16"',
        )
    row_cut = RowCut(Group.of(mesh.cp_group), head_tail=how != "ulysses")
    found = [module for module in model.modules() if getattr(module, "core_attention", None)]
    in_order = [m for m in model.modules() if getattr(m, "core_recurrence", None)]
    if not (found or in_order) and len(model.layers):  # a pipeline stage may have no block
        raise TitanError(
            f"mesh.cp = {row_cut.group.size}: no module of the model has a method `core_attention`",
            hint="see docs/plugins.md on what a model declares as splittable",
        )
    _replace(found, how, row_cut)
    for module in in_order:
        module.core_recurrence = partial(_over_heads, module.core_recurrence, row_cut)
    model.row_cut = row_cut
    for module in model.modules():  # under a pipeline the last stage alone has an output
        if module is model.output or hasattr(module, "row_cut"):
            module.row_cut = row_cut


def _replace(modules: Iterable[nn.Module], how: str, row_cut: RowCut) -> None:
    for module in modules:
        core: Core = module.core_attention  # type: ignore[assignment]
        plain = getattr(module, "is_plain_softmax", False)
        if how == "ring" and not plain:
            raise TitanError(
                f"the ring computes attention itself, and {type(module).__name__} does not declare that "
                f"its own is plain softmax attention (is_plain_softmax = True)",
                hint='set parallelize.context_parallel = "allgather"',
            )
        if how == "ring":
            over_rows = partial(_ring, row_cut.group)
        elif how == "ulysses":
            over_rows = partial(_ulysses, core, row_cut.group)
        else:
            reach = getattr(module, "reach", None) or WHOLE
            # Whether it takes queries that are the last of the keys without a mask. Chunks are counted from
            # where a row begins.
            last = reach.chunk is None and getattr(type(module), "core_attention", None) in TAKE_LAST
            over_rows = partial(_allgather, core, row_cut, last, reach)
        module.core_attention = partial(_causal, over_rows)  # type: ignore[assignment]


def _causal(
    over_rows: OverRows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool = True,
    **sinks: Tensor,
) -> Tensor:
    """`core_attention` of a module whose rows are cut; shapes as there, of this rank's part."""
    if mask is None and not causal:
        raise TitanError(
            "with mesh.cp a model cannot generate with a cache", hint="use engine.sample or engine.sampling()"
        )
    return over_rows(q, k, v, mask, **sinks)


def _allgather(
    core: Core,
    row_cut: RowCut,
    last: bool,
    reach: Reach,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    **sinks: Tensor,
) -> Tensor:
    """Each piece of this rank's queries against the keys that it can see. The mask is of whole rows, or for
    each piece its own (`titancli.models.blocks.masks.document_masks`)."""
    keys_and_values = row_cut.gathered(torch.cat((k, v), -1), SEQUENCE)
    k, v = keys_and_values.split((k.shape[-1], v.shape[-1]), -1)
    parts = q.chunk(len(row_cut.mine), SEQUENCE)
    out = []
    for place, (number, part) in enumerate(zip(row_cut.mine, parts, strict=True)):
        length = part.shape[SEQUENCE]
        begin, end = number * length, (number + 1) * length
        first = reach.first(begin)
        keys, values = k[:, first:end], v[:, first:end]
        if isinstance(mask, tuple):
            seen = mask[place]
        elif mask is not None:
            seen = mask[:, :, begin:end, first:end]
        elif number == 0 or last:
            seen = None
        else:
            seen = reach.mask(range(begin, end), range(first, end), q.device)[None, None]
        out.append(core(part, keys, values, seen, **sinks))
    return torch.cat(out, SEQUENCE)


def _ulysses(
    core: Core, group: Group, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **sinks: Tensor
) -> Tensor:
    """Whole rows of some heads, for a part of the rows of all heads."""
    ranks, (rows, length) = group.size, q.shape[:2]
    for x in (q, k):
        if x.shape[2] % ranks:
            raise TitanError(
                f"{x.shape[2]} heads cannot be exchanged among the {ranks} ranks of mesh.cp",
                hint='set parallelize.context_parallel = "allgather"',
            )
    # One exchange for all three: for every rank its heads of each, side by side.
    dealt = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    together = torch.cat([x.flatten(3) for x in dealt], -1)
    received = all_to_all(together.flatten(0, 1), group).view(ranks, rows, length, -1)
    whole = received.movedim(0, 1).flatten(1, 2)
    pieces = whole.split([x.shape[3] * x.shape[4] for x in dealt], -1)
    q, k, v = (piece.unflatten(-1, tuple(x.shape[3:])) for piece, x in zip(pieces, dealt, strict=True))
    mine = {name: logits.chunk(ranks)[group.rank] for name, logits in sinks.items()}
    out = core(q, k, v, mask, **mine)
    sent = out.unflatten(SEQUENCE, (ranks, length)).movedim(1, 0)
    back = all_to_all(sent.flatten(0, 1), group).view(sent.shape)
    return back.movedim(0, 2).flatten(2, 3)


def _over_heads(core: Core, row_cut: RowCut, per_head: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """`core_recurrence` where rows are cut: whole rows of some heads, whichever way they are cut, since state
    goes through a row from its beginning to its end."""
    group, (rows, length, heads) = row_cut.group, per_head[0].shape[:3]
    if heads % group.size:
        raise TitanError(
            f"{heads} heads of a layer that goes through rows in order cannot be exchanged among the "
            f"{group.size} ranks of mesh.cp",
            hint="use a mesh.cp that divides them",
        )
    each = heads // group.size
    whole = []
    for x in per_head:
        dealt = x.unflatten(2, (group.size, each)).movedim(2, 0).flatten(0, 1)
        whole.append(row_cut.in_order(all_to_all(dealt, group), SEQUENCE))
    out = core(whole, mask, slice(group.rank * each, (group.rank + 1) * each))
    parts = torch.cat([row_cut.part(out, rank, SEQUENCE) for rank in range(group.size)])
    back = all_to_all(parts, group).view(group.size, rows, length, each, *out.shape[3:])
    return back.movedim(0, 2).flatten(2, 3)


def _ring(group: Group, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        raise TitanError(
            'parallelize.context_parallel = "ring" cannot keep attention within documents',
            hint='use "allgather" or "ulysses", or data without a document mask',
        )
    return ring_attention(q, k, v, group)
