"""A step of one rank without memory: the shards are a real run's, and so are the faults."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.engine import cases
from tests.engine.cases import Layout
from titancli.engine import Engine
from titancli.engine.dry_run import dry_run, first_ranks, local, place_of
from titancli.errors import PluginError, RecipeError, TitanError, UsageError
from titancli.models import Llama3
from titancli.recipe import load_recipe
from titancli.recipe.schema import Degrees, Recipe
from titancli.registry.component import component

LAYOUTS = {
    "one": (1, Layout()),
    "fsdp-2": (2, Layout({"dp_shard": 2})),
    "uneven shards": (3, Layout({"dp_shard": -1}, model={"hidden_dim": 47})),
    "hsdp-2x2": (4, Layout({"dp_replicate": 2, "dp_shard": 2}, micro_batches=2)),
    "fsdp-2 x tp-2": (4, Layout({"dp_shard": 2, "tp": 2})),
}


def held(layout: Layout) -> tuple[int, int, int, int]:
    """What a real rank has after a step."""
    engine = Engine.build(cases.recipe(layout))
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


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name, (world, _) in LAYOUTS.items() if world != 3])
def test_every_rank_has_what_a_real_one_has(ranks, name):
    world, layout = LAYOUTS[name]
    real = ranks(world, held, layout)
    for check in dry_run(cases.recipe(layout), world, range(world)):
        assert (
            check.parameters, check.parameter_bytes, check.gradient_bytes, check.optimizer_bytes
        ) == real[check.rank]  # fmt: skip
        assert check.peak_bytes > check.parameter_bytes + check.gradient_bytes


def test_rows_that_several_ranks_share_unevenly():
    layout = LAYOUTS["uneven shards"][1]
    checks = dry_run(cases.recipe(layout, global_batch_size=None, local_batch_size=1), 3, range(3))
    sizes = [check.parameters for check in checks]
    assert sizes[0] > sizes[2]
    one = dry_run(cases.recipe(layout, global_batch_size=None, local_batch_size=1), 1)
    assert sum(sizes) == one[0].parameters


def test_nothing_is_left_behind():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    hook = sys.excepthook
    dry_run(cases.recipe(Layout({"dp_shard": 2})), 2)
    assert not dist.is_initialized() and not torch.cuda.is_initialized()
    assert sys.excepthook is hook
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert torch.ones(2).sum().item() == 2.0  # nothing is fake any more


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_every_optimizer_steps(implementation, state_dtype):
    recipe = cases.recipe(Layout({"dp_shard": 4}))
    optimizer = replace(recipe.optimizer, implementation=implementation, state_dtype=state_dtype)
    (check,) = dry_run(replace(recipe, optimizer=optimizer), 4)
    size = 2 if state_dtype == "bfloat16" else 4
    assert check.optimizer_bytes == pytest.approx(2 * size * check.parameters, rel=0.02)


def test_documents_and_checkpointing_and_compile():
    recipe = cases.recipe(
        Layout({"dp_shard": 2}, compile="inductor", activation_checkpoint={"mode": "selective"})
    )
    full = cases.recipe(Layout({"dp_shard": 2}, activation_checkpoint={"mode": "none"}))
    assert dry_run(recipe, 2)[0].peak_bytes < dry_run(full, 2)[0].peak_bytes


def test_which_ranks_are_tried():
    assert first_ranks(Degrees(dp_shard=8)) == [0]
    degrees = Degrees(pp=4, dp_shard=2, tp=2)
    assert first_ranks(degrees) == [0, 4, 8, 12]
    assert place_of(degrees, 7) == {"pp": 1, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 1}


def test_a_rank_that_does_not_exist():
    with pytest.raises(UsageError, match="no rank 2 among 2"):
        dry_run(cases.recipe(Layout({"dp_shard": 2})), 2, [0, 2])


def test_a_process_that_has_a_group_already():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(TitanError, match="process group"):
            dry_run(cases.recipe(Layout({"dp_shard": 2})), 2)
    finally:
        dist.destroy_process_group()


def test_405b_wide_on_512_ranks():
    """The widths of 405B on the ranks that it is trained on; fewer layers, since all are alike."""
    overrides = ["model.n_layers=3", "mesh.tp=8", "training.seq_len=8192", "activation_checkpoint.mode=full"]
    recipe = load_recipe("llama3_405b", overrides).recipe
    first, last = dry_run(recipe, 512, [0, 511])
    assert last.place == {"pp": 0, "dp_replicate": 0, "dp_shard": 63, "cp": 0, "tp": 7}
    share = recipe.model.shape().size / 512
    assert last.parameters < share < first.parameters < 1.01 * share  # 128,256 / 8 rows over 64 ranks


@pytest.mark.slow  # a minute: 126 layers, operation by operation
def test_405b_on_512_ranks():
    overrides = ["mesh.tp=8", "training.seq_len=8192", "activation_checkpoint.mode=full"]
    (check,) = dry_run(load_recipe("llama3_405b", overrides).recipe, 512)
    assert check.parameters == pytest.approx(405.85e9 / 512, rel=0.001)


# ------------------------------------------------------------------------------------------------ faults


@component("model", "faulty", target="tests.engine.faulty:build")
class Faulty(Llama3):
    """A model whose code lies outside of titan."""

    fault: str


def faulty(fault: str, **mesh: int) -> Recipe:
    return replace(cases.recipe(Layout({"dp_shard": 2, **mesh})), model=Faulty(**cases.MODEL, fault=fault))


def test_the_faulty_model_without_a_fault_passes():
    assert len(dry_run(faulty("none", tp=2), 4)) == 1


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
    assert message.startswith("rank 1 of 2 (dp_shard 1): the model faulty fails in a step:\n")
    assert "tests/engine/faulty.py:" in message and "torch/" not in message
    assert not dist.is_initialized()


def test_a_step_that_depends_on_values_cannot_be_told():
    with pytest.raises(TitanError, match=r"depends on values(?s:.*)faulty.py:\d+ in") as caught:
        dry_run(faulty("values"), 2)
    assert not isinstance(caught.value, RecipeError | PluginError)


def test_a_component_that_cannot_be_loaded():
    @component("optimizer", "absent", target="no_such_module:build")
    class Absent:
        """Not there."""

    recipe = replace(cases.recipe(Layout()), optimizer=Absent())
    with pytest.raises(PluginError, match=r"no_such_module.*on rank 0 of 1"):
        dry_run(recipe, 1)
