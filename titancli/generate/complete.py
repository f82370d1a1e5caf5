"""Prompts in, completions out: batches, ends, and text as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from titancli.engine.rng import derive
from titancli.errors import EnvironmentProblem
from titancli.generate.source import Source
from titancli.protocols.samples import Finish
from titancli.registry.defaults import ModelConfigDefaults, with_defaults
from titancli.rl.decode import Row, decode
from titancli.rl.sampling import Sampling
from titancli.rl.writer import OnText, Writer


@dataclass(frozen=True)
class Request:
    """The options for each prompt."""

    sampling: Sampling
    max_new_tokens: int = 256
    seed: int = 0
    samples: int = 1
    stop: tuple[str, ...] = ()
    """Texts that end a completion, and are not part of it."""
    batch_size: int = 16
    """Completions that are made together."""


@dataclass(frozen=True)
class Completion:
    """The result of one row."""

    text: str
    tokens: int
    """Number of sampled tokens, including the end marker and those that a stop text cut off."""
    finish_reason: Finish
    """The model's end marker, a stop text, or no room: max_new_tokens or the model's context."""


OnDone = Callable[[list[Completion]], None]


def complete(
    source: Source,
    model: Any,
    prompts: Sequence[Sequence[int]],
    request: Request,
    *,
    device: torch.device,
    on_text: OnText = lambda text: None,
    on_done: OnDone = lambda completions: None,
) -> list[Completion]:
    """Continue each prompt `request.samples` times.

    What a row draws follows from the seed, the prompt and the number of the sample, so that it reads the same
    whatever else is asked for in the same call.

    Args:
        on_text: called with each piece of text as it comes, of all rows alike: for a single row.
        on_done: called with the completions of each batch.

    Returns:
        The samples of the first prompt, then those of the second, and so on.

    Raises:
        EnvironmentProblem: a batch does not fit in the GPU's memory.
    """
    wanted = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(request.samples)]
    completions: list[Completion] = []
    for start in range(0, len(wanted), request.batch_size):
        batch = wanted[start : start + request.batch_size]
        try:
            made = _complete_batch(source, model, prompts, batch, request, device, on_text)
        except torch.OutOfMemoryError as error:
            raise EnvironmentProblem(
                f"{len(batch)} completions at once do not fit in the GPU's memory",
                hint="use a smaller --batch-size or --max-new-tokens",
            ) from error
        on_done(made)
        completions += made
    return completions


def _complete_batch(
    source: Source,
    model: Any,
    prompts: Sequence[Sequence[int]],
    batch: Sequence[tuple[int, int]],
    request: Request,
    device: torch.device,
    on_text: OnText,
) -> list[Completion]:
    first = batch[0][0]
    context = with_defaults(ModelConfigDefaults, source.config).max_seq_len
    rows, writers = [], []
    for number, sample in batch:
        prompt = prompts[number]
        room = request.max_new_tokens if context is None else context - len(prompt)
        seed = derive(request.seed, sample, *prompt)
        rows.append(Row(number - first, seed, min(request.max_new_tokens, room)))
        writers.append(Writer(source.tokenizer.decode, prompt, source.eos_ids, request.stop, on_text=on_text))
    decode(
        model,
        prompts[first : batch[-1][0] + 1],
        rows,
        request.sampling,
        lambda row, token: writers[row].token(token),
        device=device,
        vocab_size=source.tokenizer.vocab_size,
    )
    return [Completion(writer.text(), len(writer.tokens), writer.finish or "length") for writer in writers]
