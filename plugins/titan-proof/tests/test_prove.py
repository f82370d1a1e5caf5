"""Injected faults are found and named; correct results are not reported."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import proof_bugs as bugs
import pytest
import torch
from test_command import LOSS

from tests.engine.test_sampling import Tilted
from tests.rows import rows
from titan_proof.prove.cases import Case
from titan_proof.prove.compare import Reference, compared, reference_of
from titan_proof.prove.measure import Results
from titan_proof.prove.pool import Pool
from titan_proof.prove.proof import prove, sentence
from titan_proof.prove.shrink import shrink
from titancli import registry
from titancli.recipe import load_recipe

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory):
    """Return `plain(recipe, case)`: the small copy's file, and the results of one process to compare with.

    Each is computed once. It includes a fault of the model's own.
    """
    files: dict[str, str] = {}
    known: dict[str, Reference] = {}

    def run(recipe: str, case: Case, bug: str | None = None, *keys: str) -> tuple[str, Reference]:
        how = tuple(case.replayed)
        if bug is not None:
            given = (run(recipe, case, None, *keys)[0], Case().overrides + case.of_model, [case.rows])
            one = ranks(1, bugs.seeded, bug, *given, "", how)[0]
            return given[0], reference_of(one, one)
        name = " ".join([recipe, *keys, *case.of_model, *how])
        if name not in files:
            folder = tmp_path_factory.mktemp(recipe)
            files[name] = str(shrink(load_recipe(recipe, keys), folder).file)
            given = (files[name], Case().overrides + case.of_model, [case.rows])
            known[name] = reference_of(
                ranks(1, bugs.seeded, None, *given, "", how)[0], ranks(1, bugs.nudged, *given, how)[0]
            )
        return files[name], known[name]

    return run


class Seed(NamedTuple):
    """A fault, where it shows, and what must be reported about it."""

    case: Case
    parameter: str | None
    says: str
    recipe: str = "llama3_debug"
    of_model: bool = False
    """Whether one process also has the setting that the fault needs, such as dropout."""
    overrides: tuple[str, ...] = ()
    converters: tuple[Any, ...] = ()


def case(*more: str, **mesh: int) -> Case:
    return Case(tuple(mesh.items()), more)


SEEDS = {
    "missing_reduction": Seed(case(tp=2), "layers.0.attention_norm.weight", "its gradient is wrong (step 1)"),
    "doubled_reduction": Seed(case(dp_shard=2), "tok_embeddings.weight", "2 times what it should be"),
    "average_of_averages": Seed(case(dp_replicate=2), "tok_embeddings.weight", "0.5 times what it should be"),
    "one_gradient_twice": Seed(case(dp_shard=2), "layers.1.attention.wk.weight", "2 times what it should be"),
    "divided_again_by_micro_batches": Seed(
        case("accumulation"), None, "the gradient norm is wrong; 0.5 times"
    ),
    "third_micro_batch_lost": Seed(
        case("accumulation"), "tok_embeddings.weight", "its gradient is wrong (step 1)"
    ),
    "stale_cast": Seed(
        case("bf16", "resume"), "tok_embeddings.weight", "step 2: forward is wrong", of_model=True
    ),
    "converters_taken_off_to_sample": Seed(
        case("generation"),
        "layers.1.attention_norm.weight",
        "the logits of token 0 for sampling differ from those of training",
        converters=(Tilted(),),
    ),
    "norm_of_a_shard": Seed(case(dp_shard=2), None, "the gradient norm is wrong"),
    # The engine's optimizer hook gets gradients divided beforehand, in the first step.
    "undivided_on_shards": Seed(
        case(dp_shard=2), "tok_embeddings.weight", "it is wrong after the optimizer step (step 2)"
    ),
    "window_off_by_one": Seed(
        case(cp=2), "layers.0.attention_norm.weight", "the output of layers.0 is the first that differs"
    ),
    "dropout_without_rng": Seed(
        case("recompute full"), "tok_embeddings.weight", "its gradient is wrong", of_model=True
    ),
    "stale_weight": Seed(case(dp_shard=2), "layers.0.attention_norm.weight", "step 2: forward is wrong"),
    "state_lost_at_resume": Seed(case("resume"), "tok_embeddings.weight", "wrong after the optimizer step"),
    "replicas_begin_apart": Seed(
        case(dp_replicate=2), "layers.0.feed_forward.w1.weight", "its value before the step is wrong (step 1)"
    ),
    "bias_on_each_rank": Seed(case(tp=2), "layers.0.attention.wo.bias", "gradient", "gpt_oss_debug"),
    "router_sees_local_tokens": Seed(
        case(dp_shard=2), "layers.0.attention_norm.weight", "layers.0", "qwen3_moe_debug"
    ),
    "rope_restarts_on_each_rank": Seed(
        case(cp=2), "layers.0.attention_norm.weight", "the output of layers.0 is the first that differs"
    ),
    "loss_divided_by_local_tokens": Seed(case(dp_shard=2), None, "the loss is wrong"),
    "pipeline_averages_micro_batches": Seed(case(pp=2), "tok_embeddings.weight", "times what it should be"),
    "experts_swapped": Seed(
        case(dp_shard=2, ep=2), "layers.0.attention_norm.weight", "the output of layers.0", "qwen3_moe_debug"
    ),
    "experts_balanced_by_local_tokens": Seed(
        case(dp_shard=2), "layers.0.moe.expert_bias", "wrong after the optimizer step", "qwen3_moe_debug"
    ),
    "auxiliary_loss_of_each_micro_batch": Seed(
        case("accumulation"),
        "tok_embeddings.weight",
        "backward goes wrong at layers.1.moe.router.gate.weight",
        "qwen3_moe_debug",
        overrides=("model.moe.aux_loss_coeff=0.1",),
    ),
    "transposed_at_export": Seed(
        case("export"), "layers.0.attention.wo.weight", "its value before the step is wrong"
    ),
    "cache_off_by_one": Seed(
        case("generation"), "layers.0.attention.wo.weight", "the logits of token 5 differ"
    ),
    "filling_seen": Seed(case("generation"), None, "in rows of unequal length"),
    "padding_counted_by_routers": Seed(
        case("epoch"),
        "tok_embeddings.weight",
        "backward goes wrong at layers.1.moe.router.gate.weight",
        "qwen3_moe_debug",
        overrides=("model.moe.aux_loss_coeff=0.1",),
    ),
    "routes_of_the_first_rank": Seed(
        case("routes", tp=2), "layers.0.attention_norm.weight", "layers.0", "qwen3_moe_debug"
    ),
    "samples_see_each_other": Seed(
        case("samples"), "tok_embeddings.weight", "its gradient is wrong (step 1)"
    ),
}
SLOW = SEEDS.keys() - {
    *("missing_reduction", "one_gradient_twice", "divided_again_by_micro_batches", "window_off_by_one"),
    *("third_micro_batch_lost", "stale_cast", "converters_taken_off_to_sample"),
    *("transposed_at_export", "cache_off_by_one", "undivided_on_shards"),
}


def test_each_fault_has_a_row():
    assert SEEDS.keys() == bugs.BUGS.keys()


def found(ranks: Any, plain: Any, seed: Seed, bug: str | None, folder: Path) -> dict[str, Any]:
    file, reference = plain(seed.recipe, seed.case, bug if seed.of_model else None, *seed.overrides)
    given = (file, seed.case.overrides, seed.case.sizes, str(folder), seed.case.more, seed.converters)
    answer = ranks(seed.case.ranks, bugs.seeded, bug, *given)[0]
    return answer if isinstance(answer, dict) else compared(answer, reference)


@pytest.mark.parametrize("name", rows(SEEDS, slow=SLOW))
def test_a_seeded_fault_is_found_and_named(ranks, plain, tmp_path, name):
    seed = SEEDS[name]
    answer = found(ranks, plain, seed, name, tmp_path)
    assert answer["status"] == "wrong"
    answer["techniques"] = sorted(seed.case.techniques)
    assert answer["fault"]["parameter"] == seed.parameter, sentence(answer)
    assert seed.says in sentence(answer)


@pytest.mark.parametrize(
    ("layout", "converters"),
    [
        (case(tp=2), ()),
        (case("accumulation", dp_shard=2), ()),
        (case("generation", dp_shard=2), (Tilted(),)),
        (case("bf16", "resume"), ()),
        (case("samples"), ()),
        (case("epoch", dp_shard=2), ()),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_what_is_right_is_not_reported(ranks, plain, tmp_path, layout, converters):
    answer = found(ranks, plain, Seed(layout, None, "", converters=converters), None, tmp_path)
    assert answer["status"] == "right" and answer["worst"] < 1e-5


def test_micro_batches_are_three_the_last_of_them_short():
    assert case("accumulation").sizes == [3, 3, 2] and case("accumulation", dp_shard=2).sizes == [2, 1, 1]
    assert Case((), ("accumulation",), unit=2).sizes == [4, 2, 2]
    assert Case((("dp_shard", 2),), ("accumulation",), unit=2).sizes == [2, 2]  # of two pairs
    assert case(dp_shard=2).sizes == [4]


def results(**changed: float) -> Results:
    """Return results of two steps: tensors of 100 numbers, a few of them changed in length; loss and norm."""
    kinds = dict.fromkeys(("0_gradient_a", "1_gradient_a", "0_output_a", "1_output_a"), torch.ones(100))
    kinds |= dict.fromkeys(("0_loss", "1_loss", "0_norm", "1_norm"), torch.ones((), dtype=torch.float64))
    return Results({k.replace("_", " "): v * (1 + changed.get(k, 0.0)) for k, v in kinds.items()}, ["a"])


def test_noise_is_that_of_the_step_and_a_single_number_has_at_least_that_of_what_it_is_made_of():
    """An optimizer that rounds to few bits (Muon) makes gradients of the second step uncertain, and their
    norm, though a nudge may leave that as it is by chance; those of the first step are as sure as ever."""
    nudged = results(**{"0_gradient_a": 2e-6, "1_gradient_a": 2e-3, "1_output_a": 1e-4, "1_norm": 1e-7})
    reference = reference_of(results(), nudged)
    for right in ({"1_norm": 1.1e-5}, {"1_loss": 5e-5}, {"1_gradient_a": 5e-3}, {"0_gradient_a": 9e-6}):
        assert compared(results(**right), reference)["status"] == "right", right
    for wrong in ({"0_norm": 1.1e-5}, {"0_loss": 5e-5}, {"1_gradient_a": 2e-2}, {"0_gradient_a": 5e-3}):
        assert compared(results(**wrong), reference)["status"] == "wrong", wrong


@pytest.mark.parametrize(
    ("converter", "expected"),
    [('{type = "lora"}', True), ('{type = "float8_linear"}', False)],
    ids=["lora", "float8"],
)
def test_whether_gradients_of_halves_add_up_is_measured(ranks, tmp_path, converter, expected):
    loaded = load_recipe("llama3_debug", [f"converters=[{converter}]", "weights=./base"])
    small = shrink(loaded, tmp_path)
    assert ranks(1, bugs.halves_add_up, str(small.file), str(small.base), Case().overrides) == [expected]


@pytest.mark.slow
def test_accumulation_that_is_wrong_shows_beside_converters(tmp_path):
    file = tmp_path / "cli_mean_loss.py"
    file.write_text(LOSS)
    registry.configure(files=[file])
    try:
        for converter in ("lora", "float8_linear"):
            keys = ["loss=mean", f"converters=[{{type = '{converter}'}}]", "weights=./base"]
            proof = prove(load_recipe("llama3_debug", keys), ranks=1, plugin_files=[file])
            assert [cause["techniques"] for cause in proof.causes] == [["accumulation"]]
    finally:
        registry.configure()
        sys.modules.pop(file.stem, None)


def test_a_rank_that_dies_or_hangs_is_named_and_the_next_case_has_new_ranks(tmp_path):
    small = shrink(load_recipe("llama3_debug"), tmp_path)
    job = {
        "do": "reference",
        "file": str(small.file),
        "base": None,
        "overrides": [],
        "sizes": [8],
        "key": "",
        "how": [],
    }
    with Pool(tmp_path, seconds=60) as pool:
        assert pool.ask(1, job)["status"] == "right"
        pool.processes[0].kill()
        assert "rank 0 was killed by SIGKILL" in pool.ask(1, job)["reason"]
        case = {**job, "do": "case", "seed": 0, "more": [], "reference": {**job, "seed": 0}, "by_rows": False}
        assert pool.ask(1, case)["status"] == "right"  # its reference was that of the ranks before
        pool.processes[0].send_signal(signal.SIGSTOP)
        pool.seconds = 0.5
        assert "rank 0 did not answer" in pool.ask(1, job)["reason"]
        assert not pool.processes
