"""The paged KV cache of generation: keys and values of the tokens so far, and the states of recurrent layers.

Rows begin, continue and end independently. One call of the model extends several of them: its tokens, [1, N],
are those of one row after those of another, without padding. Token-wise modules work on these as they are;
attention finds the keys of each row (`LayerCache.attend`), recurrence its state (`StateCache.recur`). Never
used in training.

Source: paged attention, arXiv 2309.06180.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titancli.models.blocks.attention_window import IN_ORDER, Reach

PAGE = 16
"""Tokens of a page."""
FEW = 4
"""Rows of so many pages or fewer are read together; of more, those that have up to twice as many."""


def keeps_cache(module: Any) -> bool:
    """Return whether the class that defines a module's `forward`, or one derived from it, declares
    `keeps_cache = True`: a declaration is not inherited by another forward."""
    for kind in type(module).__mro__:
        if "keeps_cache" in vars(kind):
            return bool(vars(kind)["keeps_cache"])
        if "forward" in vars(kind):
            return False
    return False


class PageTable:
    """Which pages each row has. Rows that began as one share the pages that they had filled by then."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Tokens of a page."""
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self._users: list[int] = []
        self._free: list[int] = []

    @property
    def total(self) -> int:
        """How many pages there are, in use or free."""
        return len(self._users)

    @property
    def in_use(self) -> int:
        return self.total - len(self._free)

    def begin(self) -> int:
        """Begin an empty row; returns its number, the smallest that no other row has."""
        row = next(number for number in range(len(self.pages) + 1) if number not in self.pages)
        self.pages[row], self.lengths[row] = [], 0
        return row

    def fork(self, row: int) -> tuple[int, tuple[int, int] | None]:
        """Begin a row that has what this one has; returns its number, and the page to copy and to which."""
        new, pages, length = self.begin(), self.pages[row], self.lengths[row]
        whole = length // self.size
        self.pages[new], self.lengths[new] = pages[:whole], length
        for page in pages[:whole]:
            self._users[page] += 1
        if whole == len(pages):
            return new, None
        self.pages[new].append(self._take())
        return new, (pages[whole], self.pages[new][whole])

    def close(self, row: int) -> None:
        """End a row; pages that no other row has are free."""
        del self.lengths[row]
        for page in self.pages.pop(row):
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def grow(self, row: int, count: int) -> range:
        """Make room for so many more tokens; returns their positions."""
        start = self.lengths[row]
        self.lengths[row] = end = start + count
        while len(self.pages[row]) * self.size < end:
            self.pages[row].append(self._take())
        return range(start, end)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
            self._users[page] = 1
            return page
        self._users.append(1)
        return self.total - 1


class Keys(NamedTuple):
    """Where the keys are of rows that have a new token each."""

    pages: Tensor
    """[B · P] int64: of each row as many."""
    length: int
    """Tokens of these that matter."""
    mask: Tensor | None
    """[B, 1, 1, length] bool; None: all are seen by each."""


class Group:
    """Rows of similar length that are extended by one token each."""

    def __init__(self, table: PageTable, rows: Sequence[int], tokens: Tensor | None) -> None:
        """`tokens`: [B], where in the call their tokens are; None: they are all of it, in order."""
        self.rows, self.tokens = rows, tokens
        self._size = table.size
        self._pages = [list(table.pages[row]) for row in rows]
        self._lengths = [table.lengths[row] for row in rows]
        self._keys: dict[Reach, Keys] = {}

    def keys(self, reach: Reach, device: torch.device) -> Keys:
        """Return what layers of this reach look at; made once in a call."""
        if reach not in self._keys:
            self._keys[reach] = self._find(reach, device)
        return self._keys[reach]

    def _find(self, reach: Reach, device: torch.device) -> Keys:
        first = [reach.first(length - 1) // self._size for length in self._lengths]
        pages = [own[skipped:] for own, skipped in zip(self._pages, first, strict=True)]
        width = max(map(len, pages))
        starts = [skipped * self._size for skipped in first]
        lengths = [length - start for length, start in zip(self._lengths, starts, strict=True)]
        longest = max(lengths)
        # What fills a row up is any page; nothing of it is seen.
        filled = [page for own in pages for page in own + own[:1] * (width - len(own))]
        mask = None
        if min(lengths) < longest or reach.limits(max(self._lengths)):
            positions = torch.tensor(starts, device=device)[:, None] + torch.arange(longest, device=device)
            queries = torch.tensor(self._lengths, device=device)[:, None] - 1
            mask = reach.seen(queries, positions)[:, None, None]
        return Keys(torch.tensor(filled, device=device), longest, mask)


class Piece(NamedTuple):
    """Several tokens of one row."""

    row: int
    tokens: slice
    """Where in the call they are."""
    group: Group | None
    """The row, where it had tokens before."""


@dataclass(frozen=True)
class Extension:
    """Rows of a cache that are extended by one call of the model: what is passed to its `forward`."""

    positions: Tensor
    """[1, N] int64."""
    last: Tensor
    """[R] int64: where in the call the last token of each row is."""
    slots: Tensor
    """[N] int64: where keys and values are written, pages · size + place in the page."""
    pieces: list[Piece]
    groups: list[Group]
    pages: int
    """How many there are."""
    rows: int
    """A number above that of every row."""
    layers: Mapping[str, LayerCache | StateCache]

    def of(self, name: str) -> LayerStep:
        """Return what a layer is given of it."""
        return LayerStep(self.layers[name], self)


class LayerStep(NamedTuple):
    """A layer's memory and the call that extends it."""

    layer: Any
    call: Extension

    def attend(self, q: Tensor, k: Tensor, v: Tensor, reach: Reach, core: Callable[..., Tensor]) -> Tensor:
        """See `LayerCache.attend`."""
        return self.layer.attend(self.call, q, k, v, reach, core)

    def recur(self, per_head: Sequence[Tensor], run: Callable[..., Any]) -> Tensor:
        """See `StateCache.recur`."""
        return self.layer.recur(self.call, per_head, run)


class LayerCache:
    """Keys and values of one layer, in pages.

    Memory is taken as pages come into use; its shape and dtype are those of what comes.
    """

    def __init__(self, size: int) -> None:
        """`size`: tokens of a page."""
        self._size = size
        self._memory: list[Tensor] = []

    def attend(
        self, call: Extension, q: Tensor, k: Tensor, v: Tensor, reach: Reach, core: Callable[..., Tensor]
    ) -> Tensor:
        """Add keys and values, and attend to all that each row has.

        Args:
            q: [1, N, heads, head_dim].
            k: [1, N, kv heads, head_dim].
            v: [1, N, kv heads, value_dim].
            core: called with queries [B, S, …], keys and values [B, T, …], a mask [B, 1, 1, T] or None, and
                `causal`; see `titancli.models.blocks.attention.Attention.core_attention`.

        Returns:
            [1, N, heads, value_dim].
        """
        self._reserve(call.pages, k, v)
        for memory, new in zip(self._memory, (k, v), strict=True):
            memory.flatten(0, 1).index_copy_(0, call.slots, new[0])
        found: list[tuple[Any, Tensor]] = []
        for _, tokens, group in call.pieces:
            keys = (k[:, tokens], v[:, tokens]) if group is None else self._gathered(group, Reach())
            found.append((tokens, core(q[:, tokens], keys[0], keys[1], None, causal=True)[0]))
        for group in call.groups:
            mask = group.keys(reach, q.device).mask
            queries = q[0] if group.tokens is None else q[0, group.tokens]
            out = core(queries[:, None], *self._gathered(group, reach), mask, causal=False)
            found.append((group.tokens, out[:, 0]))
        return joined(found, q.shape[1])[None]

    def _gathered(self, group: Group, reach: Reach) -> tuple[Tensor, Tensor]:
        """Keys and values of rows, [B, T, kv heads, width] each."""
        pages, length, _ = group.keys(reach, self._memory[0].device)
        keys, values = (
            memory.index_select(0, pages).view(len(group.rows), -1, *memory.shape[2:])[:, :length]
            for memory in self._memory
        )
        return keys, values

    def copy(self, pages: Sequence[tuple[int, int]], total: int) -> None:
        """Copy pages to others; of `total` that there are."""
        if self._memory:
            self._reserve(total, *self._memory)
            source, target = torch.tensor(pages, device=self._memory[0].device).T
            for memory in self._memory:
                memory.index_copy_(0, target, memory.index_select(0, source))

    def _reserve(self, pages: int, *like: Tensor) -> None:
        """Have memory for so many pages: of zeros, since what no query sees is still multiplied by 0."""
        there = len(self._memory[0]) if self._memory else 0
        if pages <= there:
            return
        wanted = max(pages, there + there // 4)
        grown = [x.new_zeros(wanted, self._size, *x.shape[2:]) for x in like]
        for new, old in zip(grown, self._memory, strict=False):
            new[:there] = old
        self._memory = grown


class StateCache:
    """What a layer that goes through rows in order has of them: tensors of a row each, however long it is."""

    def __init__(self, size: int) -> None:
        self._states: list[Tensor] = []

    def recur(self, call: Extension, per_head: Sequence[Tensor], run: Callable[..., Any]) -> Tensor:
        """Go on with rows from where they are.

        Args:
            per_head: [1, N, …] each.
            run: called with pieces of these, [B, S, …] each, and the states of the rows ([B, …] each; None:
                they begin); returns [B, S, …] and the states after it.

        Returns:
            [1, N, …].
        """
        found: list[tuple[Any, Tensor]] = []
        for row, tokens, group in call.pieces:
            rows = None if group is None else torch.tensor([row], device=per_head[0].device)
            out, states = run([x[:, tokens] for x in per_head], self._of(rows))
            self._put(torch.tensor([row], device=out.device), states, call.rows)
            found.append((tokens, out[0]))
        for group in call.groups:
            rows = torch.tensor(group.rows, device=per_head[0].device)
            taken = [(x[0] if group.tokens is None else x[0, group.tokens])[:, None] for x in per_head]
            out, states = run(taken, self._of(rows))
            self._put(rows, states, call.rows)
            found.append((group.tokens, out[:, 0]))
        return joined(found, per_head[0].shape[1])[None]

    def _of(self, rows: Tensor | None) -> list[Tensor] | None:
        return None if rows is None else [state.index_select(0, rows) for state in self._states]

    def _put(self, rows: Tensor, states: Sequence[Tensor], total: int) -> None:
        if not self._states or len(self._states[0]) < total:
            grown = [x.new_zeros(total, *x.shape[1:]) for x in states]
            for new, old in zip(grown, self._states, strict=False):
                new[: len(old)] = old
            self._states = grown
        for state, new in zip(self._states, states, strict=True):
            state.index_copy_(0, rows, new)

    def fork(self, row: int, new: Sequence[int]) -> None:
        """Have new rows be where another is."""
        if self._states and new:
            rows = torch.tensor([row] * len(new), device=self._states[0].device)
            states = self._of(rows) or []
            self._put(torch.tensor(new, device=rows.device), states, max(new) + 1)


def joined(found: Sequence[tuple[Any, Tensor]], count: int) -> Tensor:
    """[N, …] of parts with their places in it; a part that has none is the whole."""
    if len(found) == 1 and len(found[0][1]) == count:
        return found[0][1]
    out = found[0][1].new_empty(count, *found[0][1].shape[1:])
    for places, part in found:
        out[places] = part
    return out


class KVCache:
    """Keys and values, or states, of every layer: a `titancli.protocols.Cache`."""

    def __init__(self, layers: Mapping[str, Any], page: int | None = None) -> None:
        """Make an empty cache.

        Args:
            layers: the attention of each, by name.
            page: tokens of a page; None: `PAGE`.
        """
        self.table = PageTable(page or PAGE)
        self.layers: dict[str, LayerCache | StateCache] = {
            name: (StateCache if attention.reach is IN_ORDER else LayerCache)(self.table.size)
            for name, attention in layers.items()
        }

    def begin(self) -> int:
        """Begin an empty row; returns its number."""
        return self.table.begin()

    def fork(self, row: int, count: int) -> list[int]:
        """Begin so many rows that have what this one has; returns their numbers."""
        made = [self.table.fork(row) for _ in range(count)]
        rows, copied = [new for new, _ in made], [pages for _, pages in made if pages is not None]
        for layer in self.layers.values():
            if isinstance(layer, StateCache):
                layer.fork(row, rows)
            elif copied:
                layer.copy(copied, self.table.total)
        return rows

    def close(self, row: int) -> None:
        """End a row."""
        self.table.close(row)

    def extend(self, rows: Sequence[int], counts: Sequence[int], device: torch.device) -> Extension:
        """Make room for more tokens in rows, of each so many; what `forward(tokens, cache=…)` takes.

        Returns:
            What is valid for one call. Where that raises, the cache is of no more use.
        """
        table = self.table
        places = [table.grow(row, count) for row, count in zip(rows, counts, strict=True)]
        size, ends = table.size, list(accumulate(counts))
        slots = [
            table.pages[row][place // size] * size + place % size
            for row, own in zip(rows, places, strict=True)
            for place in own
        ]
        pieces: list[Piece] = []
        similar: dict[int, list[tuple[int, int]]] = {}
        for row, own, end in zip(rows, places, ends, strict=True):
            if len(own) == 1 and own.start:
                pages = len(table.pages[row])
                similar.setdefault(0 if pages <= FEW else (pages - 1).bit_length(), []).append((row, end - 1))
            else:
                before = Group(table, [row], None) if own.start else None
                pieces.append(Piece(row, slice(end - len(own), end), before))
        groups = []
        for members in similar.values():
            tokens = None
            if len(members) < len(slots):
                tokens = torch.tensor([place for _, place in members], device=device)
            groups.append(Group(table, [row for row, _ in members], tokens))
        return Extension(
            positions=torch.tensor([[place for own in places for place in own]], device=device),
            last=torch.tensor(ends, device=device) - 1,
            slots=torch.tensor(slots, device=device),
            pieces=pieces,
            groups=groups,
            pages=table.total,
            rows=max(table.pages) + 1,
            layers=self.layers,
        )
