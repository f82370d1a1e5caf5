"""A step of one rank without memory: the shards are a real run's, and so are the faults."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.engine import cases
from tests.engine.cases import Layout
from tests.models.specs import size_of
from tests.ranks.refused import skip_where_refused
from tests.rows import rows
from titancli.engine import Engine
from titancli.engine.dry_run import blamed, dry_run, first_ranks, local, place_of
from titancli.errors import EnvironmentProblem, PluginError, RecipeError, TitanError, UsageError
from titancli.layout.degrees import Degrees
from titancli.models import Llama3
from titancli.models.qwen3 import Qwen3
from titancli.models.sections import MoE
from titancli.recipe import load_recipe
from titancli.recipe.schema import Recipe
from titancli.registry.component import component

EXPERTS = Qwen3(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    vocab_size=cases.VOCABULARY,
    moe=MoE(num_experts=8, top_k=2, hidden_dim=16, load_balance_coeff=1e-3),
)


SMALL = {**cases.MODEL, "n_layers": 2}


def recipe(layout: Layout, model: Any = None, **training: Any) -> Recipe:
    """Of two layers, but for stages that need more: what is tried is operation by operation."""
    stages = "schedule" in layout.pipeline and layout.pipeline["schedule"] != "1F1B"
    sizes = cases.MODEL if stages else SMALL
    return replace(cases.recipe(layout, **training), model=model or Llama3(**{**sizes, **layout.model}))


RECIPES = {
    "one": (1, recipe(Layout())),
    "fsdp-2, unevenly": (2, recipe(Layout({"dp_shard": 2}, model={"hidden_dim": 47}))),
    "hsdp-2x2": (4, recipe(Layout({"dp_replicate": 2, "dp_shard": 2}, micro_batches=2))),
    "fsdp-2 x tp-2": (4, recipe(Layout({"dp_shard": 2, "tp": 2}))),
    "cp-2": (2, recipe(Layout({"cp": 2}))),
    "cp-2, ring": (2, recipe(Layout({"cp": 2}, context_parallel="ring"))),
    "cp-2 x tp-2, heads exchanged": (
        4,
        recipe(Layout({"cp": 2, "tp": 2}, context_parallel="ulysses", model={"n_kv_heads": 4})),
    ),
    "ep-2 x fsdp-2": (4, recipe(Layout({"dp_shard": 4, "ep": 2}), EXPERTS)),
    "pp-2": (2, recipe(Layout({"pp": 2}, pipeline={"schedule": "1F1B"}))),
    "pp-2 x fsdp-2, two stages each": (
        4,
        recipe(Layout({"pp": 2, "dp_shard": 2}, pipeline={"schedule": "ZBVZeroBubble"})),
    ),
    "ep-4 over tp-2": (4, recipe(Layout({"dp_shard": 2, "tp": 2, "ep": 4}), EXPERTS)),
}


def held(recipe: Recipe) -> tuple[int, int, int, int]:
    """What a real rank has after a step."""
    engine = Engine.build(recipe)
    parameters = [p for _, p in engine.named_parameters()]
    engine.forward_backward(cases.my_batches(engine))
    gradients = sum(local(p.grad).nbytes for p in parameters)
    engine.optim_step()
    states = [v for state in engine.optimizer.state.values() for v in state.values()]
    return (
        sum(local(p).numel() for p in parameters),
        sum(local(p).nbytes for p in parameters),
        gradients,
        sum(local(v).nbytes for v in states),
    )


REAL = {"one", "fsdp-2, unevenly", "cp-2", "ep-4 over tp-2", "pp-2"}


@pytest.mark.ranks
@pytest.mark.parametrize("name", rows(RECIPES, slow=[name for name in RECIPES if name not in REAL]))
def test_every_rank_has_what_a_real_one_has(ranks, name):
    """The first and the last, which differ in every coordinate; all others are between them."""
    world, recipe = RECIPES[name]
    real = ranks(world, held, recipe)
    for check in dry_run(recipe, world, sorted({0, world - 1})).ranks:
        assert (
            check.parameters, check.parameter_bytes, check.gradient_bytes, check.optimizer_bytes
        ) == real[check.rank]  # fmt: skip
        assert check.peak_bytes > check.parameter_bytes + check.gradient_bytes


def test_parameters_that_ranks_share_unevenly():
    model = Llama3(**{**SMALL, "n_layers": 1, "hidden_dim": 47})
    one_row = recipe(Layout({"dp_shard": -1}), model, global_batch_size=None, local_batch_size=1)
    sizes = [check.parameters for check in dry_run(one_row, 3, range(3)).ranks]
    assert sizes[0] > sizes[2]
    assert sum(sizes) == size_of(model)


@pytest.mark.parametrize(
    "schedule", rows(["1F1B", "InterleavedZeroBubble", "DualPipeV"], slow=("1F1B", "InterleavedZeroBubble"))
)
def test_every_schedule_beside_every_other_degree(schedule):
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
    cut = recipe(Layout(mesh, pipeline={"schedule": schedule}), local_batch_size=4, global_batch_size=16)
    skip_where_refused(cut)
    first, second = dry_run(cut, 32).ranks
    assert (first.rank, second.rank) == (0, 16)
    assert 8 * (first.parameters + second.parameters) == pytest.approx(size_of(cut.model), rel=0.05)


def test_nothing_is_left_behind():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    hook = sys.excepthook
    dry_run(recipe(Layout({"dp_shard": 2})), 2)
    assert not dist.is_initialized() and not torch.cuda.is_initialized()
    assert sys.excepthook is hook
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert torch.ones(2).sum().item() == 2.0  # nothing is fake any more


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_every_optimizer_steps(implementation, state_dtype):
    plain = recipe(Layout({"dp_shard": 4}, model={"n_layers": 1}))
    optimizer = replace(plain.optimizer, implementation=implementation, state_dtype=state_dtype)
    (check,) = dry_run(replace(plain, optimizer=optimizer), 4).ranks
    size = 2 if state_dtype == "bfloat16" else 4
    assert check.optimizer_bytes == pytest.approx(2 * size * check.parameters, rel=0.02)


def test_checkpointed_activations_are_not_alive():
    peaks = [
        dry_run(recipe(Layout(activation_checkpoint={"mode": mode})), 1).ranks[0].peak_bytes
        for mode in ("full", "selective", "none")
    ]
    assert peaks == sorted(peaks) and peaks[0] < 0.8 * peaks[2]


def test_what_needs_a_gpu_or_minutes_is_left_out_and_told():
    compiled = recipe(Layout({"tp": 2}, compile="inductor"))
    plan = replace(compiled.parallelize, cpu_offload=True, async_tp=True)
    found = dry_run(replace(compiled, parallelize=plan), 2)
    assert found.left_out == ["compile", "parallelize.cpu_offload", "parallelize.async_tp"]
    assert dry_run(recipe(Layout()), 1).left_out == []


def test_which_ranks_are_tried():
    assert first_ranks(Degrees(dp_shard=8)) == [0]
    degrees = Degrees(pp=4, dp_shard=2, tp=2)
    assert first_ranks(degrees) == [0, 4, 8, 12]
    assert place_of(degrees, 7) == {"pp": 1, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 1}


def test_a_rank_that_does_not_exist():
    with pytest.raises(UsageError, match="rank 2 does not exist among 2"):
        dry_run(recipe(Layout({"dp_shard": 2})), 2, [0, 2])


def test_a_process_that_has_a_group_already():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(TitanError, match="process group"):
            dry_run(recipe(Layout({"dp_shard": 2})), 2)
    finally:
        dist.destroy_process_group()


def test_405b_wide_on_512_ranks():
    """The widths of 405B on the ranks that it is trained on; one layer, since all are alike."""
    overrides = ["model.n_layers=1", "mesh.tp=8", "training.seq_len=8192", "activation_checkpoint.mode=full"]
    wide = load_recipe("llama3_405b", overrides).recipe
    first, last = dry_run(wide, 512, [0, 511]).ranks
    assert last.place == {"pp": 0, "dp_replicate": 0, "dp_shard": 63, "cp": 0, "tp": 7}
    share = size_of(wide.model) / 512
    assert last.parameters < share < first.parameters < 1.01 * share  # 128,256 / 8 rows over 64 ranks


@pytest.mark.slow  # a minute: 126 layers, operation by operation
def test_405b_on_512_ranks():
    overrides = ["mesh.tp=8", "training.seq_len=8192", "activation_checkpoint.mode=full"]
    (check,) = dry_run(load_recipe("llama3_405b", overrides).recipe, 512).ranks
    assert check.parameters == pytest.approx(405.85e9 / 512, rel=0.001)


# ------------------------------------------------------------------------------------------------ faults


@component("model", "faulty", target="tests.engine.faulty:build")
class Faulty(Llama3):
    """A model whose code lies outside of titan."""

    fault: str


def faulty(fault: str, **mesh: int) -> Recipe:
    return recipe(Layout({"dp_shard": 2, **mesh}), Faulty(**SMALL, fault=fault))


def test_the_faulty_model_without_a_fault_passes():
    assert len(dry_run(faulty("none", tp=2), 4).ranks) == 1


def test_a_missing_style_of_a_tensor_plan():
    with pytest.raises(RecipeError, match=r"no style for layers.0.att\w+.weight.*on rank 0 of 4 \(.*tp 0\)"):
        dry_run(faulty("style", tp=2), 4)


@pytest.mark.parametrize(
    "fault, words",
    [
        ("shape", r"RuntimeError: .* \[64, 32\] X \[64, 32\]"),
        ("outside", "RuntimeError: .*mixed torch.Tensor and DTensor"),
        ("code", "ZeroDivisionError"),
        ("backward", "KeyError"),
    ],
)
def test_code_of_a_plugin_that_breaks_is_shown_with_its_own_lines(fault, words):
    with pytest.raises(PluginError, match=words) as caught:
        dry_run(faulty(fault), 2, [1])
    message = caught.value.message
    assert message.startswith("rank 1 of 2 (dp_shard 1): the model faulty failed in a step:\n")
    assert "tests/engine/faulty.py:" in message and "torch/" not in message
    assert not dist.is_initialized()


def test_a_step_that_depends_on_values_cannot_be_told():
    with pytest.raises(TitanError, match=r"depends on tensor values(?s:.*)faulty.py:\d+ in") as caught:
        dry_run(faulty("values"), 2)
    assert not isinstance(caught.value, RecipeError | PluginError)


def test_an_error_of_a_plugins_own_class_keeps_its_exit_code():
    class Lost(EnvironmentProblem):
        def __init__(self, path: str) -> None:
            super().__init__(f"{path} is gone", hint="mount it")

    told = blamed(Lost("/data"), recipe(Layout()), "rank 1 of 2")
    assert isinstance(told, EnvironmentProblem)
    assert (told.message, told.hint) == ("/data is gone, on rank 1 of 2", "mount it")


def test_a_component_that_cannot_be_loaded():
    @component("optimizer", "absent", target="no_such_module:build")
    class Absent:
        """Not there."""

    lacking = replace(recipe(Layout()), optimizer=Absent())
    with pytest.raises(PluginError, match=r"no_such_module.*on rank 0 of 1"):
        dry_run(lacking, 1)
