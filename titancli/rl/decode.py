"""Token after token: the loop that `titan generate` and rollouts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titancli.errors import TitanError
from titancli.protocols import ModelDefaults
from titancli.registry.defaults import ModelConfigDefaults, with_defaults
from titancli.rl.sampling import Sampling, choose, uniforms

OnToken = Callable[[int, int], bool]
"""Called with a row and its new token; returns whether the row goes on."""


@dataclass(frozen=True)
class Row:
    """One completion that is to be made."""

    prompt: int
    """Index of the prompt that it continues; several rows may continue one."""
    seed: int
    """Seed of its random numbers, with the prompt; the rows beside it have no influence."""
    limit: int
    """Tokens at most."""


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Row],
    sampling: Sampling,
    on_token: OnToken,
    *,
    device: torch.device,
    vocab_size: int | None = None,
    log_probs: Sequence[list[float]] | None = None,
) -> None:
    """Continue prompts together, each row until `on_token` says that it ends or its limit is reached.

    A prompt is read once, however many rows continue it; a row that has ended costs nothing more.

    Args:
        model: has `new_cache` (see `titancli.protocols.Model`).
        prompts: token ids; none is empty, and each is continued by a row at least.
        vocab_size: ids from here on are never chosen; None: the model's own.
        log_probs: of each row, the list that the log-probabilities of its tokens are added to: those that the
            model gives, among all of its ids, whatever they are drawn with.

    Raises:
        TitanError: a prompt is empty, holds an id that the model does not have, or leaves less room in its
            context than a row may take; or the model gives numbers that are not finite.
    """
    _check(model, prompts, rows)
    tokens, padding = _left_padded(prompts, device)
    limit = max(row.limit for row in rows)
    # The last token that is drawn is never read.
    cache = model.new_cache(tokens.shape[1] + limit - 1, padding)
    logits = model(tokens, cache=cache)[:, -1]
    owners = torch.tensor([row.prompt for row in rows], device=device)
    if owners.tolist() != list(range(len(prompts))):
        cache.select(owners)
        logits = logits[owners]
    numbers = uniforms([row.seed for row in rows], limit).to(device)
    alive = list(range(len(rows)))
    for step in range(limit):
        chosen = choose(_finite(logits[:, :vocab_size]), sampling, numbers[alive, step])
        if log_probs is not None:
            for row, value in zip(alive, _log_probs(logits, chosen), strict=True):
                log_probs[row].append(value)
        ids = chosen.tolist()
        kept = [i for i, row in enumerate(alive) if on_token(row, ids[i]) and step + 1 < rows[row].limit]
        if not kept:
            return
        if len(kept) < len(alive):
            alive = [alive[i] for i in kept]
            selected = torch.tensor(kept, device=device)
            cache.select(selected)
            chosen = chosen[selected]
        logits = model(chosen[:, None], cache=cache)[:, -1]


def _check(model: Any, prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
    sizes = with_defaults(ModelConfigDefaults, with_defaults(ModelDefaults, model).config)
    vocab_size, longest = sizes.vocab_size, sizes.max_seq_len
    if not rows:
        raise TitanError("there are no rows to decode", hint="pass a Row for each completion")
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
        length = len(prompts[row.prompt]) + row.limit - 1  # the last token that is drawn is never read
        if longest is not None and length > longest:
            raise TitanError(
                f"prompt {row.prompt} has {len(prompts[row.prompt])} tokens and may have {row.limit} "
                f"more, but the model's context (max_seq_len) is {longest}",
                hint="shorten the prompt or lower the limit",
            )


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """[B, S] int64 of prompts that end together, and [B] how much padding each has (None: none has any)."""
    longest = max(map(len, prompts))
    lacking = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor(
        [[0] * lack + list(prompt) for lack, prompt in zip(lacking, prompts, strict=True)], device=device
    )
    return tokens, torch.tensor(lacking, device=device) if any(lacking) else None


def _log_probs(logits: Tensor, chosen: Tensor) -> list[float]:
    """log softmax(logits [B, V])[chosen [B]] as the trainer computes it."""
    logits = logits.float()
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
