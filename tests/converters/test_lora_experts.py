"""LoRA on stacked experts: what plain arithmetic in fp64 computes, on every layout, merged and resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.converters.lora_cases import against_merged, load_adapters, save_adapters, save_random, steps
from tests.converters.test_lora import far
from tests.engine.cases import Layout
from tests.models.hf_configs import CONFIGS, LLAMA
from tests.models.specs import experts
from tests.ranks import Ranks
from tests.ranks.layouts import EIGHT, GPT_OSS
from tests.rows import rows
from titan_transformers import HFCausalLM
from titancli.checkpoint.format.metadata import open_metadata
from titancli.converters import LoRA
from titancli.converters.lora import Adapters
from titancli.converters.lora_experts import AdaptedExperts
from titancli.errors import RecipeError, TitanError
from titancli.models.blocks.grouped import grouped_linear
from titancli.models.blocks.moe import Experts, JoinedExperts
from titancli.registry.component import build

TOLERANCE = 1e-5
OWN = replace(EIGHT, moe=replace(EIGHT.moe, load_balance_coeff=None))
TRANSPOSED = HFCausalLM(
    config={
        **LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
)
MODELS: dict[str, Any] = {
    "own": OWN,
    "gpt_oss": replace(GPT_OSS, moe=replace(GPT_OSS.moe, load_balance_coeff=None)),
    "transformers": HFCausalLM(config=CONFIGS["experts"]),
    "transformers, transposed": TRANSPOSED,
}


def lora_of(name: str) -> LoRA:
    layers = {"own": ["wo"], "gpt_oss": ["wo"], "transformers": ["o_proj"]}
    return LoRA(rank=8, alpha=12.0, targets=["experts.*", *layers.get(name, [])])


# ------------------------------------------------------------------------------------------- arithmetic


class Transposed(JoinedExperts):
    """Stacks [in, out], as some of transformers' are."""

    is_transposed = True

    @staticmethod
    def shapes(dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        return {"w13": (dim, 2 * hidden_dim), "w2": (hidden_dim, dim)}


def reference(layer: Any, x: Tensor, counts: list[int], weights: Mapping[str, Tensor]) -> Tensor:
    """One expert after the other, with each of its weights W + scale · B·A."""
    whole = {
        name: w + layer.scale * weights[f"{name}_lora_b"] @ weights[f"{name}_lora_a"]
        for name, w in weights.items()
        if "lora" not in name
    }
    if layer.is_transposed:
        whole = {name: w.mT for name, w in whole.items()}
    made = []
    for expert, rows_ in enumerate(x.split(counts)):
        if "w13" in whole:
            gate, up = (rows_ @ whole["w13"][expert].t()).chunk(2, -1)
        else:
            gate, up = rows_ @ whole["w1"][expert].t(), rows_ @ whole["w3"][expert].t()
        made.append((silu(gate) * up) @ whole["w2"][expert].t())
    return torch.cat(made)


@pytest.mark.parametrize("kind", [Experts, JoinedExperts, Transposed])
def test_adapters_of_experts_are_what_float64_makes_of_them(kind: type[Experts]) -> None:
    drawn = torch.Generator().manual_seed(0)
    layer: Any = kind(experts(16, 24, 4))
    stacks = list(layer._parameters)
    for name in stacks:
        layer._parameters[name].requires_grad_(False)
        AdaptedExperts.adapt(layer, name, 8, 0.75)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.3)
    counts = [3, 0, 5, 1]  # one has no tokens
    x = torch.randn(9, 16, generator=drawn, requires_grad=True)
    towards = torch.randn(9, 16, generator=drawn)
    out = layer.over_experts(x, torch.tensor(counts))
    out.backward(towards)
    exact = {
        name: p.detach().double().requires_grad_(p.requires_grad) for name, p in layer.named_parameters()
    }
    x64 = x.detach().double().requires_grad_()
    meant = reference(layer, x64, counts, exact)
    meant.backward(towards.double())
    assert far(out.detach(), meant.detach()) < 1e-6
    assert far(x.grad, x64.grad) < 1e-6  # type: ignore[arg-type]
    for name, p in layer.named_parameters():
        assert (p.grad is None) == (name in stacks)
        if p.grad is not None:
            assert far(p.grad, exact[name].grad) < 1e-6, name  # type: ignore[arg-type]
            assert not bool(p.grad[1].any())
    layer.enabled = False
    frozen = {name: (0 * p if "lora" in name else p) for name, p in exact.items()}
    with torch.no_grad():
        assert far(layer.over_experts(x, torch.tensor(counts)), reference(layer, x64, counts, frozen)) < 1e-6
    assert list(layer._parameters)[:3] == [stacks[0], f"{stacks[0]}_lora_a", f"{stacks[0]}_lora_b"]


class OnItsOwn(Experts):
    """As a plugin may have it."""

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return grouped_linear(x, weights["w1"], counts.cumsum(0).int())


def test_experts_that_would_leave_their_adapters_out_are_refused() -> None:
    layer: Any = OnItsOwn(experts(16, 16, 2))
    AdaptedExperts.adapt(layer, "w1", 8, 1.0)
    with pytest.raises(TitanError, match=r"OnItsOwn\.compute multiplies without Experts\.product"):
        layer.over_experts(torch.ones(2, 16), torch.tensor([1, 1]))


# ---------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (["experts.w2"], ["layers.0.moe.experts.w2", "layers.1.moe.experts.w2"]),
        (["layers.1.moe.experts.*"], [f"layers.1.moe.experts.{name}" for name in ("w1", "w2", "w3")]),
        (["layers.0.attention.*"], [f"layers.0.attention.{name}" for name in ("wq", "wk", "wv", "wo")]),
        (None, [f"layers.{n}.attention.{name}" for n in (0, 1) for name in ("wq", "wk", "wv", "wo")]),
    ],
)
def test_experts_are_adapted_where_a_target_names_them(targets: Any, wanted: list[str]) -> None:
    with torch.device("meta"):
        model = build(OWN, seq_len=16)
    Adapters(LoRA(targets=targets)).convert(model)
    found = [name for name, _ in model.named_parameters() if name.endswith("lora_a")]
    assert sorted(name[:-7] for name in found) == sorted(wanted)


def test_experts_that_a_converter_has_given_another_computation_get_none() -> None:
    with torch.device("meta"):
        model = build(OWN, seq_len=16)
    experts = model.layers["0"].moe.experts
    experts.compute = experts.compute
    with pytest.raises(RecipeError, match="experts whose compute a converter has replaced cannot have"):
        Adapters(LoRA(targets=["experts.*"])).convert(model)


def test_what_grouped_products_cannot_have_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = build(OWN, seq_len=16)
    with pytest.raises(RecipeError, match=r"layers\.0\.moe\.experts\.w\d cannot have an adapter of rank 4"):
        Adapters(LoRA(rank=4, targets=["experts.*"])).convert(model)
    with pytest.raises(RecipeError, match=r"'experts\.w5' matches no linear layer") as caught:
        Adapters(LoRA(targets=["experts.w5"])).convert(model)
    assert "experts.w" in (caught.value.hint or "")


# ---------------------------------------------------------------------------------------------- layouts


@pytest.fixture(scope="module")
def base(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("experts") / "base"
        ranks(1, save_random, folder, MODELS[name])
        return folder

    return of


@pytest.mark.ranks
@pytest.mark.parametrize("name", rows(MODELS, slow=tuple(MODELS)[1:]))
def test_it_computes_what_the_merged_experts_compute(
    ranks: Ranks, base: Callable[[str], Path], name: str
) -> None:
    """And the adapters' gradients are what the chain rule makes of the merged weights'."""
    [found] = ranks(1, against_merged, base(name), Layout(config=MODELS[name]), lora_of(name))
    assert sum("experts" in key for key in found) == (12 if name in ("own", "transformers") else 8)
    assert found.pop("as base") == 0.0
    assert {key: value for key, value in found.items() if value > TOLERANCE} == {}


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "EP2": (2, "own", {"mesh": {"dp_shard": 2, "ep": 2}}),
    "FSDP2": (2, "own", {"mesh": {"dp_shard": 2}}),
    "TP2": (2, "own", {"mesh": {"tp": 2}}),
    "EP2 of TP2, compiled": (2, "own", {"mesh": {"tp": 2, "ep": 2}, "compile": "aot_eager"}),
    "EP2xFSDP2, accumulation": (4, "own", {"mesh": {"dp_shard": 4, "ep": 2}, "micro_batches": 2}),
    "gpt_oss, EP2xTP2": (4, "gpt_oss", {"mesh": {"dp_shard": 2, "tp": 2, "ep": 2}}),
    "transformers, EP2": (2, "transformers", {"mesh": {"dp_shard": 2, "ep": 2}}),
    "transposed, EP2": (2, "transformers, transposed", {"mesh": {"dp_shard": 2, "ep": 2}}),
    "PP2": (2, "own", {"mesh": {"pp": 2}}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", rows(LAYOUTS, slow=tuple(name for name in LAYOUTS if name != "EP2")))
def test_every_layout_trains_the_same_adapters_of_experts(
    ranks: Ranks, base: Callable[[str], Path], layout: str
) -> None:
    world, name, options = LAYOUTS[layout]
    config, lora = MODELS[name], lora_of(name)
    [alone] = ranks(1, steps, Layout(config=config), base(name), 2, lora)
    for result in ranks(world, steps, Layout(config=config, **options), base(name), 2, lora):
        assert {k: d for k, v in result.items() if (d := far(v, alone[k])) > 5 * TOLERANCE} == {}
    assert any("experts" in key and key.startswith("gradient") for key in alone)


@pytest.mark.ranks
def test_checkpoints_of_experts_hold_adapters_alone_and_go_on_elsewhere(
    ranks: Ranks, base: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, lora = tmp_path / "step-2", lora_of("own")
    [expected] = ranks(1, save_adapters, Layout(config=OWN), base("own"), folder, lora)
    assert all("lora_" in name for name in open_metadata(folder).tensors)
    [found] = ranks(1, load_adapters, Layout(config=OWN), base("own"), folder, lora)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    spread = Layout(config=OWN, mesh={"dp_shard": 2, "ep": 2})
    for result in ranks(2, load_adapters, spread, base("own"), folder, lora):
        assert all(far(result[name], expected[name]) < TOLERANCE for name in expected)
