"""Decoding token by token: the loop shared by `titan generate` and rollouts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titancli.errors import TitanError
from titancli.models.blocks.moe import recorded
from titancli.models.blocks.onednn import packed
from titancli.protocols import CacheDefaults
from titancli.protocols.samples import SamplingParams
from titancli.registry.defaults import fill_in
from titancli.rl.sampling import choose, uniforms

OnToken = Callable[[int, int], bool]
"""Called with a row and its new token; returns whether the row continues."""
READ_AT_ONCE = 4096
"""Maximum number of prompt tokens read in one call, if there are several prompts."""


@dataclass(frozen=True)
class Row:
    """A completion to generate."""

    prompt: int
    """Index of the prompt; several rows may continue one."""
    seed: int
    """Seed of its random numbers, together with the prompt; other rows have no influence."""
    limit: int
    """Maximum number of tokens."""


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Row],
    params: SamplingParams,
    on_token: OnToken,
    *,
    device: torch.device,
    vocab_size: int | None = None,
    log_probs: Sequence[list[float]] | None = None,
    routes: Sequence[list[Tensor]] | None = None,
    batch_size: int = 256,
) -> None:
    """Continue prompts, each row until `on_token` ends it or its limit is reached.

    When a row ends, the next begins, in the order of prompts. A prompt is read once, however many rows
    continue it, and a row that has ended costs nothing more.

    Args:
        model: has `new_cache` (see `titancli.protocols.Model`).
        prompts: token ids; none is empty.
        vocab_size: ids from here on are never sampled; None: the model's.
        log_probs: for each row, the list to which the model's log-probabilities of its tokens, over all ids
            and at the temperature of `params`, are appended.
        routes: for each row, the list to which the experts that its tokens visit are appended, [tokens,
            layers, top_k] on the CPU: those of its prompt, then of each token that the model has read.
        batch_size: maximum number of rows continued together.

    Raises:
        TitanError: a prompt is empty, has an id that the model does not have, or leaves less room in its
            context than a row may need; or the model returns numbers that are not finite.
    """
    check(model, prompts, rows)
    with ExitStack() as stack:
        stack.enter_context(packed(model) if rows else nullcontext())
        taken = None if routes is None else stack.enter_context(recorded(model))
        decoding = _Decoding(model, prompts, rows, device, batch_size, routes, taken)
        _run(decoding, params, on_token, vocab_size, log_probs)


def _run(
    decoding: _Decoding,
    params: SamplingParams,
    on_token: OnToken,
    vocab_size: int | None,
    log_probs: Sequence[list[float]] | None,
) -> None:
    while decoding.should_continue:
        logits, drawing = decoding.forward()
        uniform = torch.stack([row.uniforms[row.drawn] for row in drawing]).to(logits.device)
        chosen = choose(_finite(logits[:, :vocab_size]), params, uniform)
        if log_probs is not None:
            for row, value in zip(drawing, _log_probs(logits, chosen, params.temperature), strict=True):
                log_probs[row.number].append(value)
        decoding.advance(drawing, chosen.tolist(), on_token)


@dataclass(eq=False)
class _Running:
    """A row that has begun."""

    number: int
    uniforms: Tensor
    """The uniform random numbers of its tokens, [limit] float64."""
    place: int | None = None
    """Its row of the cache; None until its first token is sampled."""
    drawn: int = 0
    token: int = 0
    """The last token."""


@dataclass(eq=False)
class _Read:
    """A prompt that the model has read."""

    place: int
    """Its row of the cache."""
    logits: Tensor
    """Logits of its last token, [V]."""
    waiting: deque[int]
    """Rows that will continue it and have not begun."""
    routes: Tensor | None
    """Those of its tokens, if they are recorded."""
    begun: list[_Running] = field(default_factory=list)
    """Rows whose first token is being sampled."""


class _Decoding:
    """The rows in progress, and their cache."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Row],
        device: torch.device,
        batch_size: int,
        routes: Sequence[list[Tensor]] | None,
        taken: Callable[[], Tensor] | None,
    ) -> None:
        self._routes, self._taken = routes, taken
        self._model, self._prompts, self._rows = model, prompts, rows
        self._device, self._batch_size = device, batch_size
        self._cache = fill_in(model.new_cache(), CacheDefaults)
        self._apart = self._cache.apart
        self._unread: dict[int, deque[int]] = {}
        for number, row in enumerate(rows):
            self._unread.setdefault(row.prompt, deque()).append(number)
        self._read: list[_Read] = []
        self._running: list[_Running] = []

    @property
    def should_continue(self) -> bool:
        """Return whether a row has not ended."""
        return bool(self._unread or self._read or self._running)

    def forward(self) -> tuple[Tensor, list[_Running]]:
        """Run the model; return logits, [B, V], and the rows that sample their next token from them."""
        running, asked = self._running, self._to_read()
        parts = []
        if running or asked:
            tokens = [row.token for row in running] + [i for number in asked for i in self._prompts[number]]
            places = [row.place for row in running] + [self._cache.begin() for _ in asked]
            counts = [1] * len(running) + [len(self._prompts[number]) for number in asked]
            call = self._cache.extend(places, counts, self._device)
            logits = self._model(torch.tensor([tokens], device=self._device), cache=call)
            parts.append(logits[: len(running)])
            visited = [None] * len(counts) if self._taken is None else self._taken().split(counts)
            for row, own in zip(running, visited, strict=False):
                self._record(row, own)
            for at, number in enumerate(asked, start=len(running)):
                self._read.append(_Read(places[at], logits[at], asked[number], visited[at]))
        room = self._batch_size - len(running)
        for read in self._read:
            count = min(room, len(read.waiting))
            read.begun = [self._begun(read.waiting.popleft()) for _ in range(count)]
            for row in read.begun:
                self._record(row, read.routes)
            room -= count
            parts.append(read.logits.expand(count, -1))
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return logits, [*running, *(row for read in self._read for row in read.begun)]

    def _record(self, row: _Running, visited: Tensor | None) -> None:
        if self._routes is not None and visited is not None:
            self._routes[row.number].append(visited)

    def _to_read(self) -> dict[int, deque[int]]:
        """Return the prompts that there is room for, and the rows that will continue each."""
        room = self._batch_size - len(self._running) - sum(len(read.waiting) for read in self._read)
        if self._apart and self._running:
            room = 0
        found: dict[int, deque[int]] = {}
        tokens = 0
        for number, rows in list(self._unread.items()):
            tokens += len(self._prompts[number])
            if room <= 0 or (found and tokens > READ_AT_ONCE):
                break
            # Rows that begin later find the prompt in the cache, unless they must begin with the others.
            count = min(room, len(rows)) if self._apart else len(rows)
            found[number] = deque(rows.popleft() for _ in range(count))
            room -= count
            if not rows:
                del self._unread[number]
        return found

    def _begun(self, number: int) -> _Running:
        row = self._rows[number]
        return _Running(number, uniforms(row.seed, row.limit))

    def advance(self, drawn: Sequence[_Running], tokens: Sequence[int], on_token: OnToken) -> None:
        """Give rows their new tokens; rows that end free their cache row."""
        for row, token in zip(drawn, tokens, strict=True):
            row.token, row.drawn = token, row.drawn + 1
        goes_on = {
            id(row)
            for row in drawn
            if on_token(row.number, row.token) and row.drawn < self._rows[row.number].limit
        }
        for row in drawn:
            if row.place is not None and id(row) not in goes_on:
                self._cache.close(row.place)
        for read in self._read:
            self._place(read, [row for row in read.begun if id(row) in goes_on])
        self._read = [read for read in self._read if read.waiting]
        self._running = [row for row in drawn if id(row) in goes_on]

    def _place(self, read: _Read, rows: list[_Running]) -> None:
        """Fork a prompt's cache for the rows that continue it; the last of all takes over the prompt's
        row."""
        keeps = bool(read.waiting) or not rows
        copies = self._cache.fork(read.place, len(rows) - (not keeps)) if rows else []
        for row, place in zip(rows, [*copies, read.place], strict=False):
            row.place = place
        if keeps and not read.waiting:
            self._cache.close(read.place)


def check(model: Any, prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
    """Check prompts and rows.

    Raises:
        TitanError: see `decode`.
    """
    vocab_size, longest = model.config.vocab_size, model.config.max_seq_len
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise TitanError(
                f"prompt {number} is empty", hint="start a text with the tokenizer's BOS or EOS id"
            )
        if wrong := [i for i in (min(prompt), max(prompt)) if i < 0 or (vocab_size and i >= vocab_size)]:
            raise TitanError(
                f"prompt {number} contains the token id {wrong[0]}, but the model's vocab_size is "
                f"{vocab_size}",
                hint="use the ids of the model's tokenizer",
            )
    for number, row in enumerate(rows):
        if not 0 <= row.prompt < len(prompts) or row.limit < 1:
            raise TitanError(
                f"row {number} continues prompt {row.prompt} of {len(prompts)} by {row.limit} tokens at most",
                hint="prompts are numbered from 0, and limits must be at least 1",
            )
        length = len(prompts[row.prompt]) + row.limit - 1  # the last sampled token is never read
        if longest is not None and length > longest:
            raise TitanError(
                f"prompt {row.prompt} has {len(prompts[row.prompt])} tokens and may have {row.limit} "
                f"more, but the model's context (max_seq_len) is {longest}",
                hint="shorten the prompt or lower the limit",
            )


def _log_probs(logits: Tensor, chosen: Tensor, temperature: float) -> list[float]:
    """Return log softmax(logits [B, V] / temperature)[chosen [B]] as the trainer computes it; with
    temperature 0 at temperature 1."""
    logits = logits.float() if temperature in (0, 1) else logits.float() / temperature
    picked = logits.gather(1, chosen[:, None])[:, 0]
    found: list[float] = (picked - logits.logsumexp(1)).tolist()
    return found


def _finite(logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits.amax(-1)).all()):
        raise TitanError(
            "the model's output is not finite: its weights have diverged or exceed the range of the dtype",
            hint="try an earlier checkpoint or float32",
        )
    return logits
