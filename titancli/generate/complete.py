"""Prompts in, completions out, from a model that was loaded to generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from titancli.engine.sampling import seeds_of
from titancli.errors import EnvironmentProblem
from titancli.generate.source import Source
from titancli.protocols.samples import Completion, SamplingParams
from titancli.rl.complete import Completing, OnDone
from titancli.rl.writer import OnText


def complete(
    source: Source,
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    samples: int = 1,
    batch_size: int = 16,
    device: torch.device,
    on_text: OnText | None = None,
    on_done: OnDone | None = None,
) -> list[Completion]:
    """Continue each prompt `samples` times, with the random numbers of `Engine.sample`.

    Args:
        batch_size: how many completions are made together.
        on_text: called with each piece of text as it comes, of all completions alike: for a single one.
        on_done: called with completions in their order.

    Returns:
        The samples of the first prompt, then those of the second, and so on.

    Raises:
        EnvironmentProblem: they do not fit in the GPU's memory.
    """
    seeds = seeds_of(prompts, samples, params.seed)
    asked = Completing(
        model, prompts, seeds, params, tokenizer=source.tokenizer, end_ids=source.end_ids, on_text=on_text
    )
    try:
        made = asked.run(model, device, batch_size=batch_size, on_done=on_done)
    except torch.OutOfMemoryError as error:
        raise EnvironmentProblem(
            f"{batch_size} completions at once do not fit in the GPU's memory",
            hint="use a smaller --batch-size or --max-new-tokens",
        ) from error
    return [completion for row in made for completion in row]
