"""What should not change a step does not: how its rows are ordered, split, padded, named and numbered.

Models, sizes, losses and data are drawn at random; a case that fails is printed with all that it was drawn
of. Numbers may differ by rounding: sums are taken in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.cases import wholes
from tests.rows import rows
from titan_families import DeepSeekV3, Llama4
from titan_preference import DPO
from titan_rl import Cispo, Grpo, Gspo, ImportanceSampling
from titancli import Batch, Engine, TitanError
from titancli.distributed.local import local
from titancli.losses import SFT, CrossEntropy, CrossEntropyFull
from titancli.models import GptOss, Llama3, Qwen3
from titancli.models.sections import MoE
from titancli.optimizers import AdamW
from titancli.protocols.result import LossResult
from titancli.recipe.schema import ActivationCheckpoint, Mesh, Pipeline, Stability, Training
from titancli.registry.component import build

VOCABULARY, LENGTH, ROOM = 48, 12, 8
"""Rows are LENGTH long, and with what they are padded by LENGTH + ROOM at most."""
CLOSE = 2e-5
"""‖Δ‖ / ‖reference‖ of a tensor, or of all where the tensor's own is small beside it."""

SIZES: dict[str, Any] = dict(dim=16, n_layers=2, vocab_size=VOCABULARY, max_seq_len=64)
ROUTED: dict[str, Any] = dict(num_experts=4, top_k=2, hidden_dim=8, score_before_experts=False)
MODELS: dict[str, Callable[[random.Random], Any]] = {
    "llama3": lambda r: Llama3(
        **SIZES, n_heads=4, n_kv_heads=r.choice([1, 2, 4]), hidden_dim=24, tied=r.choice([True, False])
    ),
    "qwen3": lambda r: Qwen3(
        **SIZES,
        n_heads=2,
        n_kv_heads=r.choice([1, 2]),
        head_dim=8,
        moe=MoE(**ROUTED, score_func="softmax", route_norm=r.choice([True, False])),
    ),
    "gpt_oss": lambda r: GptOss(
        **SIZES,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        sliding_window=r.choice([2, 5]),
        moe=MoE(**ROUTED, score_func="softmax", route_norm=True, gate_bias=True),
    ),
    "llama4": lambda r: Llama4(
        **SIZES,
        n_heads=2,
        n_kv_heads=1,
        **r.choice([{}, {"hidden_dim": 24, "interleave_moe_layer_step": 2}]),
        every_n_layers_nope=2,
        fixed_attn_block_size=r.choice([3, 4]),
        moe=MoE(**{**ROUTED, "top_k": 1, "score_before_experts": True}, num_shared_experts=1),
    ),
    "deepseek_v3": lambda r: DeepSeekV3(
        **SIZES,
        n_heads=2,
        hidden_dim=24,
        q_lora_rank=r.choice([None, 8]),
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        moe=MoE(**ROUTED, num_shared_experts=1),
    ),
}
PARTS: Any = dict(
    optimizer=AdamW(lr=1e-2, eps=1e-4),
    activation_checkpoint=ActivationCheckpoint(mode="none"),
    stability=Stability(skip_nonfinite=False, sigma=0.0),
)
TRAINING: Any = dict(steps=10, seq_len=LENGTH + ROOM, mixed_precision_param="float32", max_norm=0.7)
LOSSES: dict[str, Any] = {
    "cross_entropy": CrossEntropy(),
    "cross_entropy_full": CrossEntropyFull(),
    "sft": SFT(),
    "grpo": Grpo(kl_coef=0.1),
    "dapo": Grpo(clip_high=0.28, length_norm="token"),
    "dr_grpo": Grpo(length_norm="constant", constant=9),
    "gspo": Gspo(clip_low=0.1, clip_high=0.1),
    "cispo": Cispo(clip_high=0.2),
    "importance_sampling": ImportanceSampling(kl_coef=0.1),
    "dpo": DPO(beta=0.3, label_smoothing=0.1),
}


@cache
def engine_of(name: str, seed: int) -> Engine:
    """One for all cases of a model of these sizes: each leaves it as it found it."""
    accumulate = "unsharded" if seed % 2 else "sharded"
    training = Training(**TRAINING, seed=seed, accumulate=accumulate)
    engine = Engine.of(MODELS[name](random.Random(seed)), training=training, **PARTS)
    OPEN.append(engine)
    return engine


OPEN: list[Engine] = []


@pytest.fixture(scope="module", autouse=True)
def engines_are_closed() -> Iterator[None]:
    yield
    engine_of.cache_clear()
    while OPEN:
        OPEN.pop().close()


# -------------------------------------------------------------------------------------------------- data


def rows_of(loss: str, count: int, seed: int) -> dict[str, Tensor]:
    """Rows of several documents each, with targets here and there and whatever the losses take; where nothing
    is read stands rubbish."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
    there = torch.rand(count, LENGTH, generator=generator) < 0.6
    there[:, -1] |= ~there.any(1)  # a pair needs targets in both rows
    begins = torch.rand(count, LENGTH, generator=generator) < 0.25
    begins[:, 0] = True
    places = torch.arange(LENGTH).expand(count, LENGTH)
    rubbish = torch.where(there, 0.0, torch.nan)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": torch.where(there, tokens[:, 1:], -100),
        "positions": places - torch.where(begins, places, 0).cummax(1).values,
        "document_ids": begins.cumsum(1).int(),
        "weights": normal(count, LENGTH).exp() + rubbish,
        "advantages": normal(count, LENGTH) + rubbish,
        "old_logprobs": normal(count, LENGTH) * 0.3 - 3.9 + rubbish,
        "reference_logprobs": normal(count, LENGTH) * 0.3 - 3.9 + rubbish,
        "reference_row_logprobs": normal(count) - 3.9 * there.sum(1),
    }


def picked(rows: dict[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    return {name: value[chosen] for name, value in rows.items()}


def pieces(rows: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    count = len(rows["tokens"])
    return [picked(rows, torch.arange(start, min(start + size, count))) for start in range(0, count, size)]


def padded(rows: dict[str, Tensor], by: int, id_: int) -> dict[str, Tensor]:
    """With a document of no targets at the end of each row."""
    more = dict(rows)
    for name, value in rows.items():
        if value.ndim == 2:
            filling: dict[str, Any] = {"targets": -100, "document_ids": id_, "tokens": 3}
            fill = torch.full((len(value), by), filling.get(name, torch.nan)).to(value.dtype)
            fill = torch.arange(by).expand(len(value), by) if name == "positions" else fill
            more[name] = torch.cat((value, fill), 1)
    return more


def without_targets(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows, of which nothing counts."""
    rubbish = {name: torch.full_like(x, torch.nan) for name, x in rows.items() if x.is_floating_point()}
    return rows | rubbish | {"targets": torch.full_like(rows["targets"], -100)}


def relabelled(ids: Tensor, r: random.Random, dtype: torch.dtype) -> Tensor:
    """Other numbers for the documents, other ones in each row."""
    top = torch.iinfo(dtype).max
    found = torch.empty_like(ids, dtype=dtype)
    for row in range(len(ids)):
        for label in ids[row].unique().tolist():
            found[row, ids[row] == label] = r.choice([-1, 1]) * r.randrange(1, top)
    return found


# ----------------------------------------------------------------------------------------- what is changed


@dataclass
class Calls:
    """A step: what each call of `forward_backward` is given."""

    calls: list[list[dict[str, Tensor]]]
    backwards: bool = False
    """Whether the loss reports its metrics in another order."""


def split(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    """One call with several micro-batches."""
    return Calls([pieces(rows, unit * r.choice([1, 2]))])


def called_often(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    return Calls([[piece] for piece in pieces(rows, unit)])


def called_unevenly(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    parts = pieces(rows, unit)
    cut = r.randrange(1, len(parts))
    return Calls([parts[:cut], parts[cut:]])


def reordered(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    parts = pieces(rows, unit)
    r.shuffle(parts)
    return Calls([parts])


def permuted(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    units = list(torch.arange(len(rows["tokens"])).split(unit))
    r.shuffle(units)
    return Calls([[picked(rows, torch.cat(units))]])


def longer(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    return Calls([[padded(rows, r.randrange(1, ROOM + 1), -1)]])


def unevenly_long(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    return Calls([[padded(piece, r.randrange(1, ROOM + 1), 2**31 - 1) for piece in pieces(rows, unit)]])


def with_rows_of_nothing(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    empty = without_targets(picked(rows, torch.arange(unit)))
    together = {name: torch.cat((empty[name], value)) for name, value in rows.items()}
    return Calls([[together, empty], [empty]])


def named_in_another_order(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    parts = []
    for piece in pieces(rows, unit):
        names = list(piece)
        r.shuffle(names)
        parts.append({name: piece[name] for name in names})
    return Calls([parts], backwards=True)


def of_other_integers(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    small = {"tokens": [torch.uint8, torch.int16, torch.int32], "positions": [torch.uint8, torch.int32]}
    kinds = {
        **small,
        "targets": [torch.int8, torch.int16, torch.int32],
        "document_ids": [torch.uint8, torch.int64],
    }
    return Calls([[rows | {name: rows[name].to(r.choice(dtypes)) for name, dtypes in kinds.items()}]])


def with_other_documents(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    ids = relabelled(rows["document_ids"], r, r.choice([torch.int32, torch.int64]))
    return Calls([[rows | {"document_ids": ids}]])


def not_contiguous(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    """Views of larger tensors, which nothing may write into."""
    views = {
        name: value.repeat_interleave(2, 1)[:, ::2] if value.ndim == 2 else value
        for name, value in rows.items()
    }
    return Calls([[views]])


def unpacked(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    """Every document in a row of its own, moved to its beginning. (Rows that are pairs cannot be.)"""
    parts = []
    for row in range(len(rows["tokens"])):
        ids = rows["document_ids"][row]
        for label in ids.unique().tolist():
            mine = (ids == label).nonzero()[:, 0]
            parts.append({n: v[row : row + 1][:, mine] for n, v in rows.items() if v.ndim == 2})
            if r.choice([True, False]):
                del parts[-1]["document_ids"], parts[-1]["positions"]
    return Calls([parts])


CHANGES: dict[str, Callable[[dict[str, Tensor], random.Random, int], Calls]] = {
    change.__name__: change
    for change in (
        split,
        called_often,
        called_unevenly,
        reordered,
        permuted,
        longer,
        unevenly_long,
        with_rows_of_nothing,
        named_in_another_order,
        of_other_integers,
        with_other_documents,
        not_contiguous,
        unpacked,
    )
}


def said_otherwise(rows: dict[str, Tensor], r: random.Random, unit: int) -> Calls:
    """All at once that leaves rows and batches as they are."""
    parts = []
    for piece in pieces(rows, unit):
        for change in (with_other_documents, named_in_another_order):
            [[piece]] = change(piece, r, unit).calls
        piece |= {name: piece[name].to(torch.int32) for name in ("tokens", "targets", "positions")}
        parts += not_contiguous(piece, r, unit).calls[0]
    return Calls([parts], backwards=True)


# -------------------------------------------------------------------------------------------- what follows


class Reversed:
    """A loss whose metrics come in another order."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        made = self._loss(out, batch)
        return made._replace(metrics=dict(reversed(made.metrics.items())))


def step(engine: Engine, loss: Any, given: Calls, unit: int) -> dict[str, Tensor]:
    """What an evaluation and a step come to; the engine is then as it was."""
    loss = Reversed(loss) if given.backwards else loss
    calls = [[Batch(batch, unit=unit) for batch in call] for call in given.calls]
    before = [local(p).clone() for _, p in engine.named_parameters()]
    was = wholes(engine.named_parameters())
    found = {
        f"evaluated {name}": value
        for name, value in engine.evaluate([batch for call in calls for batch in call], loss).items()
    }
    for call in calls:
        engine.forward_backward(call, loss)
    found |= {"loss": engine.pending.loss, "weight": engine.pending.weight}  # type: ignore[dict-item]
    gradients = wholes(
        (f"gradient of {name}", p.grad) for name, p in engine.named_parameters() if p.grad is not None
    )
    found["grad_norm"] = engine.optim_step()["grad_norm"]
    found |= {f"update of {name}": now - was[name] for name, now in wholes(engine.named_parameters()).items()}
    with torch.no_grad():
        for (_, parameter), mine in zip(engine.named_parameters(), before, strict=True):
            local(parameter).copy_(mine)
    engine.optimizer.state.clear()  # type: ignore[union-attr]
    engine.step = 0
    return {name: value.clone() for name, value in (found | gradients).items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for kind in ("evaluated", "loss", "weight", "grad_norm", "gradient", "update"):
        names = [name for name in expected if name.startswith(kind)]
        scale = torch.stack([expected[name].norm() for name in names]).norm()
        for name in names:
            size = torch.maximum(expected[name].norm(), 0.01 * scale)
            if kind in ("evaluated", "loss"):  # advantages cancel: what is left has the rounding of its terms
                size = size.clamp(min=0.1)
            off = (found[name] - expected[name]).norm()
            # An update is what a weight near 1 has moved by, and has the weight's rounding.
            rounding = 1.2e-7 * expected[name].numel() ** 0.5 if kind == "update" else 0.0
            assert expected[name].isfinite().all(), name
            assert off <= CLOSE * size + rounding, (
                f"{name}: {found[name].norm()} in place of {expected[name].norm()}, off by {off}"
            )


def check(model: str, sizes: int, loss: str, change: str, count: int, seed: int) -> None:
    engine, unit = engine_of(model, sizes), 2 if loss == "dpo" else 1
    rows = rows_of(loss, 2 * count, seed)
    made = build(LOSSES[loss])
    expected = step(engine, made, Calls([[rows]]), unit)
    assert_close(step(engine, made, CHANGES[change](rows, random.Random(seed), unit), unit), expected)


# ------------------------------------------------------------------------------------------------- layouts

LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"mesh": Mesh(dp_shard=2)},
    "replicated": {"mesh": Mesh(dp_replicate=2, dp_shard=1)},
    "tensor": {"mesh": Mesh(dp_shard=1, tp=2)},
    "context": {"mesh": Mesh(dp_shard=1, cp=2)},
    "stages": {"mesh": Mesh(dp_shard=1, pp=2), "pipeline": Pipeline(microbatch_size=2)},
}
ON_LAYOUTS = (called_often, permuted, with_rows_of_nothing, said_otherwise)


def on_layout(name: str, losses: list[str], seed: int) -> list[str]:
    """What a step depends on and should not; the ranks that differ in data give different rows."""
    wrong, parts = [], {**PARTS, **LAYOUTS[name]}
    r = random.Random(seed)
    model = Llama3(**SIZES, n_heads=4, n_kv_heads=2, hidden_dim=24)
    with Engine.of(model, **parts, training=Training(**TRAINING, seed=seed)) as engine:
        dp, mine = engine.mesh.degrees.dp, engine.mesh.dp_rank
        for loss in losses:
            whole_step = rows_of(loss, 8, seed)
            # A call is 4 rows: 2 micro-batches of a pipeline; and a rank has its share of the rows.
            shares = pieces(whole_step, 8 // dp)
            expected = step(engine, build(LOSSES[loss]), Calls([pieces(shares[mine], 4)]), 2)
            for change in ON_LAYOUTS:
                given = change(shares[(mine + 1) % dp], random.Random(r.random()), 4)
                try:
                    assert_close(step(engine, build(LOSSES[loss]), given, 2), expected)
                except (AssertionError, TitanError) as error:
                    wrong.append(f"{loss}, {change.__name__}: {error}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("name", rows(LAYOUTS, slow=["stages"]))
def test_a_step_of_two_ranks_depends_on_it_neither(ranks: Any, name: str) -> None:
    losses = ["sft", "gspo", "dpo"] if name in ("sharded", "stages") else ["grpo"]
    assert ranks(2, on_layout, name, losses, 5) == [[], []]


# -------------------------------------------------------------------------------------------------- cases

cases = {
    "model": st.sampled_from(sorted(MODELS)),
    "sizes": st.integers(0, 1),
    "count": st.integers(2, 3),
    "seed": st.integers(0, 2**31),
}
QUICK = settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("change", CHANGES)
@QUICK
@given(loss=st.sampled_from(sorted(LOSSES)), **cases)
def test_a_step_does_not_depend_on(change: str, loss: str, **case: Any) -> None:
    if change == "unpacked" and loss == "dpo":
        loss = "grpo"
    check(loss=loss, change=change, **case)


@pytest.mark.parametrize(
    "loss", rows(LOSSES, slow=[loss for loss in LOSSES if loss not in ("sft", "grpo", "dpo")])
)
@settings(QUICK, max_examples=2)
@given(change=st.sampled_from(sorted(CHANGES)), **cases)
def test_the_step_of_a_loss_does_not_depend_on_how_it_is_given(loss: str, change: str, **case: Any) -> None:
    if change == "unpacked" and loss == "dpo":
        change = "permuted"
    check(loss=loss, change=change, **case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(QUICK, max_examples=2_000, derandomize=False)
@given(loss=st.sampled_from(sorted(LOSSES)), change=st.sampled_from(sorted(CHANGES)), **cases)
def test_no_step_of_many_depends_on_how_it_is_given(loss: str, change: str, **case: Any) -> None:
    if not (change == "unpacked" and loss == "dpo"):
        check(loss=loss, change=change, **case)
