"""The same weights and data give the same losses, gradients and weights on every layout.

Each layout does three optimizer steps and is compared with one rank, tensor by tensor. The reference itself
is compared with a plain loop, without titan's engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.engine import cases
from tests.engine.cases import Layout
from tests.ranks import runs
from tests.ranks.comparison import Row, difference
from tests.ranks.conftest import ROWS
from titan_float8 import Float8Linear
from titancli.losses import CrossEntropyFull
from titancli.recipe.stages import SCHEDULES

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    ranks: int
    layout: Layout
    optimizer: str = "sgd"
    tolerance: float = TOLERANCE


def case(ranks: int, optimizer: str = "sgd", tolerance: float = TOLERANCE, **layout: Any) -> Case:
    """Degrees by their own names (`tp=2`), everything else as in `Layout`."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    mesh = {name: layout.pop(name) for name in names if name in layout}
    return Case(ranks, Layout(mesh=mesh, **layout), optimizer, tolerance)


FULL_AC = {"mode": "full"}
BY_OP = {"mode": "selective", "selective_ac_option": "op"}
SECOND = {"mode": "selective", "selective_ac_option": "2"}
MANY_HEADS = {"n_kv_heads": 4}

DATA = {
    "accumulation": case(1, micro_batches=4),
    "DDP2": case(2, dp_replicate=2),
    "FSDP2": case(2, "adam", dp_shard=2),
    "FSDP4": case(4, dp_shard=4),
    "HSDP2x2": case(4, "adam", dp_replicate=2, dp_shard=2),
    "FSDP2, accumulation": case(2, dp_shard=2, micro_batches=2),
    "FSDP2, accumulation unsharded": case(2, dp_shard=2, micro_batches=2, accumulate="unsharded"),
    "HSDP2x2, accumulation": case(4, dp_replicate=2, dp_shard=2, micro_batches=2),
    "HSDP2x2, accumulation unsharded": case(
        4, dp_replicate=2, dp_shard=2, micro_batches=2, accumulate="unsharded"
    ),
    "FSDP2, always reshard": case(2, dp_shard=2, reshard="always"),
    "FSDP2, never reshard": case(2, dp_shard=2, reshard="never"),
    "FSDP2, AC full": case(2, dp_shard=2, activation_checkpoint=FULL_AC),
    "FSDP2, AC by op": case(2, dp_shard=2, activation_checkpoint=BY_OP),
    "FSDP2, AC every 2nd": case(2, dp_shard=2, activation_checkpoint=SECOND),
    "FSDP2, compiled": case(2, "adam", dp_shard=2, compile="aot_eager"),
    "FSDP2, compiled, AC by op": case(2, dp_shard=2, compile="aot_eager", activation_checkpoint=BY_OP),
    "FSDP2, full logits": case(2, dp_shard=2, loss=CrossEntropyFull()),
    "FSDP2, documents": case(2, dp_shard=2, documents=True),
    "FSDP2, tied": case(2, "adam", dp_shard=2, tied=True),
    "FSDP2, bf16": case(2, dp_shard=2, dtype="bfloat16", tolerance=0.05),
}
TENSOR = {
    "TP2": case(2, "adam", tp=2),
    "TP4": case(4, tp=4, model=MANY_HEADS),
    "FSDP2xTP2": case(4, "adam", dp_shard=2, tp=2),
    "DDP2xTP2": case(4, dp_replicate=2, tp=2),
    "TP2, accumulation": case(2, tp=2, micro_batches=2),
    "FSDP2xTP2, accumulation": case(4, dp_shard=2, tp=2, micro_batches=2),
    "TP2, tied": case(2, tp=2, tied=True),
    "FSDP2xTP2, tied": case(4, dp_shard=2, tp=2, tied=True),
    "TP2, AC by op": case(2, tp=2, activation_checkpoint=BY_OP),
    "TP2, documents": case(2, tp=2, documents=True),
    "TP2, full logits": case(2, tp=2, loss=CrossEntropyFull()),
    "TP2, compiled": case(2, tp=2, compile="aot_eager"),
    "FSDP2xTP2, compiled, AC full": case(
        4, dp_shard=2, tp=2, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
    "TP2, bf16": case(2, tp=2, dtype="bfloat16", tolerance=0.05),
}
CONTEXT = {
    "CP2, allgather": case(2, "adam", cp=2),
    "CP2, ulysses": case(2, "adam", cp=2, context_parallel="ulysses"),
    "CP2, ring": case(2, cp=2, context_parallel="ring"),
    "CP4, allgather": case(4, cp=4),
    "CP2xFSDP2, allgather": case(4, "adam", cp=2, dp_shard=2),
    "CP2xFSDP2, ulysses": case(4, cp=2, dp_shard=2, context_parallel="ulysses"),
    "CP2xFSDP2, accumulation": case(4, cp=2, dp_shard=2, micro_batches=2),
    "CP2xTP2, allgather": case(4, cp=2, tp=2),
    "CP2xTP2, compiled, AC by op": case(4, cp=2, tp=2, compile="aot_eager", activation_checkpoint=BY_OP),
    "CP2, documents": case(2, cp=2, documents=True),
    "CP2, full logits": case(2, cp=2, loss=CrossEntropyFull()),
    "CP2, bf16": case(2, cp=2, dtype="bfloat16", tolerance=0.05),
}
MORE_LAYERS = {"n_layers": 8}
PIPELINE = {
    **{f"PP2, {name}": case(2, "adam", pp=2, pipeline={"schedule": name}) for name in SCHEDULES},
    **{f"PP2xFSDP2, {name}": case(4, pp=2, dp_shard=2, pipeline={"schedule": name}) for name in SCHEDULES},
    "PP4": case(4, "adam", pp=4),
    "PP4, Interleaved1F1B": case(4, pp=4, model=MORE_LAYERS, pipeline={"schedule": "Interleaved1F1B"}),
    "PP4, DualPipeV": case(4, pp=4, model=MORE_LAYERS, pipeline={"schedule": "DualPipeV"}),
    "PP2xDDP2": case(4, pp=2, dp_replicate=2),
    "PP2xDDP2, ZBVZeroBubble": case(4, pp=2, dp_replicate=2, pipeline={"schedule": "ZBVZeroBubble"}),
    "PP2xTP2": case(4, "adam", pp=2, tp=2),
    "PP2xTP2, ZBVZeroBubble": case(4, pp=2, tp=2, pipeline={"schedule": "ZBVZeroBubble"}),
    "PP2xCP2": case(4, pp=2, cp=2),
    "PP2xCP2, InterleavedZeroBubble": case(
        4, pp=2, cp=2, documents=True, pipeline={"schedule": "InterleavedZeroBubble"}
    ),
    "PP2xFSDP2, accumulation": case(4, pp=2, dp_shard=2, micro_batches=2),
    "PP2xFSDP2, always reshard": case(4, pp=2, dp_shard=2, reshard="always"),
    "PP2, two rows at a time, documents": case(2, pp=2, documents=True, pipeline={"microbatch_size": 2}),
    "PP2, AC by op": case(2, pp=2, activation_checkpoint=BY_OP),
    "PP2xFSDP2, compiled, AC full": case(
        4, pp=2, dp_shard=2, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
    "PP2, bf16": case(2, pp=2, dtype="bfloat16", tolerance=0.05),
    "PP2xFSDP2, DualPipeV, bf16": case(
        4, pp=2, dp_shard=2, dtype="bfloat16", tolerance=0.05, pipeline={"schedule": "DualPipeV"}
    ),
}
# Sizes whose parts are multiples of 16 under TP, so that the same layers are converted.
WIDE = {"dim": 64, "hidden_dim": 128}
FLOAT8 = {
    f"{name}, float8 {recipe}": case(
        4,
        **mesh,
        model=WIDE,
        # Sums in another order may round to another float8 number here and there.
        tolerance=2e-2,
        converters=[Float8Linear(recipe=recipe, skip=["output"])],
    )
    for name, mesh in {"FSDP4": {"dp_shard": 4}, "FSDP2xTP2": {"dp_shard": 2, "tp": 2}}.items()
    for recipe in ("tensorwise", "rowwise")
}
LAYOUTS: dict[str, Case] = {**DATA, **TENSOR, **CONTEXT, **PIPELINE, **FLOAT8}


def reference_layout(layout: Layout) -> Layout:
    """The same model and numerics on one rank, eager, without recomputation, in one micro-batch; or, where
    scales are taken from a rank's rows (float8), in as many as there are ranks with rows of their own."""
    dp = layout.mesh.get("dp_replicate", 1) * layout.mesh.get("dp_shard", 1)
    return Layout(
        micro_batches=dp * layout.micro_batches if layout.converters else 1,
        model=layout.model,
        tied=layout.tied,
        documents=layout.documents,
        converters=layout.converters,
    )


@pytest.fixture(scope="module")
def one_rank(ranks):
    """`one_rank(case)`: the run on one rank that a case is compared with; each is run once."""
    known: dict[str, dict[str, torch.Tensor]] = {}

    def run(case: Case) -> dict[str, torch.Tensor]:
        layout = reference_layout(case.layout)
        key = f"{layout} {case.optimizer}"
        if key not in known:
            known[key] = ranks(1, runs.run, layout, case.optimizer)[0]
        return known[key]

    return run


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_answer_of_one_rank(ranks, one_rank, name):
    this = LAYOUTS[name]
    reference = one_rank(this)
    began = time.perf_counter()
    results = ranks(this.ranks, runs.run, this.layout, this.optimizer)
    seconds = time.perf_counter() - began
    found = difference(results, reference)
    ROWS.append(Row(name, this.ranks, this.optimizer, found, this.tolerance, seconds))
    assert found.largest <= this.tolerance, f"{found.worst}: {found}"


def test_a_wrong_scale_is_noticed(ranks, one_rank):
    """FSDP2's own averaging, left on, halves the gradients on two ranks."""
    this = LAYOUTS["FSDP2"]
    found = difference(
        ranks(2, runs.run_divided_by_ranks, this.layout, "sgd"), one_rank(replace(this, optimizer="sgd"))
    )
    assert found.gradient == pytest.approx(0.5, abs=0.01)
    assert found.largest > 1000 * TOLERANCE


def test_one_rank_gives_the_answer_of_a_plain_loop(ranks, one_rank):
    from titancli.models.llama3 import Llama3Model

    weights = ranks(1, cases.initial_weights, Layout())[0]
    model = Llama3Model(cases.recipe(Layout()).model)
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=runs.LR)
    expected: dict[str, torch.Tensor] = {}
    for step in range(runs.STEPS):
        batch = cases.whole_batch(step)
        logits = model(batch["tokens"]).flatten(0, 1)
        loss = cross_entropy(logits, batch["targets"].flatten(), ignore_index=-100)
        loss.backward()
        expected[f"loss {step}"] = loss.detach()
        expected |= {f"gradient {step} {n}": p.grad.clone() for n, p in model.named_parameters()}
        expected[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected |= {f"weight {step} {n}": p.detach().clone() for n, p in model.named_parameters()}
    assert difference([one_rank(Case(1, Layout()))], expected).largest <= TOLERANCE


def test_tied_weights_are_one(one_rank):
    assert not any("output.weight" in name for name in one_rank(LAYOUTS["FSDP2, tied"]))


@pytest.mark.parametrize("name", ["FSDP2", "HSDP2x2", "TP2", "FSDP2xTP2", "PP2, ZBVZeroBubble", "PP4"])
def test_initial_values_do_not_depend_on_the_layout(ranks, name):
    reference = ranks(1, cases.initial_weights, Layout())[0]
    results = ranks(LAYOUTS[name].ranks, cases.initial_weights, LAYOUTS[name].layout)
    assert set().union(*results) == reference.keys()
    for key, value in ((key, value) for result in results for key, value in result.items()):
        assert torch.equal(value, reference[key]), key
