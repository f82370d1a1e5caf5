"""Models in low precision: the same on any layout, recomputed, compiled and resumed; and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import low_cases
import pytest
import torch
from low_cases import DENSE, EVERY, EXPERTS, LINEARS, STACKS, TRANSPOSED, layout_of
from test_float8_numerics import distance

from tests.rows import rows
from titan_float8 import Float8Experts, MXFP8Experts, MXFP8Linear, NVFP4Experts, NVFP4Linear
from titan_float8.block_linear import Linear
from titan_float8.experts import QuantizedExperts
from titancli.converters import LoRA
from titancli.engine import Engine
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.layout.degrees import Degrees
from titancli.models.blocks.moe import Experts
from titancli.registry.component import build

FULL = {"activation_checkpoint": {"mode": "full"}}
BY_OP = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
# Where sums in another order move a value over the edge between two numbers, it moves by a part of itself:
# an eighth in float8, a half in 4 bits. Scales that are not shared would be off by more.
EDGE = {"nvfp4": 0.1}


def edge(name: str) -> float:
    return EDGE.get(name.split("_")[0], 3e-2)


def model(config: Any) -> Any:
    with torch.device("meta"):
        return build(config, seq_len=16)


def convert(made: Any, config: Any, tp: int = 1) -> Any:
    build(config, mesh=Degrees(tp=tp), compile=False).convert(made)
    return made


# --------------------------------------------------------------------------------------- what is converted


def test_linear_layers_and_experts_keep_their_parameters() -> None:
    for config, sizes, kind in ((MXFP8Linear(), DENSE, Linear), (MXFP8Experts(), EXPERTS, QuantizedExperts)):
        before, after = model(sizes), convert(model(sizes), config)
        shapes = {name: p.shape for name, p in before.named_parameters()}
        assert {name: p.shape for name, p in after.named_parameters()} == shapes
        assert any(isinstance(module, kind) for module in after.modules())


def test_skip_takes_layers_and_experts() -> None:
    made = convert(model(EXPERTS), Float8Experts(skip=["layers.0.*"]))
    kinds = {n: isinstance(m, QuantizedExperts) for n, m in made.named_modules() if isinstance(m, Experts)}
    assert kinds == {"layers.0.moe.experts": False, "layers.1.moe.experts": True}
    with pytest.raises(RecipeError, match="skip = 'expert' matches no group of experts"):
        convert(model(EXPERTS), Float8Experts(skip=["expert"]))
    with pytest.raises(RecipeError, match="float8_experts converts nothing: the model has no group of expe"):
        convert(model(DENSE), Float8Experts())


def test_sides_that_are_no_whole_blocks_are_left_and_told(caplog: pytest.LogCaptureFixture) -> None:

    with caplog.at_level(logging.WARNING, "titancli"):
        convert(model(replace(DENSE, hidden_dim=144)), MXFP8Linear(skip=["output"]))
    assert (
        "layers.*.feed_forward.w1, layers.*.feed_forward.w3 ([144, 128] is not divisible by 32)"
        in caplog.text
    )
    odd = replace(EXPERTS, moe=replace(EXPERTS.moe, hidden_dim=96))
    with pytest.raises(RecipeError, match=r"w1 \[96, 128\] is not divisible by 128"):
        convert(model(odd), Float8Experts(recipe="blockwise"))


def test_two_converters_share_a_model_and_none_takes_what_another_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = convert(convert(model(EXPERTS), MXFP8Linear(skip=["output", "moe.*"])), Float8Experts())
    assert {m.scheme.format for m in made.modules() if isinstance(m, Linear)} == {"mxfp8"}
    with pytest.raises(RecipeError, match="in low precision already"):
        convert(made, NVFP4Experts())
    with pytest.raises(RecipeError, match="class Linear has its own forward"):
        convert(made, NVFP4Linear(skip=["output", "moe.*"]))


# ------------------------------------------------------------------------------------------------ refusals


def refused(config: Any, *converters: Any) -> list[str]:
    recipe = low_cases.recipe_with(config, list(converters), weights="unread")
    return [message for one in converters for _, message in one.check(recipe)]


def test_adapters_and_low_precision_are_told_apart() -> None:
    assert refused(EXPERTS, Float8Experts(), LoRA()) == []
    assert refused(EXPERTS, LoRA(), Float8Experts()) == [
        "put float8_experts before lora, whose adapters add to the products of experts"
    ]
    assert refused(DENSE, NVFP4Linear(), LoRA()) == [
        "lora and nvfp4_linear change the same layers: use only one of them"
    ]
    from titan_qlora import QLoRA

    assert "qlora stores experts in 4 bits" in " ".join(refused(EXPERTS, MXFP8Experts(), QLoRA()))
    assert refused(DENSE, MXFP8Experts()) == ["the model has no experts"]


@pytest.mark.parametrize("capability", [None, (8, 9), (9, 0), (10, 0)])
def test_hardware_is_checked_by_name(monkeypatch: pytest.MonkeyPatch, capability: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for config, major, where in (
        (Float8Experts(emulate=False), 9, "9.0"),
        (MXFP8Experts(emulate=False), 10, "10.0"),
        (MXFP8Linear(emulate=False), 10, "10.0"),
        (NVFP4Linear(emulate=False), 10, "10.0"),
    ):
        monkeypatch.setattr("titan_float8.hardware.find_spec", lambda name: True)
        if capability is not None and capability[0] == major:
            kernel = build(config, mesh=Degrees(), compile=True).scheme.kernel
            assert kernel == ("hopper" if major == 9 else "torchao")
            continue
        with pytest.raises(EnvironmentProblem, match=f"emulate = false, but .* capability {where}"):
            build(config, mesh=Degrees(), compile=True)
    assert build(MXFP8Linear(emulate=True), mesh=Degrees(), compile=True).scheme.kernel == "emulated"


def test_what_has_no_kernel_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentProblem, match="'blockwise' are only emulated"):
        build(Float8Experts(recipe="blockwise", emulate=False), mesh=Degrees(), compile=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr("titan_float8.hardware.find_spec", lambda name: True)
    with pytest.raises(RecipeError, match="not used with fields other than their defaults"):
        build(NVFP4Linear(hadamard=False), mesh=Degrees(), compile=True)
    with pytest.raises(RecipeError, match=r"not used with mesh\.tp"):
        build(NVFP4Linear(), mesh=Degrees(tp=2), compile=True)


def test_emulation_on_a_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with caplog.at_level(logging.WARNING, "titancli"):
        build(MXFP8Linear(), mesh=Degrees(), compile=True)
    assert "mxfp8_linear emulates MXFP8, slower than bf16" in caplog.text


class OwnProducts(Experts):
    """Multiplies past `product`."""

    def compute(self, x: Any, counts: Any, weights: Any) -> Any:
        return x @ weights["w1"][0].t()


def test_experts_that_multiply_by_themselves_are_refused_by_name() -> None:
    made = model(EXPERTS)
    layer = made.get_submodule("layers.0.moe.experts")
    layer.__class__ = OwnProducts
    convert(made, Float8Experts())
    weights = {name: torch.ones_like(p, device="cpu") for name, p in layer.named_parameters()}
    with pytest.raises(TitanError, match="compute multiplies with w1 without Experts"):
        layer.compute(torch.ones(4, 128), torch.tensor([4, 0, 0, 0]), weights)


def test_a_layer_that_is_whole_on_every_rank_is_refused() -> None:
    made = model(DENSE)
    made.tensor_plan = {**made.tensor_plan, "layers.*.attention.wk.weight": "replicate"}
    with pytest.raises(RecipeError, match=r"mxfp8_linear: with mesh.tp each rank has all of layers\.\*"):
        convert(made, MXFP8Linear(skip=["output"]), tp=2)


# ------------------------------------------------------------------------------------------------- layouts

pytestmark = pytest.mark.ranks
SLOW_FSDP = [name for name in EVERY if name not in ("nvfp4_linear", "float8_experts", "mxfp8_experts")]


@pytest.mark.parametrize("name", rows(EVERY, slow=SLOW_FSDP))
def test_two_ranks_give_the_gradients_of_one(ranks: Any, name: str) -> None:
    (one,) = ranks(1, low_cases.gradients, layout_of(name, micro_batches=2, dtype="bfloat16"))
    for found in ranks(2, low_cases.gradients, layout_of(name, {"dp_shard": 2}, dtype="bfloat16")):
        assert distance(found, one) < 1e-6


@pytest.mark.parametrize("name", rows(LINEARS, slow=["mxfp8_linear floor", "mxfp8_linear wgrad_with_hp"]))
def test_tensor_parallel_gives_the_gradients_of_one(ranks: Any, name: str) -> None:
    (one,) = ranks(1, low_cases.gradients, layout_of(name))
    for found in ranks(2, low_cases.gradients, layout_of(name, {"tp": 2})):
        assert distance(found, one) < edge(name)


@pytest.mark.parametrize("hadamard", [True, False])
def test_tensor_parallel_rounds_as_one_rank(ranks: Any, hadamard: bool) -> None:
    """At random, but each rank its part of what one rank draws."""
    layout = low_cases.Layout(config=DENSE, converters=[NVFP4Linear(skip=["output"], hadamard=hadamard)])
    (one,) = ranks(1, low_cases.gradients, layout)
    for found in ranks(2, low_cases.gradients, replace(layout, mesh={"tp": 2})):
        assert distance(found, one) < edge("nvfp4_linear")


@pytest.mark.parametrize(
    "name",
    rows(
        STACKS,
        slow=["mxfp8_experts wgrad_with_hp", "float8_experts blockwise", "nvfp4_experts wgrad_with_hp"],
    ),
)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}], ids=["EP2", "EP2 of TP2"])
def test_expert_parallel_gives_the_gradients_of_one(ranks: Any, name: str, mesh: dict[str, int]) -> None:
    """An expert's tokens come together from all ranks: of shards of rows in the order that one rank has them
    in; of shards of the sequence in another, so that other tokens of NVFP4's transform meet."""
    if name == "nvfp4_experts" and "tp" in mesh:
        name = "nvfp4_experts wgrad_with_hp"
    (one,) = ranks(1, low_cases.gradients, layout_of(name))
    for found in ranks(2, low_cases.gradients, layout_of(name, mesh)):
        assert distance(found, one) < edge(name)


@pytest.mark.parametrize("name", ["mxfp8_linear", "nvfp4_linear", "float8_experts", "nvfp4_experts"])
@pytest.mark.parametrize("changes", [FULL, BY_OP], ids=["full", "op"])
def test_recomputed_blocks_give_the_same_gradients(ranks: Any, name: str, changes: dict[str, Any]) -> None:
    (one,) = ranks(1, low_cases.gradients, layout_of(name))
    (found,) = ranks(1, low_cases.gradients, layout_of(name, **changes))
    assert distance(found, one) == 0


@pytest.mark.parametrize(
    "name", rows(EVERY, slow=[n for n in EVERY if n not in ("nvfp4_linear", "float8_experts")])
)
def test_compiled_blocks_give_the_same_gradients(ranks: Any, name: str) -> None:
    (one,) = ranks(1, low_cases.gradients, layout_of(name))
    (found,) = ranks(1, low_cases.gradients, layout_of(name, compile="aot_eager"))
    assert distance(found, one) < 1e-5


@pytest.mark.parametrize("config", [NVFP4Linear(skip=["output"]), NVFP4Experts()], ids=["linear", "experts"])
def test_a_resumed_run_rounds_at_random_as_the_one_that_went_on(
    ranks: Any, tmp_path: Any, config: Any
) -> None:
    sizes = EXPERTS if isinstance(config, NVFP4Experts) else DENSE
    layout = low_cases.Layout({"dp_shard": 2}, config=sizes, converters=[config], dtype="bfloat16")
    for straight, resumed in ranks(2, low_cases.resume, layout, str(tmp_path / "step-2")):
        assert straight == resumed


@pytest.mark.parametrize(
    "name",
    rows(EVERY, slow=["mxfp8_linear floor", "mxfp8_experts wgrad_with_hp", "nvfp4_experts wgrad_with_hp"]),
)
def test_it_trains_and_stays_close_to_bf16(ranks: Any, name: str) -> None:
    layout = layout_of(name, dtype="bfloat16")
    (found,) = ranks(1, low_cases.losses, layout, 10)
    (bf16,) = ranks(1, low_cases.losses, layout_of(name, dtype="bfloat16", converters=[]), 10)
    assert found[-1] < 0.7 * found[0]
    assert found != bf16
    off = 0.2 if "nvfp4" in name else 0.05
    assert max(abs(a - b) / b for a, b in zip(found[:5], bf16[:5], strict=True)) < off


@pytest.mark.parametrize(
    "name", rows(STACKS, slow=["mxfp8_experts wgrad_with_hp", "mxfp8_experts", "nvfp4_experts wgrad_with_hp"])
)
def test_transposed_stacks_with_biases(ranks: Any, name: str) -> None:
    (found,) = ranks(1, low_cases.losses, layout_of(name, dtype="bfloat16", config=TRANSPOSED), 6)
    assert found[-1] < found[0]


def adapted(folder: str) -> tuple[list[float], list[str], bool]:
    """Losses of adapters beside experts in float8, what is trained, and whether the base stayed."""
    from pathlib import Path

    from tests.engine import cases
    from titancli.engine import Engine

    plain = low_cases.recipe_with(EXPERTS, [])
    with Engine.build(plain) as base:
        base.save(folder)
    lora = LoRA(targets=["moe.experts.*", "wq"], rank=8)
    recipe = low_cases.recipe_with(EXPERTS, [Float8Experts(), lora], weights=Path(folder))
    with Engine.build(recipe) as made:
        before = {n: p.detach().clone() for n, p in made.named_parameters() if not p.requires_grad}
        found = low_cases.train(made, 8, one_batch=True)
        trained = [n for n, p in made.named_parameters() if p.requires_grad]
        stayed = all(torch.equal(before[n], p) for n, p in made.named_parameters() if n in before)
        assert any(isinstance(m, QuantizedExperts) for m in made.model.modules())
        assert cases.ROWS
    return found, trained, stayed


def test_adapters_of_experts_add_to_products_in_low_precision(ranks: Any, tmp_path: Any) -> None:
    ((losses, trained, stayed),) = ranks(1, adapted, str(tmp_path / "base"))
    assert losses[-1] < losses[0]
    assert all("lora_" in name for name in trained) and any("experts" in name for name in trained)
    assert stayed


def fails_in_the_middle() -> tuple[str, list[float]]:
    """Run a product that raises in backward, and the steps after it."""
    from unittest.mock import patch

    from tests.engine import cases

    with Engine.build(cases.recipe(layout_of("mxfp8_linear"))) as made:
        said = ""
        with patch("titan_float8.products._over_tokens", side_effect=RuntimeError("in the middle")):
            try:
                made.forward_backward(cases.my_batches(made))
            except Exception as error:
                said = str(error)
        made.clear_gradients()
        return said, low_cases.train(made, 2, one_batch=True)


def test_a_product_that_fails_leaves_nothing_behind(ranks: Any) -> None:
    ((said, found),) = ranks(1, fails_in_the_middle)
    assert "in the middle" in said
    (expected,) = ranks(1, low_cases.losses, layout_of("mxfp8_linear"), 2)
    assert found == expected
