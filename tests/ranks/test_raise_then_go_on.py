"""Whatever raises in the middle of a verb, the next step is that of an engine to which nothing has happened;
or the engine says that it is unusable."""

from __future__ import annotations

import pytest

from tests.ranks import raising
from tests.ranks.conftest import RAISED
from tests.ranks.layouts import BY_OP, EIGHT, FULL_AC, Case, case

pytestmark = pytest.mark.ranks

LAYOUTS: dict[str, Case] = {
    "one rank": case(1, micro_batches=2),
    "one rank, unsharded": case(1, micro_batches=2, accumulate="unsharded", activation_checkpoint=FULL_AC),
    "DDP2": case(2, dp_replicate=2, micro_batches=2),
    "FSDP2, unsharded": case(2, dp_shard=2, micro_batches=2, accumulate="unsharded"),
    "TP2": case(2, tp=2, micro_batches=2),
    "CP2": case(2, cp=2, micro_batches=2),
    "EP2": case(2, config=EIGHT, dp_shard=2, ep=2, micro_batches=2),
}
SLOW: dict[str, Case] = {
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
}


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_verb_that_raises_leaves_no_trace_or_says_so(ranks, tmp_path, name):
    this = {**LAYOUTS, **SLOW}[name]
    found, *others = ranks(this.ranks, raising.run, this.layout, tmp_path)
    RAISED[name] = found
    assert all(other == found for other in others), "ranks differ"
    wrong = [row for row in found if row.found not in (raising.EQUAL, raising.REFUSES, raising.NOT_THERE)]
    assert not wrong
    assert {row.verb for row in found if row.found == raising.REFUSES} == {"optim_step", "load"}
