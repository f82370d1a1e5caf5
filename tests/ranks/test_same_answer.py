"""The same weights and data give the same losses, gradients and weights on every layout.

Each layout does two optimizer steps and is compared with one rank, tensor by tensor. The reference itself
is compared with a plain loop, without titan's engine.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.engine import cases
from tests.engine.cases import Layout
from tests.ranks import runs
from tests.ranks.comparison import difference
from tests.ranks.layouts import LAYOUTS, SLOW, TOLERANCE, Case
from tests.rows import rows

pytestmark = pytest.mark.ranks


def reference_layout(layout: Layout) -> Layout:
    """The same model and numerics on one rank, eager, without recomputation, in one micro-batch; or, where
    scales are taken from a rank's rows (float8), in as many as there are ranks with rows of their own."""
    dp = layout.mesh.get("dp_replicate", 1) * layout.mesh.get("dp_shard", 1)
    return Layout(
        micro_batches=dp * layout.micro_batches if layout.converters else 1,
        model=layout.model,
        config=layout.config,
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


def features(layout: Layout) -> set[str]:
    """All that is set apart from the defaults, each once; of the degrees which of them are more than one."""
    plain = Layout()
    found = {f"degree {name}" for name, degree in layout.mesh.items() if degree > 1}
    for name in ("pipeline", "activation_checkpoint"):
        found |= {f"{name} {key}={value}" for key, value in getattr(layout, name).items()}
    for name in ("accumulate", "compile", "tied", "dtype", "reshard", "context_parallel", "documents"):
        if (value := getattr(layout, name)) != getattr(plain, name):
            found.add(f"{name} {value}")
    found |= {f"converter {converter}" for converter in layout.converters}
    return found | {f"loss {type(layout.loss).__name__}", f"model {type(layout.config).__name__}"}


def test_whatever_is_left_to_the_slow_rows_is_in_a_quick_one():
    quick = [features(this.layout) for name, this in LAYOUTS.items() if name not in SLOW]
    assert LAYOUTS.keys() >= SLOW
    for name in SLOW:
        assert features(LAYOUTS[name].layout) <= set().union(*quick), name


@pytest.mark.parametrize("name", rows(LAYOUTS, slow=SLOW))
def test_every_layout_gives_the_answer_of_one_rank(ranks, one_rank, record_property, name):
    this = LAYOUTS[name]
    reference = one_rank(this)
    began = time.perf_counter()
    results = ranks(this.ranks, runs.run, this.layout, this.optimizer)
    seconds = time.perf_counter() - began
    found = difference(results, reference)
    told = {"layout": name, "ranks": this.ranks, "optimizer": this.optimizer, "tolerance": this.tolerance}
    record_property("layout", told | {"seconds": seconds} | asdict(found))
    assert found.tie is None, f"a tie: tokens went to other experts at {found.tie}, so numbers say nothing"
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
    from titancli.models.blocks.decoder import Decoder

    weights = ranks(1, cases.initial_weights, Layout())[0]
    model = Decoder(cases.recipe(Layout()).model)
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


def pairs(case: Case) -> set[frozenset[str]]:
    """Which techniques are used together."""
    more = {name for name, degree in case.layout.mesh.items() if degree > 1}
    return {frozenset((one, other)) for one in more for other in more if one != other}


def test_each_pair_of_techniques_is_in_a_quick_row():
    quick = [pairs(case) for name, case in LAYOUTS.items() if name not in SLOW]
    assert set().union(*map(pairs, LAYOUTS.values())) <= set().union(*quick)


@pytest.mark.parametrize(
    "name",
    ["FSDP2", "HSDP2x2", "TP2", "FSDP2xTP2", "PP2, ZBVZeroBubble", "PP4", "transformers, FSDP2xTP2, tied"],
)
def test_initial_values_do_not_depend_on_the_layout(ranks, name):
    reference = ranks(1, cases.initial_weights, reference_layout(LAYOUTS[name].layout))[0]
    results = ranks(LAYOUTS[name].ranks, cases.initial_weights, LAYOUTS[name].layout)
    assert set().union(*results) == reference.keys()
    for key, value in ((key, value) for result in results for key, value in result.items()):
        assert torch.equal(value, reference[key]), key
