"""LoRA: the base untouched, the same adapters on every layout, checkpoints of adapters alone, exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.converters.lora_cases import (
    LORA,
    against_merged,
    begin_with_adapters,
    load_adapters,
    merged_of,
    on_one_stage,
    refused,
    save_adapters,
    save_base,
    save_random,
    steps,
)
from tests.engine.cases import Layout, recipe, small
from tests.models.hf_configs import CONFIGS, LLAMA
from tests.ranks import Ranks
from tests.ranks.layouts import GPT_OSS
from tests.rows import rows
from tests.run.conftest import Finished, here, train  # noqa: F401 - fixtures
from titan_transformers import HFCausalLM
from titancli.checkpoint import CheckpointReader
from titancli.checkpoint.format.metadata import open_metadata
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.converters import LoRA
from titancli.converters.lora import AdaptedLinear, Adapters, adapter_names, merge
from titancli.errors import RecipeError
from titancli.recipe.check import component_checks
from titancli.registry.component import build

pytestmark = pytest.mark.ranks
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def base(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "base"
    ranks(1, save_base, folder)
    return folder


@pytest.fixture(scope="module")
def alone(ranks: Ranks, base: Path) -> dict[str, torch.Tensor]:
    return ranks(1, steps, small(), base)[0]


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def test_only_adapters_move_and_the_base_stays_bit_for_bit(alone: dict[str, torch.Tensor]) -> None:
    names = [name.removeprefix("first ") for name in alone if name.startswith("first ")]
    assert sum(name.endswith("lora_b") for name in names) == 7 * 2
    for name in names:
        same = torch.equal(alone[f"first {name}"], alone[f"last {name}"])
        assert same != name.endswith((".lora_a", ".lora_b")), name
        if name.endswith("lora_b"):
            assert not alone[f"first {name}"].any()
    assert not any(name.startswith("gradient") and "lora" not in name for name in alone)


LAYOUTS = {
    "TP2": (2, small(mesh={"tp": 2})),
    "PP2": (2, small(mesh={"pp": 2})),
    "FSDP2, compiled, AC, accumulation": (
        2,
        small(
            mesh={"dp_shard": 2},
            micro_batches=2,
            compile="aot_eager",
            activation_checkpoint={"mode": "full"},
        ),
    ),
    "FSDP2, accumulation": (2, small(mesh={"dp_shard": 2}, micro_batches=2)),
    "FSDP2xTP2, compiled": (4, small(mesh={"dp_shard": 2, "tp": 2}, compile="aot_eager")),
}


@pytest.mark.parametrize(
    "name",
    rows(LAYOUTS, slow=("FSDP2xTP2, compiled", "FSDP2, compiled, AC, accumulation")),
)
def test_every_layout_trains_the_same_adapters(
    ranks: Ranks, base: Path, alone: dict[str, torch.Tensor], name: str
) -> None:
    count, layout = LAYOUTS[name]
    results = ranks(count, steps, layout, base)
    seen = set()
    for result in results:
        for key, value in result.items():
            seen.add(key)
            assert far(value, alone[key]) < TOLERANCE, key
            if key.startswith("first ") or ("lora" not in key and key.startswith("last ")):
                assert torch.equal(value, alone[key]), key  # initial values, and the base
    assert seen == alone.keys()


@pytest.mark.parametrize("layer", ["layers.0", "layers.1"])
def test_a_pipeline_stage_may_have_nothing_to_train(
    ranks: Ranks, base: Path, tmp_path: Path, layer: str
) -> None:
    lora = LoRA(rank=4, targets=[f"{layer}.*"])
    layout = small(mesh={"pp": 2})
    [alone] = ranks(1, steps, small(), base, 3, lora)
    for result in ranks(2, steps, layout, base, 3, lora):
        for key, value in result.items():
            assert far(value, alone[key]) < TOLERANCE, key
    found = ranks(2, on_one_stage, layout, base, tmp_path / "step-1", lora)
    assert [nothing for _, nothing in found] == [layer == "layers.1", layer == "layers.0"]
    assert found[0][0] == found[1][0] > 0


def test_it_computes_what_the_merged_model_computes(ranks: Ranks, base: Path) -> None:
    [found] = ranks(1, against_merged, base)
    assert len(found) == 2 + 2 * 7 * 2
    assert found.pop("as base") == 0.0
    assert {name: value for name, value in found.items() if value > TOLERANCE} == {}


def test_checkpoints_hold_adapters_alone_and_go_on_bitwise(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-2"
    [expected] = ranks(1, save_adapters, small(), base, folder)
    tensors = open_metadata(folder).tensors
    assert all(".lora_a" in name or ".lora_b" in name for name in tensors)
    assert any(name.startswith("optimizer.") for name in tensors)
    [found] = ranks(1, load_adapters, small(), base, folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for result in ranks(2, load_adapters, small(mesh={"tp": 2}), base, folder):
        assert all(far(result[name], expected[name]) < TOLERANCE for name in expected)
    # As `weights` of another run: base and adapters.
    [(started, told)] = ranks(1, begin_with_adapters, folder)
    assert told["path"] == str(base)
    name = "layers.0.attention.wq.lora_b"
    assert started[name].any() and far(started[name], expected[name]) < 0.9


def test_what_does_not_belong_together_is_refused(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    folder, other = tmp_path / "step-2", tmp_path / "other"
    ranks(1, save_adapters, small(), base, folder)
    ranks(1, save_base, other, 8)
    [said] = ranks(1, refused, other, folder, LORA)
    assert f"holds adapters of the base {base}" in said and f"{other} is a different one" in said
    [said] = ranks(1, refused, base, folder, replace(LORA, alpha=5.0))
    assert "adapters with alpha = 6.0, but this recipe has 5.0" in said
    [said] = ranks(1, refused, folder, None, None)
    assert "contains adapters (lora), not the weights of a model" in said
    assert f"titan convert-checkpoint {folder} FOLDER --to hf" in said


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["wx"], "targets = 'wx' matches no linear layer"),
        (["norm"], "targets = 'norm' matches no linear layer"),
    ],
)
def test_targets_that_are_none_are_refused(targets: list[str], said: str) -> None:
    with torch.device("meta"):
        model = build(recipe(Layout()).model, seq_len=16)
    with pytest.raises(RecipeError) as caught:
        Adapters(LoRA(targets=targets)).convert(model)
    assert said in caught.value.message


def test_a_layer_with_a_forward_of_its_own_gets_no_adapter() -> None:
    with torch.device("meta"):
        model = build(recipe(Layout()).model, seq_len=16)
    layer = model.layers["0"].attention.wq
    layer.forward = lambda x, run=layer.forward: run(x) * 2  # as a converter before this one may do
    with pytest.raises(RecipeError, match=r"layers\.0\.attention\.wq \(Linear, with a forward of its own\)"):
        Adapters(LoRA(targets=["wq"])).convert(model)
    Adapters(LoRA()).convert(model)
    assert type(layer) is torch.nn.Linear
    assert isinstance(model.layers["1"].attention.wq, AdaptedLinear)


def test_targets_are_names_ends_and_patterns() -> None:
    with torch.device("meta"):
        model = build(recipe(Layout()).model, seq_len=16)
    Adapters(LoRA(targets=["layers.0.attention.wq", "w2", "layers.3.*"])).convert(model)
    adapted = [
        name.removesuffix(".lora_a") for name, _ in model.named_parameters() if name.endswith("lora_a")
    ]
    w2 = [f"layers.{n}.feed_forward.w2" for n in range(3)]
    assert [name for name in adapted if "layers.3" not in name] == ["layers.0.attention.wq", *w2]
    assert len(adapted) == 4 + 7


def test_what_cannot_go_with_it_is_told_by_the_recipe() -> None:
    from titan_float8 import Float8Linear

    made = replace(recipe(Layout(converters=[LORA, Float8Linear()])))
    said = " ".join(message for _, message, _ in component_checks(made))
    assert "adapters need a base" in said and "lora and float8_linear change the same layers" in said


# ------------------------------------------------------------------------------------------------ biases

PLAIN_GPT_OSS = replace(
    GPT_OSS, moe=replace(GPT_OSS.moe, load_balance_coeff=None)
)  # its wq and wo are square
QWEN2 = HFCausalLM(config={**LLAMA, "model_type": "qwen2"})  # q, k and v have biases
ODD = HFCausalLM(  # all have, and no size is a multiple of another
    config={**LLAMA, "attention_bias": True, "mlp_bias": True, "hidden_size": 35, "head_dim": 6}
    | {"intermediate_size": 37, "num_attention_heads": 5, "num_key_value_heads": 1}
)
WITH_ALL = HFCausalLM(config={**LLAMA, "attention_bias": True, "mlp_bias": True})
BIASED = {"gpt_oss": PLAIN_GPT_OSS, "qwen2": QWEN2, "odd": ODD, "llama": WITH_ALL}
BIASED_LAYOUTS = {
    "gpt_oss": (1, Layout(config=PLAIN_GPT_OSS)),
    "gpt_oss, TP2": (2, Layout({"tp": 2}, config=PLAIN_GPT_OSS)),
    "gpt_oss, PP2": (2, Layout({"pp": 2}, config=PLAIN_GPT_OSS)),
    "qwen2, TP2": (2, Layout({"tp": 2}, config=QWEN2)),
    "llama, TP2": (2, Layout({"tp": 2}, config=WITH_ALL)),
    "odd": (1, Layout(config=ODD)),
    "odd, FSDP2": (2, Layout({"dp_shard": 2}, config=ODD)),
}
THREE = LoRA(rank=3, alpha=5.0)
SLOW = ("qwen2, TP2", "odd", "llama, TP2")
"""Of llama on TP2 more layers have biases, in both ways of cutting; and odd is on FSDP2 what it is alone."""


@pytest.fixture(scope="module")
def biased_base(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def of(family: str) -> Path:
        folder = tmp_path_factory.mktemp("biased") / family
        ranks(1, save_random, folder, BIASED[family])
        return folder

    return of


@pytest.mark.parametrize("name", rows(BIASED_LAYOUTS, slow=SLOW))
def test_a_bias_stays_the_bases_and_only_the_weight_gets_the_product(
    ranks: Ranks, biased_base: Callable[[str], Path], name: str
) -> None:
    """On every layout the same; biases bit for bit, weights as fp64 has them."""
    world, layout = BIASED_LAYOUTS[name]
    family = name.partition(",")[0]
    base = CheckpointReader(biased_base(family), prefix="model.")
    form = hf_form(BIASED[family])
    first, *others = ranks(world, merged_of, layout, biased_base(family), THREE)
    found = first["weights"]
    adapters = {key: value for result in (first, *others) for key, value in result["adapters"].items()}
    assert any(key.endswith("lora_b") and value.any() for key, value in adapters.items())
    expected: dict[str, torch.Tensor] = {}
    for key in base.names():
        whole = base.read(key)
        if adapter_names(key)[0] in adapters:
            a, b = (adapters[own].double() for own in adapter_names(key))
            whole = (whole.double() + 5.0 / 3.0 * b @ a).float()
        expected |= dict(form.to_hf(key, whole))
    assert first["names"] == list(found) and found.keys() == expected.keys()
    assert any(key.endswith("bias") for key in found)
    for key, value in expected.items():
        if key.endswith("bias"):
            assert torch.equal(found[key], value), key
        assert far(found[key], value) < 1e-6, key
        assert torch.equal(first["pushed"][key], found[key]), key
    for other in others:
        assert other["names"] == first["names"] and not other["weights"]


@pytest.mark.parametrize(
    "name",
    rows(["gpt_oss, TP2", "qwen2, TP2", "llama, TP2", "odd, FSDP2"], slow=("gpt_oss, TP2", "qwen2, TP2")),
)
def test_layers_with_a_bias_train_alike_on_every_layout(
    ranks: Ranks, biased_base: Callable[[str], Path], name: str
) -> None:
    """Weights are larger here than initial ones, and gradients of queries small: 1e-5 is noise."""
    world, layout = BIASED_LAYOUTS[name]
    family = name.partition(",")[0]
    [alone] = ranks(1, steps, Layout(config=BIASED[family]), biased_base(family))
    for result in ranks(world, steps, layout, biased_base(family)):
        assert result.keys() == alone.keys()
        assert {k: d for k in alone if (d := far(result[k], alone[k])) > 5e-5} == {}


def test_a_model_of_which_no_layer_fits_is_refused() -> None:
    with torch.device("meta"):
        model = build(HFCausalLM(config=CONFIGS["gpt2"]), seq_len=16)  # Conv1D, and no plan
    with pytest.raises(RecipeError, match="no layer of this model can have an adapter"):
        Adapters(LoRA()).convert(model)


# ---------------------------------------------------------------------------------------------- precision


def test_a_merge_is_rounded_by_who_writes_it_alone() -> None:
    weight = torch.ones(2, 3, dtype=torch.bfloat16)
    merged = merge(weight, torch.ones(1, 3), torch.full((2, 1), 2.0 + 2**-9), 0.5)
    assert merged.dtype == torch.float32 and (merged == 2 + 2**-10).all()


def test_a_merge_is_what_fp64_makes_whatever_fp32_products_are_computed_in() -> None:
    drawn = torch.Generator().manual_seed(0)
    shapes = ((3000, 37), (5, 37), (3000, 5))  # rows that no block divides
    weight, a, b = (torch.randn(shape, generator=drawn) for shape in shapes)
    before = weight.clone()
    expected = weight.double() + 0.3 * (b.double() @ a.double())
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(merge(weight, a, b, 0.3), expected.float())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(weight, before)


# ------------------------------------------------------------------------------------------- by commands

SMALL = (
    *("sft_debug", "training.steps=4", "lr_scheduler.warmup_steps=1", "model.dim=32", "model.n_layers=2"),
    *("model.hidden_dim=64", "training.seq_len=128", "validation.freq=4"),
)
ADAPTED = ("weights=base/checkpoints/step-4", 'converters=[{type="lora", rank=4}]', "optimizer.lr=5e-2")


def test_a_run_of_adapters_is_resumed_merged_exported_and_loaded_by_peft(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
    ranks: Ranks,
) -> None:
    from titancli.cli import main

    assert train(*SMALL, "--run-dir", "base").code == 0
    done = train(*SMALL, *ADAPTED, "--run-dir", "r")
    assert done.code == 0, done.err
    assert "lora: 14 layers, " in done.err
    done = train("r", "--resume", "training.steps=6")
    assert done.code == 0, done.err
    for arguments in (
        ("r", "merged", "--to", "hf", "--verify"),
        ("r", "adapters", "--to", "peft"),
        ("base", "plain", "--to", "hf"),
    ):
        assert main(["convert-checkpoint", *arguments]) == 0
    [ours] = ranks(1, logits, here / "r")
    theirs = {"merged": of_transformers("merged"), "peft": of_transformers("plain", "adapters")}
    for name, found in theirs.items():
        assert far(found, ours) < TOLERANCE, name
    assert far(of_transformers("plain"), ours) > 1e-2
    assert main(["generate", "r", "--chat", "What is 1 + 1?", "--max-new-tokens", "3"]) == 0
    (here / "base/checkpoints/step-4/manifest.json").unlink()
    done = train("r", "--resume", "training.steps=7")
    assert done.code == 5 and "Traceback" not in done.err


TOKENS = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(0))


def logits(run: Path) -> torch.Tensor:
    """Of the unmerged model."""
    from titancli.engine import Engine

    engine = Engine.frozen(run)
    return engine.forward({"tokens": TOKENS}, return_logits=True)


@torch.no_grad()
def of_transformers(folder: str, adapters: str | None = None) -> torch.Tensor:
    from titancli.checkpoint.hf.compare import load_in_transformers

    model = load_in_transformers(Path(folder).absolute())
    if adapters is not None:
        peft = pytest.importorskip("peft", reason="the extra [dev] installs it")
        model = peft.PeftModel.from_pretrained(model, adapters)
    return model.eval()(input_ids=TOKENS).logits


def test_the_base_within_the_base_stays_the_base() -> None:
    layer = torch.nn.Linear(4, 4)
    AdaptedLinear.adapt(layer, 2, 1.0)
    adapters = Adapters(LoRA())
    with adapters.disabled([layer]):
        with adapters.disabled([layer]):
            assert not layer.enabled
        assert not layer.enabled
    assert layer.enabled
