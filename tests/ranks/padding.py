"""The same samples in rows of any kind, on any layout: how far a step is from the step
of the samples one by one, each in a row of its own without any padding.

`python -m tests.ranks.padding_table` prints the table: loss × rows × layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.engine.cases import Layout, recipe, wholes
from tests.ranks.layouts import BY_OP, DELTA, EIGHT, FULL_AC, FURTHER, GPT_OSS, IROPE
from tests.ranks.runs import balancing_seen
from titan_ppo import Ppo
from titan_preference import DPO
from titan_rl import Grpo
from titancli import Batch, Engine, Sample
from titancli.data.fitting import Conversation, best_fit, row_of
from titancli.data.rows import Row, joined, without_padding
from titancli.losses import SFT
from titancli.models.blocks.moe import moe_layers

WIDE, NARROW = 128, 32
"""Lengths of padded and of packed rows."""
TARGETS_END = (5, 5, 17, 17, 9, 9, 12, 12)
"""Where the last target of each sample is, with the same in both rows of a pair."""
TAILS = (0, 2, 0, 1, 0, 0, 3, 0)
"""Tokens after it, such as a turn of the user, which nothing learns from."""
FILLER = 3
COEFFICIENTS = {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.03}
BOTH = replace(EIGHT, moe=replace(EIGHT.moe, **COEFFICIENTS))
"""Balancing by a bias, and both losses of routers."""
LOSSES: dict[str, Any] = {"sft": SFT(), "dpo": DPO(beta=0.3), "grpo": Grpo(), "ppo": Ppo()}
COLUMNS = {
    "sft": ("weights",),
    "dpo": (),
    "grpo": ("advantages", "old_logprobs"),
    "ppo": ("advantages", "old_logprobs", "old_values", "returns"),
}
ALL, ONE = tuple(LOSSES), ("sft",)
PAIRS_OF_ROWS: dict[str, Any] = {"microbatch_size": 2}


@dataclass(frozen=True)
class Place:
    """A layout of the table, and the losses that `make test` tries on it."""

    ranks: int
    layout: Layout
    quick: tuple[str, ...] = ONE


def on(ranks: int, quick: tuple[str, ...] = ONE, *, config: Any = BOTH, **options: Any) -> Place:
    """Degrees by their own names (`tp=2`), everything else as in `Layout`."""
    names = ("pp", "dp_shard", "cp", "tp", "ep")
    mesh = {name: options.pop(name) for name in names if name in options}
    return Place(ranks, Layout(mesh, config=config, pipeline=PAIRS_OF_ROWS, **options), quick)


def with_losses(config: Any) -> Any:
    return replace(config, moe=replace(config.moe, **COEFFICIENTS))


LAYOUTS = {
    "1 rank": on(1, ALL),
    "FSDP2": on(2, dp_shard=2),
    "EP2": on(2, ("sft", "dpo"), dp_shard=2, ep=2),
    "TP2": on(2, tp=2),
    "CP2": on(2, cp=2),
    "PP2": on(2, pp=2),
    "EP2, AC full": on(2, dp_shard=2, ep=2, activation_checkpoint=FULL_AC),
    "1 rank, AC by op": on(1, activation_checkpoint=BY_OP),
    "llama4": on(1, config=with_losses(IROPE)),
    "gpt_oss": on(1, config=with_losses(GPT_OSS)),
    "mtp": on(1, config=with_losses(FURTHER)),
    "mtp, CP2xTP2": on(4, config=with_losses(FURTHER), cp=2, tp=2),
    "qwen3_next": on(1, config=with_losses(DELTA)),
}
SLOW = {"EP2, AC full", "llama4", "gpt_oss", "mtp, CP2xTP2", "qwen3_next"}
"""Left to `make test-all`, as are most losses on two ranks."""


@dataclass(frozen=True)
class Text:
    """A sample, and what losses read of each of its tokens."""

    number: int
    tokens: np.ndarray
    trained: np.ndarray
    columns: dict[str, np.ndarray]

    @property
    def end(self) -> int:
        return int(np.flatnonzero(self.trained)[-1])

    def up_to_last_target(self) -> Text:
        kept = slice(self.end + 1)
        columns = {name: values[kept] for name, values in self.columns.items()}
        return Text(self.number, self.tokens[kept], self.trained[kept], columns)

    @property
    def conversation(self) -> Conversation:
        return Conversation(self.tokens, self.trained)


def texts() -> list[Text]:
    drawn = np.random.default_rng(3)
    found = []
    for number, (end, tail) in enumerate(zip(TARGETS_END, TAILS, strict=True)):
        count = end + tail
        trained = drawn.random(count) < 0.7
        trained[: end // 3], trained[end - 1], trained[end:] = False, True, False
        columns = {
            "weights": trained * np.exp(drawn.normal(size=count)),
            "advantages": trained * drawn.normal(size=count),
            "old_logprobs": trained * (drawn.normal(size=count) * 0.3 - 4.2),
            "old_values": trained * drawn.normal(size=count),
            "returns": trained * drawn.normal(size=count),
        }
        found.append(Text(number, drawn.integers(0, 64, count), trained, columns))
    return found


# ------------------------------------------------------------------------------------------------- rows


def row(some: Sequence[Text], length: int, loss: str, *, documents: bool = False) -> Row:
    made = row_of([one.conversation for one in some], length, FILLER, documents=documents)
    for name in COLUMNS[loss]:
        made[name], at = np.zeros(length, np.float32), 0
        for one in some:
            made[name][at : at + len(one.tokens) - 1] = one.columns[name][1:]
            at += len(one.tokens) - 1
    return made


def stacked(rows: Sequence[Row], loss: str, some: Sequence[Text] = ()) -> Batch:
    tensors = {name: torch.from_numpy(np.stack([one[name] for one in rows])) for name in rows[0]}
    if loss == "dpo":
        said = [-4.2 * one.trained.sum() + 0.1 * one.number for one in some]
        tensors["reference_row_logprobs"] = torch.tensor(said + [0.0] * (len(rows) - len(said))).float()
    return Batch(tensors, unit=2 if loss == "dpo" else 1)


def one_by_one(some: Sequence[Text], loss: str, dp: int) -> list[Batch]:
    """Without padding: each sample, or pair, up to its last target in a batch of its own."""
    unit = 2 if loss == "dpo" else 1
    pieces = [some[at : at + unit] for at in range(0, len(some), unit)]
    cut = [[one.up_to_last_target() for one in piece] for piece in pieces]
    return [stacked([row([one], one.end, loss) for one in piece], loss, piece) for piece in cut]


def to_seq_len(some: Sequence[Text], loss: str, dp: int) -> list[Batch]:
    """`padding = "seq_len"`."""
    return [stacked([row([one], WIDE, loss) for one in some], loss, some)]


def to_longest(some: Sequence[Text], loss: str, dp: int) -> list[Batch]:
    """`padding = "longest"`."""
    [batch] = to_seq_len(some, loss, dp)
    return [Batch(without_padding(dict(batch)), unit=batch.unit)]


def to_none(some: Sequence[Text], loss: str, dp: int) -> list[Batch]:
    """`padding = "none"`, in two micro-batches of one joined row."""
    halves, filler = (some[: len(some) // 2], some[len(some) // 2 :]), row([], WIDE, loss)
    rows = [joined([row([one], WIDE, loss) for one in half], filler) for half in halves]
    return [stacked([one], loss) for one in rows]


def packed(some: Sequence[Text], loss: str, dp: int) -> list[Batch]:
    """Rows of several documents, best fit first, each a micro-batch; and rows of nothing."""
    bins = best_fit([len(one.tokens) - 1 for one in some], NARROW)
    rows = [row([some[i] for i in one], NARROW, loss, documents=True) for one in bins]
    rows += [row([], NARROW, loss, documents=True)] * (6 // dp - len(rows))
    return [stacked([one], loss) for one in rows]


def split(some: Sequence[Text], loss: str, dp: int) -> list[Batch]:
    """Padded rows in micro-batches of two."""
    [batch] = to_seq_len(some, loss, dp)
    return batch.split(2)


def with_fillers(some: Sequence[Text], loss: str, dp: int) -> list[Batch]:
    """The last batch of an epoch, filled up with rows of nothing."""
    filler = [row([], WIDE, loss)] * (4 // dp)
    return [stacked([*(row([one], WIDE, loss) for one in some), *filler], loss, some)]


ROWS: dict[str, Callable[[Sequence[Text], str, int], list[Batch]]] = {
    "padding = seq_len": to_seq_len,
    "padding = longest": to_longest,
    "padding = none": to_none,
    "packed, micro-batches": packed,
    "micro-batches": split,
    "filler rows": with_fillers,
}
OF_PAIRS = [name for name in ROWS if name not in ("padding = none", "packed, micro-batches")]
BUDGETS: dict[str, int | None] = {"samples": None, "samples, budget 64": 64, "samples, budget 200": 200}
ONE_HAS_ALL = "samples, a rank without any"
SHARED_ROWS = {"padding = none", "packed, micro-batches", *BUDGETS, ONE_HAS_ALL}
"""Rows of several documents."""


def sample(one: Text, loss: str) -> Sample:
    more = {
        name: one.columns[name]
        for name in COLUMNS[loss]
        if name not in ("weights", "advantages", "old_logprobs")
    }
    mask = one.columns["weights"] if loss == "sft" else one.trained.astype(float)
    values = (one.columns["old_logprobs"], one.columns["advantages"])
    return Sample(one.tokens, mask, *(v.astype(np.float32) for v in values), extra=more)


# ------------------------------------------------------------------------------------------------- steps


Found = dict[str, Tensor]
"""`loss`, `tokens`, `targets`, gradients divided by the weight, and of each layer `routes` (tokens of each
expert) and `bias` after the step."""


def step(engine: Engine, given: Any, loss: Any, **how: Any) -> Found:
    """Return the numbers of a step that leaves the weights as they are."""
    result = engine.forward_backward(given, loss, **how)
    metrics = getattr(result, "metrics", result)
    assert engine.pending is not None
    weight = engine.pending.weight
    named = [(n, p.grad / weight) for n, p in engine.named_parameters() if p.grad is not None]
    found = {name: torch.as_tensor(metrics[name]).float().clone() for name in ("loss", "tokens", "targets")}
    found |= {f"gradient {name}": value for name, value in wholes(named).items()}
    with balancing_seen() as seen:
        engine.optim_step(lr=0.0)
    for part in engine.parts:
        for layer in moe_layers(part).values():
            layer.clear_bias()
    return found | {key.replace("weight 0", "bias"): value for key, value in seen.items()}


def steps(layout: Layout, losses: Sequence[str]) -> dict[tuple[str, str], Found]:
    """Return the step of each loss on each kind of rows."""
    layout, found = replace(layout, loss=LOSSES["ppo" if "ppo" in losses else "sft"]), {}
    with Engine.build(recipe(layout, seq_len=WIDE)) as engine:
        rank, dp, every = engine.dp_rank, engine.dp_size, texts()
        mine = [every[at] for at in range(len(every)) if at // 2 % dp == rank]
        for loss in losses:
            given = None if loss == "ppo" else LOSSES[loss]
            if engine.mesh.degrees.world == 1:
                found[loss, "one by one"] = step(engine, one_by_one(every, loss, 1), given)
            for name in OF_PAIRS if loss == "dpo" else ROWS:
                batches = ROWS[name](mine, loss, dp)
                found[loss, name] = step(engine, batches, given)
            nothing = stacked([row([], WIDE, loss)] * len(every), loss)
            own = to_seq_len(every, loss, dp) if rank == 0 else [nothing]
            found[loss, "a rank without rows"] = step(engine, [*own, nothing], given)
            if loss == "dpo":
                continue
            samples = [sample(one, loss) for one in every]
            for name, budget in BUDGETS.items():
                found[loss, name] = step(engine, samples, given, budget=budget)
            apart = samples if rank == 0 else []
            found[loss, ONE_HAS_ALL] = step(engine, apart, given, shared=False)
    return found


def differences(found: Found, expected: Found) -> dict[str, float]:
    """Return the largest relative difference of each kind."""
    largest: dict[str, float] = {}
    for name, value in found.items():
        reference = expected[name]
        error = float((value - reference).norm() / reference.norm().clamp(min=1e-12))
        kind = name.split(" ")[0]
        largest[kind] = max(largest.get(kind, 0.0), error if error == error else float("inf"))
    return largest
