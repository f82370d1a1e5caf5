"""titan's attention in transformers' modules.

transformers' models look up their attention function in a table, and their mask function in another. titan's
entries return the reach of a layer (`Seen`) in place of a mask, and attend through
`titancli.models.blocks.attention`: documents, windows and chunks without a matrix of S x S, sinks, and
context parallelism, which replaces each module's `core_attention`. Models with their own attention code get
an equivalent dense mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titancli.distributed.local import local
from titancli.errors import RecipeError
from titancli.models.blocks.attention import attend
from titancli.models.blocks.attention_window import WHOLE, Reach
from titancli.models.blocks.masks import Mask, MaskOf, document_mask

ATTENTION = "titan"
"""Name of our attention and mask functions in transformers' tables."""
DENSE = "titan_dense"
"""Name of our masks for models with their own attention code: tensors that are added to scores."""
UNREAD = ("position_ids", "sliding_window", "past_key_values", "use_cache", "cache_position")
"""Arguments that transformers' models pass to attention, but which the mask already accounts for."""

LOOKED_INTO = "model.config: its modules compute with the mask of attention"


@dataclass(frozen=True)
class Rows:
    """Facts about whole training rows that attention needs."""

    documents: Tensor | None
    """[B, S]; None: a row is one document."""
    masks: MaskOf
    """See `titancli.models.blocks.masks.document_masks`."""


class Seen(NamedTuple):
    """What the queries of a layer see, in place of a mask."""

    reach: Reach
    mask: Mask | None
    """Mask including the reach; None: the reach is enough."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return tuple.__getitem__(self, key)
        raise RecipeError(LOOKED_INTO)

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "shape", "ndim", "device", "to", "dim", "size", "bool"):
            raise RecipeError(LOOKED_INTO)
        raise AttributeError(name)


class Attending(NamedTuple):
    """A module's attention options, other than its mask."""

    scale: float | None
    cap: float | None
    sinks: bool


def register_attention() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (ATTENTION, DENSE):
        ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, mask)
    ALL_MASK_ATTENTION_FUNCTIONS.register(DENSE, dense_mask)


def has_own_attention(kind: type) -> bool:
    """Return whether a model's code does not use transformers' table of attention functions."""
    return not hasattr(inspect.getmodule(kind), "ALL_ATTENTION_FUNCTIONS")


@contextmanager
def seen_by_attention(config: Any, rows: Rows) -> Iterator[None]:
    """Make rows known to attention while a base runs on them."""
    config.titan_rows = rows
    try:
        yield
    finally:
        config.titan_rows = None


# ---------------------------------------------------------------------------------------------------- masks


def mask(*, config: Any, mask_function: Callable[..., Any], **rest: Any) -> Any:
    """Return what a layer sees; in generation, with a cache, transformers' own mask.

    In training, transformers gets an `attention_mask` of ones only to keep it from looking for documents
    itself: it would read positions to the host, and take every restart for a document. The mask is not read,
    nor are lengths, which under context or tensor parallelism are those of a part of a row.
    """
    rows: Rows | None = getattr(config, "titan_rows", None)
    if rows is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(mask_function=mask_function, **rest)
    reach = reach_of(mask_function)
    return Seen(reach, rows.masks(reach, rest.get("dtype")))


def dense_mask(*, config: Any, mask_function: Callable[..., Any], **rest: Any) -> Any:
    """Return the mask as a tensor that is added to scores: 0 where a key is seen, the lowest number
    elsewhere."""
    from transformers.masking_utils import eager_mask

    rows: Rows | None = getattr(config, "titan_rows", None)
    if rows is None:
        return eager_mask(mask_function=mask_function, **rest)
    reach, length, device, dtype = reach_of(mask_function), rest["kv_length"], rest["device"], rest["dtype"]
    if rows.documents is None:
        seen = reach.mask(range(length), range(length), torch.device(device))[None, None]
        seen = seen.expand(rest["batch_size"], 1, -1, -1)
    else:
        seen = document_mask(rows.documents, reach)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)


def reach_of(mask_function: Callable[..., Any]) -> Reach:
    """Return the reach that transformers' description of a mask stands for.

    Raises:
        RecipeError: it is something other than causal, a window, or chunks.
    """
    from transformers.masking_utils import causal_mask_function

    reach = WHOLE
    for part in _parts(mask_function):
        closure = inspect.getclosurevars(part).nonlocals if part is not causal_mask_function else {}
        if part is not causal_mask_function:
            name = getattr(part, "__qualname__", repr(part))
            if name.startswith("sliding_window_overlay."):
                reach = reach._replace(window=int(closure["sliding_window"]))
            elif name.startswith("chunked_overlay."):
                reach = reach._replace(chunk=int(closure["chunk_size"]))
            else:
                what = name.split(".")[0]
                raise RecipeError(
                    f"model.config: its mask is not only causal, a sliding window or chunks: {what}"
                )
    return reach


def _parts(mask_function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the functions that must all be true, which transformers combines in a closure."""
    if getattr(mask_function, "__qualname__", "").startswith("and_masks."):
        for part in inspect.getclosurevars(mask_function).nonlocals["mask_functions"]:
            yield from _parts(part)
    else:
        yield mask_function


# ------------------------------------------------------------------------------------------------ attention


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend like titan's own models.

    Args:
        query, key, value: [B, heads, S, head_dim], with fewer heads for keys and values.
        attention_mask: `Seen`; with a cache a tensor, or None if plain causality is enough.
        softcap: cap of the scores.
        s_aux: [heads], sinks.

    Returns:
        [B, S, heads, value_dim].

    Raises:
        RecipeError: a model passes arguments that would be silently ignored: a choice of keys, a bias.
    """
    other = [
        name
        for name, given in more.items()
        if name not in UNREAD and given is not None and given is not False
    ]
    if dropout:
        other.append("dropout")
    if softcap is not None and s_aux is not None:
        other.append("softcap beside s_aux")
    if is_causal is False and attention_mask is None:
        other.append("is_causal")
    if other:
        raise RecipeError(
            f"model.config: {type(module).__name__} is not plain attention: it also takes {', '.join(other)}",
            hint="hf_causal_lm only supports attention that is softmax over the keys of a causal mask",
        )
    what = Attending(scaling, softcap, s_aux is not None)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    sinks = {} if s_aux is None else {"sinks": local(s_aux)}
    if isinstance(attention_mask, Seen):
        _declare(module, what, attention_mask.reach, query.shape[-1])
        out: Tensor = module.core_attention(q, k, v, attention_mask.mask, **sinks)  # type: ignore[operator]
        return out.contiguous(), None  # some models ask for a view of it
    causal = attention_mask is None and q.shape[1] > 1
    return core(what, WHOLE, q, k, v, attention_mask, causal, **sinks), None


DECLARED = ("attending", "reach", "is_plain_softmax", "core_attention")
"""Attributes that `_declare` sets on a module."""


def _declare(module: Any, what: Attending, reach: Reach, width: int) -> None:
    """Set the attributes that context parallelism needs, at a module's first forward, on meta."""
    known = getattr(module, "attending", None)
    if known is None:
        module.attending, module.reach = what, reach
        plain = what.scale is None or abs(what.scale * width**0.5 - 1) < 1e-6
        module.is_plain_softmax = plain and reach == WHOLE and what.cap is None and not what.sinks
        module.core_attention = partial(core, what, reach)
    elif known != what or module.reach != reach:
        raise RecipeError(f"model.config: the attention of {type(module).__name__} changes between forwards")


def core(
    what: Attending,
    reach: Reach,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Implement a module's `core_attention`; shapes as in `titancli.models.blocks.attention.attend`."""
    grouped = q.shape[2] != k.shape[2]
    if what.cap is not None:
        return _capped(what, what.cap, reach, q, k, v, mask, causal)
    return attend(q, k, v, mask, causal=causal, reach=reach, scale=what.scale, grouped=grouped, sinks=sinks)


def _capped(
    what: Attending, cap: float, reach: Reach, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool
) -> Tensor:
    """Compute softmax(cap · tanh(scale · q·kᵀ / cap)) · v, which of torch's kernels only flex attention
    supports.

    Source: Gemma 2 (arXiv 2408.00118, section 2).
    """
    scale = what.scale or q.shape[-1] ** -0.5
    if mask is not None and not isinstance(mask, Tensor):
        grouped = q.shape[2] != k.shape[2]
        return attend(q, k, v, mask, reach=reach, scale=scale, grouped=grouped, cap=cap)
    if mask is None and causal:
        row = range(q.shape[1])
        mask = reach.mask(row, row, q.device)[None, None]
    share = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(share, 2) if share > 1 else x for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.float().softmax(-1).to(v.dtype)
    return torch.einsum("bhst,bthd->bshd", weights, v)
