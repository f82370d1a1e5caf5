"""Kahneman-Tversky optimization (KTO, arXiv 2402.01306): the loop of pretraining, on batches that have
what their answers are compared with.

The loss compares what an answer gains over the reference with the KL divergence of the model from it. That
is estimated, as in the paper's section 4.1, from mismatched answers: each prompt of a step followed by the
answer to another one. A step is all that the ranks train on between two updates, however it is dealt to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from titancli import IGNORE, Batch, TitanError, phase
from titancli.data.fitting import Conversation, row_of
from titancli.distributed.together import Ranks
from titancli.loops.pretrain import pretrain
from titancli.loops.reference import Reference

if TYPE_CHECKING:
    from titan_preference import KtoLoop
    from titancli import Engine
    from titancli.data.loader import Loader
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers

STEP = 64
"""Rows are as long as a multiple of this where they are not padded to seq_len."""


def build(
    config: KtoLoop, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    """
    Raises:
        TitanError: a step has a single answer, of which there is nothing to estimate the divergence from.
    """
    answers = run.batch_shape[0] * engine.mesh.degrees.dp * engine.settings.accumulation
    if answers < 2 and "kl" in engine.loss.needs:
        raise TitanError(
            "the loss kto compares the answers of a step with each other, and a step has only one",
            hint="set training.global_batch_size to at least 2, or more: it is the sample of an estimate",
        )
    compared = Compared(engine, Reference(engine, run), run.batch_shape[1])
    if run.validation is not None:
        run.validation.prepare = lambda batch: compared([batch])[0]
    return partial(pretrain, engine, data, observers, run, compared)


class Compared:
    """Adds to the batches of a step what the loss compares with: `reference_row_logprobs` [B], and `kl` [B],
    the same number for all rows."""

    def __init__(self, engine: Engine, reference: Reference, seq_len: int) -> None:
        self._engine, self._reference, self._seq_len = engine, reference, seq_len
        self._ranks = Ranks(engine.mesh.dp_group)

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches on the device. Collective.

        Raises:
            TitanError: on all ranks, where they have different numbers of batches.
        """
        call = self._engine.call("kto")
        with call.agreed():
            call.given(f"with {len(batches)} batches")
        needed = self._engine.loss.needs
        kl = self._kl(batches) if "kl" in needed else 0.0
        found = []
        for given in batches:
            batch = dict(given.to(self._engine.device))
            if "kl" in needed:
                batch["kl"] = torch.full((given.rows,), kl, device=self._engine.device)
            batch["reference_row_logprobs"] = self._reference.log_probs(Batch(batch)).sum(1)
            found.append(Batch(batch, unit=given.unit))
        return found

    def _kl(self, batches: Sequence[Batch]) -> float:
        """Return the estimate for a step: the mean log-ratio of mismatched answers, at least 0."""
        total, number = 0.0, 0
        for batch in mismatched(batches, self._ranks, self._engine.mesh.dp_rank, self._seq_len):
            batch = batch.to(self._engine.device)
            with phase("kl"):
                ratios = self._engine.forward(batch).sum(1)
            ratios = ratios.double() - self._reference.log_probs(batch).sum(1).double()
            there = (batch["targets"] != IGNORE).any(1)
            total, number = total + float(ratios[there].sum()), number + int(there.sum())
        sums = self._ranks.gather((total, number))
        answers = sum(one for _, one in sums)
        return max(0.0, sum(one for one, _ in sums) / answers) if answers else 0.0


class Answer(NamedTuple):
    """A row, taken apart."""

    prompt: np.ndarray
    """[n] int64: what comes before the first target."""
    tokens: np.ndarray
    """[m] int64, from the first target to the last."""
    trained: np.ndarray
    """[m] bool: which of them are targets."""


def answers_of(batch: Batch) -> list[Answer | None]:
    """Return the answer of each row; None where there is no target."""
    found: list[Answer | None] = []
    rows = zip(batch["tokens"].cpu().numpy(), batch["targets"].cpu().numpy(), strict=True)
    for tokens, targets in rows:
        places = np.flatnonzero(targets != IGNORE)
        if not len(places):
            found.append(None)
            continue
        first, last = int(places[0]), int(places[-1])
        said = np.append(tokens[first + 1 : last + 1], targets[last])
        found.append(Answer(tokens[: first + 1], said, targets[first : last + 1] != IGNORE))
    return found


def mismatched(batches: Sequence[Batch], ranks: Ranks, rank: int, seq_len: int) -> list[Batch]:
    """Return batches of as many rows in which prompts are followed by the answers to other prompts.

    The answers of a step are in the order of the data: by micro-batch, and in it by rank. Each prompt gets
    the answer before its own, and the first one the last, as in TRL; the nearest one to another prompt, if
    there is any. What is longer than a row is cut; a single answer has no other, and gives no row.

    Args:
        ranks: the data-parallel ranks; collective.
        rank: which one this is.
        seq_len: the most tokens of a row.
    """
    own = [answers_of(batch) for batch in batches]
    everyones = [found for _, found in sorted(ranks.gather((rank, own)), key=lambda one: one[0])]
    order = [
        (dp, micro, row)
        for micro in range(len(batches))
        for dp, found in enumerate(everyones)
        for row, answer in enumerate(found[micro])
        if answer is not None
    ]
    step: list[Any] = [everyones[dp][micro][row] for dp, micro, row in order]
    others = another(step)
    rows: dict[tuple[int, int], Conversation] = {}
    for place, (dp, micro, row) in enumerate(order):
        if dp == rank and (other := others[place]) is not None:
            rows[micro, row] = joined(step[place].prompt, step[other], seq_len)
    return [
        _batch_of(batch, [rows.get((i, row)) for row in range(batch.rows)], seq_len)
        for i, batch in enumerate(batches)
    ]


def another(step: Sequence[Answer]) -> list[int | None]:
    """Return the index of the answer that each prompt is given; None if there is only its own."""
    prompts = [answer.prompt.tobytes() for answer in step]
    found: list[int | None] = []
    for i, prompt in enumerate(prompts):
        before = [(i - back) % len(prompts) for back in range(1, len(prompts))]
        found.append(next((j for j in before if prompts[j] != prompt), before[0] if before else None))
    return found


def joined(prompt: np.ndarray, answer: Answer, seq_len: int) -> Conversation:
    """Return a prompt with the answer to another one, cut to the length of a row."""
    tokens = np.concatenate((prompt, answer.tokens))[: seq_len + 1]
    trained = np.concatenate((np.zeros(len(prompt), bool), answer.trained))[: seq_len + 1]
    return Conversation(tokens, trained)


def _batch_of(batch: Batch, rows: Sequence[Conversation | None], seq_len: int) -> Batch:
    """Return rows, padded to seq_len if those of the batch are."""
    if batch["tokens"].shape[1] < seq_len:
        longest = max((len(row.tokens) - 1 for row in rows if row is not None), default=1)
        seq_len = min(seq_len, -(-longest // STEP) * STEP)
    made = [row_of([row] if row is not None else [], seq_len, 0) for row in rows]
    return Batch({name: torch.from_numpy(np.stack([row[name] for row in made])) for name in made[0]})
