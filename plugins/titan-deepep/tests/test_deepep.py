"""titan's calls of DeepEP are those that it documents, and what is built of them is right; and where it
cannot be used that is said before anything starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import deep_ep_stand_in as stand_in
import pytest
import torch

from tests.engine.cases import Layout, my_batches, recipe, wholes
from tests.ranks.layouts import EIGHT, SHARED
from titan_deepep import DeepEP, dispatch
from titan_testing import check_plugin, run_cli
from titancli.engine import Engine
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.parallel import AllToAll
from titancli.recipe.check import component_checks
from titancli.recipe.schema import Debug, Mesh

NOT_INSTALLED = "deepep needs the package deep_ep, which is not installed"
WEIGHED_FIRST = replace(EIGHT, moe=replace(EIGHT.moe, score_before_experts=True))
LAYOUTS = {
    "EP2": (2, Layout({"dp_shard": 2, "ep": 2}, config=EIGHT, dtype="bfloat16")),
    "EP2, weights first": (2, Layout({"dp_shard": 2, "ep": 2}, config=WEIGHED_FIRST, dtype="bfloat16")),
    "EP2, AC full, two micro-batches": (
        2,
        Layout(
            {"dp_shard": 2, "ep": 2},
            config=EIGHT,
            dtype="bfloat16",
            micro_batches=2,
            activation_checkpoint={"mode": "full"},
        ),
    ),
    "EP4": (4, Layout({"dp_shard": 4, "ep": 4}, config=EIGHT, dtype="bfloat16")),
    "FSDP2xTP2, EP4": (4, Layout({"dp_shard": 2, "tp": 2, "ep": 4}, config=EIGHT, dtype="bfloat16")),
}


def test_the_plugin_is_sound() -> None:
    check_plugin("titan-deepep")


def with_dispatcher(layout: Layout, dispatcher: Any) -> Any:
    made = recipe(layout)
    return replace(made, parallelize=replace(made.parallelize, expert_dispatch=dispatcher))


def stand_for_deep_ep(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "deep_ep", stand_in.module())
    patch.setattr(dispatch, "device_fault", lambda device: None)


def two_steps(layout: Layout, dispatcher: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        stand_for_deep_ep(patch)
        engine = Engine.build(with_dispatcher(layout, dispatcher))
        found: dict[str, torch.Tensor] = {}
        stand_in.CALLS.clear()
        for step in range(2):
            found[f"loss {step}"] = engine.forward_backward(my_batches(engine, step))["loss"].clone()
            gradients = ((name, p.grad) for name, p in engine.named_parameters() if p.grad is not None)
            found |= {f"gradient {step} {name}": value for name, value in wholes(gradients).items()}
            engine.optim_step()
        return found, list(stand_in.CALLS)


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_its_losses_and_gradients_are_those_of_the_all_to_all(ranks: Any, name: str) -> None:
    """Up to bfloat16: the outputs of a token's experts are rounded and added up in another order."""
    world, layout = LAYOUTS[name]
    own = ranks(world, two_steps, layout, AllToAll())
    other = ranks(world, two_steps, layout, DeepEP())
    for (expected, none), (found, calls) in zip(own, other, strict=True):
        assert none == [] and calls.count("Buffer") == 1, "one buffer for all layers and steps"
        sent, back = calls.count("dispatch"), calls.count("combine")  # a block run again stops at the last
        assert sent > back > 0 if "AC full" in name else sent == back > 0
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert (value - found[key]).norm() <= 0.03 * value.norm().clamp(min=1e-3), key


def exact(weigh_first: bool) -> list[float]:
    """Return the largest differences of output and gradients from every expert computed for every token, in
    fp32 on numbers that bfloat16 holds exactly."""
    from torch.distributed import group as groups

    from titancli.protocols import Visit

    with pytest.MonkeyPatch.context() as patch:
        stand_for_deep_ep(patch)
        group = groups.WORLD
        made = dispatch.DeepEP(DeepEP(), group=group, device=torch.device("cpu"), dtype=torch.bfloat16)
        drawn = torch.Generator().manual_seed(group.rank())
        tokens = torch.randint(-4, 5, (5 + group.rank(), 8), generator=drawn).bfloat16().requires_grad_()
        experts = torch.rand(len(tokens), 4, generator=drawn).argsort(1)[:, :2]
        weights = (2.0 ** -torch.randint(0, 3, experts.shape, generator=drawn).float()).requires_grad_()
        counts = torch.nn.functional.one_hot(experts, 4).sum((0, 1))
        factors = torch.tensor([1.0, 2.0, -1.0, 4.0])  # an expert multiplies by its own

        def compute(x: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
            own = factors.chunk(group.size())[group.rank()]
            assert int(here.sum()) == len(x)
            return x * own.repeat_interleave(here)[:, None].to(x.dtype)

        out = made(Visit(tokens, experts, weights, counts, weigh_first), compute)
        slope = torch.randint(-2, 3, out.shape, generator=drawn).bfloat16()
        out.backward(slope)
        scales = (weights * factors[experts]).sum(1, keepdim=True)
        by_weight = factors[experts] * (tokens.float() * slope.float()).sum(1, keepdim=True)
        expected = (tokens * scales, slope * scales, by_weight)
        found = (out, tokens.grad, weights.grad)
        return [float((a.float() - b.float()).abs().max()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.ranks
@pytest.mark.parametrize("weigh_first", [False, True])
def test_output_and_gradients_are_exact_where_bfloat16_is(ranks: Any, weigh_first: bool) -> None:
    assert ranks(2, exact, weigh_first) == [[0.0, 0.0, 0.0]] * 2
    assert ranks(4, exact, weigh_first) == [[0.0, 0.0, 0.0]] * 4


def crowded(layout: Layout) -> tuple[float, bool]:
    """Every token goes to the first expert: the other rank gets none."""
    from titancli.checkpoint.hf.lazy_tensor import put

    with pytest.MonkeyPatch.context() as patch:
        stand_for_deep_ep(patch)
        engine = Engine.build(with_dispatcher(layout, DeepEP()))
        for name, parameter in engine.named_parameters():
            if name.endswith("router.gate.bias"):
                put(parameter, torch.tensor([9.0, 0.0, 0.0, 0.0]))
        loss = engine.forward_backward(my_batches(engine))["loss"]
        return float(loss), all(p.grad is not None for _, p in engine.named_parameters())


@pytest.mark.ranks
def test_a_rank_that_no_token_comes_to_keeps_step(ranks: Any) -> None:
    layout = Layout({"dp_shard": 2, "ep": 2}, config=SHARED, dtype="bfloat16")
    (one, has), (other, also) = ranks(2, crowded, layout)
    assert one == other and has and also


def refusal(layout: Layout, nodes: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        stand_for_deep_ep(patch)
        rank = torch.distributed.get_rank()
        patch.setattr(dispatch.platform, "node", lambda: nodes[rank])
        try:
            Engine.build(with_dispatcher(layout, DeepEP()))
        except EnvironmentProblem as error:
            return str(error)
        return ""


@pytest.mark.ranks
def test_a_group_that_is_spread_over_nodes_otherwise_is_refused_on_every_rank(ranks: Any) -> None:
    layout = Layout({"dp_shard": 2, "ep": 2}, config=EIGHT, dtype="bfloat16")
    for message in ranks(2, refusal, layout, ["one", "two"]):
        assert "the 2 ranks of mesh.ep are on the nodes one, two" in message
    assert ranks(2, refusal, layout, ["one", "one"]) == ["", ""]


# ------------------------------------------------------------------------------------- before a run starts


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_without_the_package_a_recipe_is_refused_with_what_to_do(command: str, tmp_path: Path) -> None:
    done = run_cli(command, "qwen3_moe_debug", "parallelize.expert_dispatch=deepep", cwd=tmp_path)
    assert done.code == 3
    assert NOT_INSTALLED in done.stderr and 'parallelize.expert_dispatch = "all_to_all"' in done.stderr


def test_without_a_gpu_a_run_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("titan_deepep.find_spec", lambda name: name)
    settings = ("parallelize.expert_dispatch=deepep", "mesh.ep=2", "training.mixed_precision_param=bfloat16")
    done = run_cli("train", "qwen3_moe_debug", "--nproc", "2", *settings, cwd=tmp_path)
    assert done.code == 3 and "the dispatcher deepep needs a GPU, but none is visible" in done.stderr
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("mesh", "changes", "told"),
    [
        ({"ep": 2}, {}, ""),
        ({"ep": 1}, {"dtype": "float32"}, ""),
        ({"ep": 6}, {}, "mesh.ep = 6: DeepEP has settings only for 2, 4, 8, 16,"),
        ({"ep": 2}, {"dtype": "float32"}, "deepep sends bfloat16, but training.mixed_precision_param"),
        ({"ep": 2}, {"config": replace(EIGHT, dim=36)}, "model.dim = 36 must be a multiple of 8"),
        ({"ep": 2}, {"deterministic": True}, "set debug.deterministic = false"),
    ],
)
def test_what_it_cannot_do_is_a_problem_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], changes: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr("titan_deepep.find_spec", lambda name: name)
    deterministic = changes.pop("deterministic", False)
    made = with_dispatcher(Layout(**{"config": EIGHT, "dtype": "bfloat16", **changes}), DeepEP())
    made = replace(made, mesh=Mesh(**mesh), debug=Debug(deterministic=deterministic))
    found = [message for path, message, _ in component_checks(made) if path[-1] == "expert_dispatch"]
    assert len(found) == bool(told) and all(told in message for message in found)


def test_a_package_that_cannot_be_imported_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # as an import that fails
    with pytest.raises(RecipeError, match=r"the package deep_ep cannot be imported: \w+Error: "):
        DeepEP().try_out()


def test_a_device_that_is_none_is_refused_where_an_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", stand_in.module())
    given: dict[str, Any] = {"group": None, "device": torch.device("cpu")}
    with pytest.raises(RecipeError, match="it needs GPUs, but this is a cpu"):
        dispatch.DeepEP(DeepEP(), dtype=torch.bfloat16, **given)
    monkeypatch.setattr(dispatch, "device_fault", lambda device: None)
    with pytest.raises(RecipeError, match=r"it sends bfloat16, not torch\.float32"):
        dispatch.DeepEP(DeepEP(), dtype=torch.float32, **given)
