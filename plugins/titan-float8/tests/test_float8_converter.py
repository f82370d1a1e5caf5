"""Which layers are converted, under which names, and what is refused."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from titan_float8 import Float8Linear
from titan_float8.ao import Float8Linear as TorchaoLinear
from titan_float8.linear import build
from titan_float8.weight import GatheredWeight, plain
from titan_testing import check_plugin
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.layout.degrees import Degrees
from titancli.models import Llama3
from titancli.models.blocks.decoder import build as build_llama3
from titancli.recipe import load_recipe

BLOCK = {"attention.wq", "attention.wk", "attention.wv", "attention.wo"}
BLOCK |= {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}
ALL = {f"layers.{i}.{name}" for i in range(2) for name in BLOCK}


def llama(**changes: Any) -> nn.Module:
    sizes = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=64)
    with torch.device("meta"):
        return build_llama3(Llama3(**{**sizes, **changes}), seq_len=16)


def convert(model: nn.Module, tp: int = 1, **fields: Any) -> set[str]:
    """Convert, and return the names of what was converted."""
    build(Float8Linear(**fields), mesh=Degrees(tp=tp), compile=False).convert(model)
    return {name for name, module in model.named_modules() if isinstance(module, TorchaoLinear)}


def test_every_block_is_converted_and_keeps_its_names_and_shapes():
    before, after = llama(), llama()
    assert convert(after, skip=["output"]) == ALL
    shapes = {name: p.shape for name, p in before.named_parameters()}
    assert {name: p.shape for name, p in after.named_parameters()} == shapes
    layer = after.get_submodule("layers.0.feed_forward.w1")
    assert (layer.in_features, layer.out_features, layer.bias) == (64, 128, None)


def test_weight_and_bias_stay_the_same_parameters():
    model = nn.Sequential(nn.Linear(32, 48))
    weight, bias = model[0].weight, model[0].bias
    convert(model)
    assert model[0].weight is weight
    assert model[0].bias is bias


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["layers.1.attention.wq"], {"layers.1.attention.wq"}),
        (["wq"], {"layers.0.attention.wq", "layers.1.attention.wq"}),
        (["attention.wo", "w2"], {n for n in ALL if n.endswith(("wo", "w2"))}),
        (["layers.0.*"], {n for n in ALL if n.startswith("layers.0.")}),
        (["w[qkv]"], {n for n in ALL if n[-2:] in ("wq", "wk", "wv")}),
    ],
)
def test_skip_takes_full_names_their_ends_and_patterns(skip, left):
    assert convert(llama(), skip=["output", *skip]) == ALL - left


@pytest.mark.parametrize(
    ("name", "hint"),
    [("atention.wq", "'attention.wq'"), ("outptu", "'output'"), ("zzz", r"layers\.\*\.attention\.wq")],
)
def test_a_name_that_matches_nothing_is_an_error_with_what_is_near(name, hint):
    with pytest.raises(RecipeError, match=f"skip = '{name}' matches no linear layer") as caught:
        convert(llama(), skip=["output", name])
    assert caught.match(hint)


def test_layers_that_do_not_fit_are_left_and_told_once(caplog):
    model = llama(hidden_dim=120)
    wq = model.layers["0"].attention.wq
    wq.forward = wq.forward  # as a converter before this one may have replaced it
    with caplog.at_level(logging.WARNING, "titancli"):
        converted = convert(model)
    assert converted == {name for name in ALL if "attention" in name} - {"layers.0.attention.wq"}
    (message,) = caplog.messages
    assert "layers.*.feed_forward.w1, layers.*.feed_forward.w3 ([120, 64] is not divisible by 16)" in message
    assert "layers.*.feed_forward.w2 ([64, 120] is not divisible by 16)" in message
    assert "output (its class Output has its own forward)" in message
    assert "layers.*.attention.wq (it has its own forward)" in message


def test_what_counts_under_tensor_parallelism_is_the_part_of_a_rank():
    # wk and wv are [32, 64]: cut over 4 ranks they have 8 rows. wo's and w2's columns are cut: 16 and 32.
    assert convert(llama(), tp=4, skip=["output"]) == {n for n in ALL if n[-2:] not in ("wk", "wv")}


def test_two_converters_share_the_layers():
    model = llama()
    convert(model, recipe="rowwise", skip=["output", "feed_forward.*"])
    assert convert(model, skip=["output", "attention.*"]) == ALL
    scales = {n.split(".")[2]: m.config.round_scales_to_power_of_2 for n, m in _converted(model)}
    assert scales == {"attention": True, "feed_forward": False}


def _converted(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, TorchaoLinear)]


@pytest.mark.parametrize(
    ("model", "skip", "why"),
    [
        (nn.Sequential(nn.Linear(8, 16)), [], "not divisible by 16"),
        (nn.Sequential(nn.Linear(16, 16)), ["0"], "skip matches every layer"),
    ],
)
def test_a_converter_without_anything_to_convert_is_refused(model, skip, why):
    with pytest.raises(RecipeError, match=f"converts nothing: .*{why}"):
        convert(model, skip=skip)


# ------------------------------------------------------------------------------------------- the recipe


def recipe(**fields: Any) -> Any:
    values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in fields.items())
    return load_recipe("llama3_debug", [f"converters=[{{type = 'float8_linear', {values}}}]"])


@pytest.mark.parametrize(
    ("fields", "key", "message"),
    [
        (
            {"recipe": "rowwise", "enable_fsdp_float8_all_gather": True},
            "enable_fsdp_float8_all_gather",
            "one scale per tensor",
        ),
        (
            {"precompute_float8_dynamic_scale_for_fsdp": True},
            "precompute_float8_dynamic_scale_for_fsdp",
            "only precomputed with enable_fsdp_float8_all_gather = true",
        ),
        ({"recipe": "rowise"}, "recipe", "'rowwise'"),
        ({"skip": "output"}, "skip", "an array"),
        ({"emulate": "yes"}, "emulate", "true or false"),
        ({"filter_fqns": ["output"]}, "filter_fqns", "unknown key"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields, key, message):
    with pytest.raises(RecipeError) as caught:
        recipe(**fields)
    (problem,) = caught.value.problems
    assert key in problem.message + str(problem.location)
    assert message in problem.message + str(problem.hint)


def test_a_model_that_float8_cannot_multiply_is_refused_before_it_is_built():
    converters = "converters=[{type = 'float8_linear'}]"
    with pytest.raises(RecipeError) as caught:
        load_recipe("llama3_debug", [converters, "model.dim=264", "model.n_heads=4"])
    (problem,) = caught.value.problems
    assert "model.dim = 264" in problem.message


def test_a_good_one_is_bound():
    (config,) = recipe(enable_fsdp_float8_all_gather=True, skip=["output"]).recipe.converters
    assert config == Float8Linear(enable_fsdp_float8_all_gather=True, skip=["output"])


# ------------------------------------------------------------------------------------------ the hardware


class Gpu:
    """What torch says of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(torch.version, "hip", hip)


def built(compile: bool = True, **fields: Any) -> Any:
    return build(Float8Linear(**fields), mesh=Degrees(), compile=compile)


@pytest.mark.parametrize(
    ("capability", "hip", "emulated"),
    [
        ((8, 0), None, True),
        ((8, 9), None, False),
        ((9, 0), None, False),
        ((9, 0), "6.4", True),
        ((9, 4), "6.4", False),
        ((11, 0), "6.4", True),
        ((12, 0), "6.4", False),
    ],
)
def test_emulation_is_on_where_the_hardware_has_no_float8(monkeypatch, capability, hip, emulated):
    Gpu(monkeypatch, capability, hip)
    assert built().torchao.emulate is emulated
    assert built(emulate=True).torchao.emulate is True


def test_on_a_cpu_emulation_is_on_unless_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert built().torchao.emulate is True
    assert built(emulate=False).torchao.emulate is False


def test_a_gpu_without_float8_cannot_do_without_emulation(monkeypatch):
    Gpu(monkeypatch, (8, 0), None)
    with pytest.raises(EnvironmentProblem, match="emulate = false, but a GPU does not support float8"):
        built(emulate=False)


def test_float8_that_is_not_compiled_is_warned_of(monkeypatch, caplog):
    Gpu(monkeypatch, (9, 0), None)
    with caplog.at_level(logging.WARNING, "titancli"):
        built(compile=True)
        assert caplog.messages == []
        built(compile=False)
    assert "set compile.enable = true" in caplog.text


def test_fused_rowwise_casts_are_computed_as_in_eager_code():
    from torch._inductor import config

    # Not monkeypatch, which takes what is not in a module's own dictionary away when it is done.
    with config.patch(emulate_precision_casts=False):
        built(compile=True)
        assert config.emulate_precision_casts is False
        built(compile=True, recipe="rowwise")
        assert config.emulate_precision_casts is True


# ------------------------------------------------------------------------------------------- the weight


def gathered() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(32, 48))
    convert(model, enable_fsdp_float8_all_gather=True)
    return model, model[0].weight


def test_a_gathered_weight_computes_like_the_tensor_it_wraps():
    _, weight = gathered()
    inner = plain(weight)
    assert type(inner) is torch.Tensor
    assert type(weight * 2) is torch.Tensor
    assert torch.equal(weight * 2, inner * 2)
    assert isinstance(weight.detach(), GatheredWeight)
    assert isinstance(weight[:5], GatheredWeight)


@pytest.mark.parametrize(
    ("shards", "float8"), [(1, True), (16, True), (24, True), (25, False), (48, True), (49, False)]
)
def test_a_weight_too_thin_for_the_ranks_is_gathered_as_it_is(shards, float8):
    """48 rows over 25 ranks are 2 for each of the first 24, and none for the last."""
    model = nn.Sequential(nn.Linear(32, 48))
    config = Float8Linear(enable_fsdp_float8_all_gather=True)
    build(config, mesh=Degrees(dp_shard=shards), compile=False).convert(model)
    assert isinstance(model[0], TorchaoLinear)
    assert isinstance(model[0].weight.detach(), GatheredWeight) is float8


def test_plain_shares_memory():
    _, weight = gathered()
    converter = built(enable_fsdp_float8_all_gather=True)
    converter.plain("0.weight", weight.detach()).fill_(3.0)
    assert (weight == 3.0).all()
    other = torch.ones(2)
    assert converter.plain("norm.weight", other) is other


@pytest.mark.slow  # imports torch and torchao anew
def test_torchao_is_imported_without_its_noise():
    code = "import titan_float8.linear, logging; logging.getLogger('torchao').warning('a real one')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == ""
    assert ran.stderr.splitlines() == ["a real one"]


def test_the_plugin_is_sound():
    check_plugin("titan-float8")
