"""Whatever raises in the middle of a verb, the next step is that of an engine to which nothing has happened;
or the engine says that it is unusable."""

from __future__ import annotations

import pytest

from tests.parallel.dropout_cases import Dropping
from tests.ranks import raising
from tests.ranks.layouts import BY_OP, EIGHT, FULL_AC, Case, case
from tests.rows import rows

pytestmark = pytest.mark.ranks

LAYOUTS: dict[str, Case] = {
    "one rank, unsharded, dropout": case(
        1,
        micro_batches=2,
        accumulate="unsharded",
        activation_checkpoint=FULL_AC,
        converters=[Dropping()],
    ),
    "FSDP2, unsharded": case(2, dp_shard=2, micro_batches=2, accumulate="unsharded"),
    "EP2 of TP2": case(2, config=EIGHT, tp=2, ep=2),
    "PP2": case(2, pp=2, activation_checkpoint=FULL_AC),
}
SLOW: dict[str, Case] = {
    "one rank": case(1, micro_batches=2),
    "DDP2": case(2, dp_replicate=2, micro_batches=2),
    "TP2": case(2, tp=2, micro_batches=2),
    "EP2 of TP2, two micro-batches": case(2, config=EIGHT, tp=2, ep=2, micro_batches=2),
    "EP2": case(2, config=EIGHT, dp_shard=2, ep=2, micro_batches=2),
    "CP2": case(2, cp=2, micro_batches=2),
    "FSDP2, always reshard": case(2, dp_shard=2, reshard="always", micro_batches=2),
    "FSDP2, never reshard, AC full": case(
        2, dp_shard=2, reshard="never", micro_batches=2, activation_checkpoint=FULL_AC
    ),
    "FSDP2, tied": case(2, dp_shard=2, tied=True, micro_batches=2),
    "FSDP2, bf16": case(2, dp_shard=2, dtype="bfloat16", micro_batches=2, accumulate="unsharded"),
    "HSDP2x2": case(4, dp_replicate=2, dp_shard=2, micro_batches=2),
    "HSDP2x2, unsharded": case(4, dp_replicate=2, dp_shard=2, micro_batches=2, accumulate="unsharded"),
    "FSDP2xTP2, AC full": case(4, dp_shard=2, tp=2, micro_batches=2, activation_checkpoint=FULL_AC),
    "CP2, ulysses, AC full": case(2, cp=2, context_parallel="ulysses", activation_checkpoint=FULL_AC),
    "EP2xDDP2, unsharded, AC full": case(
        4,
        config=EIGHT,
        dp_replicate=2,
        dp_shard=2,
        ep=2,
        micro_batches=2,
        accumulate="unsharded",
        activation_checkpoint=FULL_AC,
    ),
    "FSDP2, compiled, AC by op": case(
        2, dp_shard=2, micro_batches=2, compile="aot_eager", activation_checkpoint=BY_OP
    ),
    **{
        f"PP2, {name}": case(2, pp=2, pipeline={"schedule": name})
        for name in ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
    },
    "PP2xFSDP2": case(4, pp=2, dp_shard=2),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_verb_that_raises_leaves_no_trace_or_says_so(ranks, tmp_path, record_property, name):
    this = {**LAYOUTS, **SLOW}[name]
    found, *others = ranks(this.ranks, raising.run, this.layout, tmp_path)
    record_property("raised", {"layout": name, "rows": [list(row) for row in found]})
    assert all(other == found for other in others), "ranks differ"
    wrong = [row for row in found if row.found not in (raising.EQUAL, raising.REFUSES, raising.NOT_THERE)]
    assert not wrong
    refusing = {row.verb for row in found if row.found == raising.REFUSES}
    assert refusing == {"optim_step", "load"} | ({"forward_backward"} if "PP2" in name else set())


@pytest.mark.parametrize("verb", ["evaluate", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_pipeline_that_raises_without_gradients_is_unusable(ranks, tmp_path, verb):
    for found in ranks(2, raising.stages_alone, case(2, pp=2).layout, verb, tmp_path):
        assert found == raising.REFUSES


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("by_hand", rows([False, True], slow=(True,)))
def test_nothing_is_left_of_a_first_forward_that_raised(ranks, world, by_hand):
    """`by_hand`: as on a torch whose FSDP2 has no `reset_iter_state`."""
    assert ranks(world, raising.first_of_all, world, by_hand) == [[]] * world
