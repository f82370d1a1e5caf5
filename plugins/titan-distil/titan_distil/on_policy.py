"""On-policy distillation: the loop, from top to bottom.

Source: GKD, arXiv 2306.13649, algorithm 1, with all data from the student (λ = 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from titan_distil.teacher import Teacher
from titancli import IGNORE, Batch, TitanError, phase
from titancli.registry.component import build as build_component

if TYPE_CHECKING:
    from titan_distil import DistilOnPolicy
    from titancli import Completion, Engine
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers
    from titancli.protocols import Generator
    from titancli.rl.prompts import PromptSource


def build(
    config: DistilOnPolicy,
    *,
    engine: Engine,
    data: PromptSource,
    tokenizer: Any,
    observers: Observers,
    run: Run,
) -> Callable[[], None]:
    """
    Raises:
        TitanError: the completions of a step cannot be dealt to ranks and micro-batches evenly; or the
            generator cannot sample from this engine.
    """
    if run.recipe is None:
        raise TitanError("the loop distil_on_policy needs the recipe of its run")
    dp, (rows, _) = engine.mesh.degrees.dp, run.batch_shape
    if config.prompts % dp or config.prompts // dp * config.samples % rows:
        raise TitanError(
            f"{config.prompts} prompts with {config.samples} completions each cannot be dealt evenly to {dp} "
            f"data-parallel ranks, in micro-batches of {rows} rows",
            hint="change loop.prompts, loop.samples or training.local_batch_size",
        )
    generator = build_component(config.generator, engine=engine, tokenizer=tokenizer)
    teacher = Teacher(engine, run.recipe, config.teacher)
    if run.validation is not None:
        run.validation.prepare = teacher
    return partial(on_policy, config, engine, data, generator, teacher, observers, run)


def on_policy(
    config: DistilOnPolicy,
    engine: Engine,
    data: PromptSource,
    generator: Generator,
    teacher: Teacher,
    observers: Observers,
    run: Run,
) -> None:
    """Train until the last step or a signal; save on the way and at the end."""
    rows, seq_len = run.batch_shape
    while run.should_continue(engine.step):
        with phase("sample"):
            written = completed(config, engine, data, generator, seq_len)
        batches = [teacher(batch) for batch in batch_of(written, seq_len).split(rows)]
        metrics = engine.forward_backward(batches)
        metrics |= engine.optim_step()
        generator.update(engine.version)
        observers.step_end(engine.step, metrics)
        run.step_done(engine.step)
        if run.checkpoint_due(engine.step):
            run.save(engine, data)
    run.finish(engine, data)
    teacher.close()


def completed(
    config: DistilOnPolicy, engine: Engine, data: PromptSource, generator: Generator, seq_len: int
) -> list[tuple[Sequence[int], Completion]]:
    """Return this rank's prompts of a step, each with one of its completions; seeds are of (seed, step,
    prompt, sample)."""
    asked = data.take(config.prompts)
    share = len(asked) // engine.mesh.degrees.dp
    first = engine.mesh.dp_rank * share
    own = [list(one.tokens) for one in asked[first : first + share]]
    seeds = [
        [seed_of(engine.settings.seed, engine.step, prompt, sample) for sample in range(config.samples)]
        for prompt in range(first, first + share)
    ]
    made = generator.sample(own, seeds, [seq_len + 1 - len(prompt) for prompt in own])
    return [(prompt, one) for prompt, several in zip(own, made, strict=True) for one in several]


def seed_of(*numbers: int) -> int:
    """Return a seed below 2^63 made of numbers."""
    return xxhash.xxh3_64_intdigest(repr(numbers).encode()) >> 1


def batch_of(written: Sequence[tuple[Sequence[int], Completion]], seq_len: int) -> Batch:
    """Return prompts with completions, one a row, of which the completions' tokens are targets."""
    tokens = torch.zeros(len(written), seq_len + 1, dtype=torch.int64)
    targets = torch.full((len(written), seq_len + 1), IGNORE)
    for row, (prompt, completion) in enumerate(written):
        whole = torch.tensor([*prompt, *completion.tokens])
        tokens[row, : len(whole)] = whole
        targets[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    return Batch({"tokens": tokens[:, :-1].contiguous(), "targets": targets[:, 1:].contiguous()})
