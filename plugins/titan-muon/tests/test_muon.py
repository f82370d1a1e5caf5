"""Muon: torch's own on one device, the same on many, and a plugin that keeps to the rules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import muon_cases
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.cases import Layout, small
from tests.models.hf_configs import CONFIGS
from tests.rows import rows
from titan_qwen3_next import Qwen3Next
from titan_testing import check_plugin, recipe, run_cli
from titan_transformers import HFCausalLM
from titancli import TitanError, load_recipe
from titancli.models import Qwen3
from titancli.models.sections import MoE
from titancli.recipe.check import remarks

FALLBACK = """
[optimizer]
type = "titan-muon/muon"
lr = 0.05

[optimizer.fallback]
type = "adamw"
lr = 1e-2
"""


def named(*shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"p{i}", nn.Parameter(torch.randn(s, generator=generator))) for i, s in enumerate(shapes)]


def roles(parameters: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {name: "matrix" if parameter.ndim > 1 else "other" for name, parameter in parameters}


def test_the_plugin_is_sound() -> None:
    check_plugin("titan-muon")


@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}], ids=str)
def test_a_step_is_that_of_torch(options: dict) -> None:
    found = muon_cases.stepped(None, **options)
    # Torch takes matrices only: of a stack, one after the other.
    parameters = [[nn.Parameter(matrix) for matrix in matrices(value)] for value in muon_cases.values(0)]
    optimizer = torch.optim.Muon([p for stack in parameters for p in stack], lr=0.1, **options)
    for step in range(1, 4):
        for stack, gradients in zip(parameters, muon_cases.values(step), strict=True):
            for parameter, gradient in zip(stack, matrices(gradients), strict=True):
                parameter.grad = gradient
        optimizer.step()
    expected = [[p.detach() for p in stack] for stack in parameters]
    expected += [[optimizer.state[p]["momentum_buffer"] for p in stack] for stack in parameters]
    stacked = [torch.stack(some).view_as(ours) for some, ours in zip(expected, found, strict=True)]
    torch.testing.assert_close(found, stacked, rtol=1e-6, atol=1e-6)


def matrices(value: torch.Tensor) -> list[torch.Tensor]:
    return list(value.clone().unbind(0)) if value.ndim == 3 else [value]


LAYOUTS = [("rows", 2), ("rows", 3), ("columns", 2), ("replicated", 4)]
LAYOUTS += [(cut, 4) for cut in ("column", "row", "whole", "twice", "mixed")]


@pytest.mark.ranks
@pytest.mark.parametrize(("cut", "world"), [("rows", 2), ("mixed", 4)])
def test_each_matrix_is_orthogonalised_once(ranks, cut: str, world: int) -> None:
    count = sum(len(matrices(value)) for value in muon_cases.values(0))
    replicas = 0
    if cut == "mixed":  # what is whole on two ranks is done by both
        replicas = sum(len(matrices(value)) for value in muon_cases.values(0)[2::3])
    assert sum(ranks(world, muon_cases.orthogonalisations, cut)) == count + replicas


@pytest.mark.ranks
@pytest.mark.parametrize(("cut", "world"), LAYOUTS)
def test_a_step_on_cut_matrices_is_that_on_whole_ones(ranks, cut: str, world: int) -> None:
    expected = muon_cases.stepped(None)
    for found in ranks(world, muon_cases.stepped, cut):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.ranks
def test_bfloat16_weights_are_stepped_alike(ranks) -> None:
    expected = muon_cases.stepped(None, torch.bfloat16)
    for found in ranks(2, muon_cases.stepped, "rows", torch.bfloat16):
        assert all(tensor.dtype == torch.bfloat16 for tensor in found)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def distance(found: dict, expected: dict) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


@pytest.mark.ranks
def test_two_ranks_train_as_one_does(ranks, tmp_path: Path) -> None:
    file = recipe(tmp_path, FALLBACK)
    (one,) = ranks(1, muon_cases.trained, file, 2)
    two = ranks(2, muon_cases.trained, file, 2)
    momenta = [name for name in one if name.endswith("momentum_buffer")]
    assert len(momenta) == 14 and "optimizer.layers.0.attention.wq.weight.momentum_buffer" in momenta
    assert "optimizer.output.weight.exp_avg" in one
    # Gradients differ in their last bits, and iterations in bfloat16 make more of it.
    assert distance(two[0], one) < 0.02
    assert distance(two[1], two[0]) == 0


SIZES: dict[str, Any] = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=64)
SIGMOID: dict[str, Any] = dict(hidden_dim=16, load_balance_coeff=None)
EXPERTS = Qwen3(**SIZES, moe=MoE(num_experts=4, top_k=2, **SIGMOID))
FEW = Qwen3(**SIZES, moe=MoE(num_experts=2, top_k=1, **SIGMOID))
MESHES = {
    "TP2": (2, small({"tp": 2})),
    "FSDP2xTP2": (4, small({"dp_shard": 2, "tp": 2})),
    "EP2xFSDP2": (4, Layout({"dp_shard": 4, "ep": 2}, config=EXPERTS)),
    "EP2xTP2": (4, Layout({"dp_shard": 2, "tp": 2, "ep": 2}, config=EXPERTS)),
    "EP2xFSDP2, hidden cut": (4, Layout({"dp_shard": 4, "ep": 2}, config=FEW)),
    "PP2xFSDP2": (4, small({"dp_shard": 2, "pp": 2})),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", rows(MESHES, slow=("EP2xTP2", "EP2xFSDP2, hidden cut")))
def test_an_engine_steps_as_if_its_matrices_were_whole(ranks, name: str) -> None:
    """Given the same gradients: what differs in these by rounding alone, bfloat16 iterations blow up."""
    world, layout = MESHES[name]
    found = ranks(world, muon_cases.steps_of_an_engine, layout)
    names = {name for result in found for name in result}
    assert len(names) == 14
    for result in found:
        assert all(torch.equal(stepped, whole) for stepped, whole in result.values())


@pytest.mark.ranks
def test_a_pipeline_stage_without_a_matrix_for_muon_steps_too(ranks) -> None:
    blocks = [f"layers.{i}" for i in range(2)]
    cut = {"module_fqns_per_model_part": [["tok_embeddings"], [*blocks, "norm", "output"]]}
    first, second = ranks(2, muon_cases.steps_of_an_engine, small({"pp": 2}, pipeline=cut))
    assert first == {}
    assert len(second) == 14
    assert all(torch.equal(stepped, whole) for stepped, whole in second.values())


@pytest.mark.ranks
def test_a_resumed_run_is_bitwise_the_one_that_did_not_stop(ranks, tmp_path: Path) -> None:
    file, folder = recipe(tmp_path, FALLBACK), tmp_path / "checkpoint"
    whole = ranks(2, muon_cases.trained, file, 3)[0]
    ranks(2, _save, file, folder)
    resumed = ranks(2, _go_on, file, folder)[0]
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def _save(file: Path, folder: Path) -> None:
    muon_cases.trained(file, 2, save=folder)


def _go_on(file: Path, folder: Path) -> dict:
    return muon_cases.trained(file, 1, load=folder)


def test_vectors_and_what_is_excluded_go_to_the_fallback() -> None:
    from titan_muon import Muon
    from titan_muon.optimizer import build
    from titancli.optimizers import AdamW

    parameters = named((4, 3), (5, 3), (3,))
    config = Muon(lr=0.1, exclude=["p1"], fallback=AdamW(lr=0.01))
    optimizer = build(config, named_parameters=parameters, roles=roles(parameters))
    assert [(g["lr"], len(g["params"])) for g in optimizer.param_groups] == [(0.1, 1), (0.01, 2)]
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    keys = [sorted(optimizer.state[parameter]) for _, parameter in parameters]
    assert keys == [["momentum_buffer"], *[["exp_avg", "exp_avg_sq", "step"]] * 2]


def test_gradients_are_divided_and_steps_skipped_on_the_device() -> None:
    """As torch's fused optimizers do it; the fallback is one of these."""
    from titan_muon import Muon
    from titan_muon.optimizer import build
    from titancli.optimizers import AdamW

    def trained(scale: float, skipped: bool) -> list[torch.Tensor]:
        parameters = named((6, 4), (3, 4, 4), (5,))
        config = Muon(lr=0.1, weight_decay=0.1, fallback=AdamW(lr=1e-2))
        optimizer: Any = build(config, named_parameters=parameters, roles=roles(parameters))
        for step in range(3):
            for number, (_, parameter) in enumerate(parameters):
                parameter.grad = scale * torch.sin(parameter.detach() * 3 + step + number)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
            optimizer.step()
            for _, parameter in parameters if skipped else ():
                parameter.grad = torch.full_like(parameter, torch.nan)
            optimizer.found_inf = torch.tensor(1.0)
            if skipped:
                optimizer.step()
        found = [value for state in optimizer.state.values() for value in state.values()]
        return [*(parameter.detach() for _, parameter in parameters), *found]

    plain = trained(1.0, skipped=False)
    assert all(torch.equal(*pair) for pair in zip(plain, trained(1.0, skipped=True), strict=True))
    assert all(torch.equal(*pair) for pair in zip(plain, trained(4.0, skipped=True), strict=True))


def test_weight_decay_is_not_rounded_to_bfloat16() -> None:
    """A scalar on a GPU is rounded to the dtype of what it is multiplied with: no operation on the weight
    has one. And the guard changes no bit."""
    from titan_muon.sharded import ShardedMuon

    class Mixed(TorchDispatchMode):
        found: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if any(t.dim() == 0 for t in tensors) and any(t.data_ptr() == weight.data_ptr() for t in tensors):
                self.found.append(str(func))
            return func(*args, **(kwargs or {}))

    weights = []
    for guarded in (False, True):
        ((_, drawn),) = named((16, 8))
        weight = nn.Parameter(drawn.detach().bfloat16())
        optimizer = ShardedMuon([weight], lr=0.03, weight_decay=0.1)
        if guarded:
            optimizer.found_inf = torch.tensor(0.0)
        weight.grad = torch.zeros_like(weight)
        with Mixed() as mixed:
            optimizer.step()
        weights.append(weight.detach())
    assert not mixed.found
    assert torch.equal(*weights)
    assert torch.equal(weights[0], (drawn.detach().bfloat16().double() * (1 - 0.03 * 0.1)).bfloat16())


def test_its_state_goes_through_state_dict() -> None:
    from titan_muon import Muon
    from titan_muon.optimizer import build

    def made() -> tuple[list, torch.optim.Optimizer]:
        parameters = named((4, 3), (3,))
        return parameters, build(Muon(), named_parameters=parameters, roles=roles(parameters))

    def step(parameters: list, optimizer: torch.optim.Optimizer) -> None:
        for _, parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    parameters, optimizer = made()
    step(parameters, optimizer)
    others, again = made()
    for (_, parameter), (_, other) in zip(parameters, others, strict=True):
        other.data.copy_(parameter.data)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(parameters, optimizer)
    step(others, again)
    assert all(torch.equal(p, o) for (_, p), (_, o) in zip(parameters, others, strict=True))


@pytest.mark.parametrize(
    ("chosen", "matrices"), [(None, ["a"]), (["matrix", "router"], ["a", "b"]), (["output"], ["c"])]
)
def test_roles_choose_what_is_orthogonalised(chosen: list | None, matrices: list[str]) -> None:
    from titan_muon import Muon
    from titan_muon.optimizer import build

    given: Any = {"a": "matrix", "b": "router", "c": "output", "d": "other"}
    parameters = [(name, nn.Parameter(torch.ones(4, 3))) for name in given]
    config = Muon() if chosen is None else Muon(roles=chosen)
    first, rest = build(config, named_parameters=parameters, roles=given).param_groups
    assert [name for name, p in parameters if any(p is q for q in first["params"])] == matrices
    assert len(rest["params"]) == 4 - len(matrices)


MODELS = {
    "hf_causal_lm, tied": HFCausalLM(config=CONFIGS["llama, tied"]),
    "qwen3_next": Qwen3Next(
        **SIZES,
        hidden_dim=48,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=4,
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_heads_and_convolutions_are_the_fallbacks(ranks, name: str) -> None:
    (found,) = ranks(1, muon_cases.orthogonalised, MODELS[name])
    apart = ("embed", "output", "head", "conv", "norm", "bias")
    assert found and not [one for one in found if any(word in one for word in apart)]


SOFT: dict[str, Any] = dict(score_func="softmax", route_norm=True, load_balance_coeff=None)
NORMED = MoE(num_experts=4, top_k=2, hidden_dim=16, **SOFT)


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_routers_are_stepped_alike_on_every_layout(ranks, mesh: dict) -> None:
    """The rows of a router have a direction that a softmax ignores: orthogonalised, its rounding is 2 to 7 %
    of the router after three steps."""
    config = Qwen3(**SIZES, moe=NORMED)
    (one,) = ranks(1, muon_cases.routers, Layout(config=config))
    for found in ranks(2, muon_cases.routers, Layout(mesh, config=config)):
        assert distance(found, one) < 1e-3


@pytest.mark.parametrize(
    ("shapes", "exclude", "words"),
    [([(3,)], [], "no matrices for muon"), ([(4, 3)], ["wq"], "'wq' matches no parameter")],
)
def test_what_cannot_be_is_told(shapes: list, exclude: list[str], words: str) -> None:
    from titan_muon import Muon
    from titan_muon.optimizer import build

    with pytest.raises(TitanError, match=words):
        build(Muon(exclude=exclude), named_parameters=named(*shapes), roles=roles(named(*shapes)))


def test_muon_is_not_its_own_fallback(tmp_path: Path) -> None:
    done = run_cli("validate", recipe(tmp_path, FALLBACK.replace('"adamw"', '"muon"')))
    assert done.code == 3 and "cannot be muon itself" in done.stderr


def test_it_trains(tmp_path: Path) -> None:
    done = run_cli("train", recipe(tmp_path, FALLBACK), cwd=tmp_path)
    assert done.code == 0, done.stderr


def test_bfloat16_weights_are_remarked_on() -> None:
    given = ["optimizer=muon", "training.dtype=bfloat16"]
    (line,) = remarks(load_recipe("llama3_debug", given).recipe)
    assert "the optimizer muon does not declare that it rounds stochastically" in line
