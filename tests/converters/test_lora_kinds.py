"""rsLoRA, DoRA, and adapters of the embedding and the output: as peft has them, on every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.converters.lora_cases import (
    load_adapters,
    merged_beside,
    refused,
    save_adapters,
    save_base,
    save_random,
    steps,
)
from tests.converters.test_lora_experts import OWN
from tests.engine.cases import Layout, recipe, small, whole_batch
from tests.ranks import Ranks
from tests.rows import rows
from titancli.checkpoint import CheckpointReader, export_hf
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.peft_names import placed
from titancli.cli import main
from titancli.converters import LoRA
from titancli.converters.lora import Adapters, adapter_names, magnitude_name, weights_of
from titancli.errors import RecipeError
from titancli.optimizers.schedule import schedule_of
from titancli.registry.component import build

pytestmark = pytest.mark.ranks
ALL = ["layers.*", "output"]
KINDS = {
    "rslora": LoRA(rank=4, alpha=6.0, rslora=True),
    "dora": LoRA(rank=4, alpha=6.0, dora=True, targets=ALL),
    "both": LoRA(rank=3, alpha=5.0, dora=True, rslora=True, targets=["wq", "w2", "wo"]),
    "embedding": LoRA(rank=4, alpha=6.0, rslora=True, targets=["tok_embeddings", "output", "wq"]),
}


@pytest.fixture(scope="module")
def base(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds") / "base"
    ranks(1, save_base, folder)
    return folder


@pytest.fixture(scope="module")
def alone(ranks: Ranks, base: Path) -> dict[str, dict[str, Tensor]]:
    return {name: ranks(1, steps, small(), base, 3, lora)[0] for name, lora in KINDS.items()}


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def in_peft(model: Any, found: dict[str, Tensor], which: str) -> dict[str, Tensor]:
    """Adapters under the names and in the shapes of peft."""
    own = {key.removeprefix(f"{which} "): value for key, value in found.items() if key.startswith(which)}
    made: dict[str, Tensor] = {}
    for weight, several in placed(model, weights_of(own)).items():
        names = [*adapter_names(weight), *({magnitude_name(weight)} & own.keys())]
        for one in several:
            made |= dict(zip(one.keys, one.of(*(own[name] for name in names)), strict=False))
    return made


@pytest.mark.parametrize("name", KINDS)
def test_three_steps_are_those_of_peft(
    base: Path, alone: dict[str, dict[str, Tensor]], tmp_path: Path, name: str
) -> None:
    """Losses, gradients and values, with our first values in both."""
    peft = pytest.importorskip("peft", reason="the extra [dev] installs it")
    from titancli.checkpoint.hf.compare import load_in_transformers

    lora, settings, ours = KINDS[name], recipe(small()), alone[name]
    model = settings.model
    reader = CheckpointReader(base, prefix="model.")
    export_hf({key: reader.read(key) for key in reader.names()}, hf_form(model), {}, tmp_path / "hf")
    first = in_peft(model, ours, "first")
    modules = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in first}
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=sorted(modules),
        lora_dropout=0.0,
    )
    theirs = peft.get_peft_model(load_in_transformers(tmp_path / "hf"), config)
    magnitudes = {key: value for key, value in named(peft, theirs).items() if "magnitude" in key}
    assert bool(magnitudes) == lora.dora
    for key, value in magnitudes.items():  # they begin as ours do
        assert torch.allclose(first[key], value, rtol=1e-6), key
    loaded = peft.set_peft_model_state_dict(theirs, first)
    assert not loaded.unexpected_keys
    assert named(peft, theirs).keys() == first.keys()
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    adamw = settings.optimizer
    optimizer = torch.optim.AdamW(
        trained,
        lr=adamw.lr,
        betas=(adamw.beta1, adamw.beta2),
        eps=adamw.eps,
        weight_decay=adamw.weight_decay,
    )
    factor = schedule_of(settings)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = adamw.lr * factor(step)
        batch = whole_batch(step)
        logits = theirs(input_ids=batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = named(peft, theirs, gradients=True)
        norm = torch.nn.utils.clip_grad_norm_(trained, settings.training.max_norm)
        assert far(ours[f"loss {step}"], loss.detach()) < 1e-6
        assert far(ours[f"grad_norm {step}"], norm) < 2e-6
        optimizer.step()
    expected = in_peft(model, ours, "gradient")
    for key, value in gradients.items():
        assert float((expected[key] - value).abs().max()) < 1e-6, key
    last = in_peft(model, ours, "last")
    for key, value in named(peft, theirs).items():
        assert float((last[key] - value).abs().max()) < 1e-6, key
        assert not torch.equal(first[key], value), key


def named(peft: Any, model: Any, gradients: bool = False) -> dict[str, Tensor]:
    """The adapters of a model of peft, by the names of its files."""
    if not gradients:
        return {
            key: value.detach().clone()
            for key, value in peft.get_peft_model_state_dict(model, save_embedding_layers=False).items()
        }
    state = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    found = {key.replace(".default", ""): value.clone() for key, value in state.items()}
    return {key.removesuffix(".weight") if "magnitude" in key else key: value for key, value in found.items()}


LAYOUTS = {
    "FSDP2": (2, small(mesh={"dp_shard": 2}, micro_batches=2)),
    "TP2": (2, small(mesh={"tp": 2})),
    "PP2": (2, small(mesh={"pp": 2})),
    "FSDP2xTP2": (4, small(mesh={"dp_shard": 2, "tp": 2})),
    "FSDP2xTP2, compiled, AC": (
        4,
        small(mesh={"dp_shard": 2, "tp": 2}, compile="aot_eager", activation_checkpoint={"mode": "full"}),
    ),
}


@pytest.mark.parametrize("kind", ["dora", "embedding"])
@pytest.mark.parametrize("name", rows(LAYOUTS, slow=("FSDP2xTP2, compiled, AC",)))
def test_every_layout_trains_the_same_adapters(
    ranks: Ranks, base: Path, alone: dict[str, dict[str, Tensor]], name: str, kind: str
) -> None:
    count, layout = LAYOUTS[name]
    seen = set()
    for result in ranks(count, steps, layout, base, 3, KINDS[kind]):
        for key, value in result.items():
            seen.add(key)
            assert float((value - alone[kind][key]).abs().max()) < 2e-6, key
            if key.startswith("first "):
                assert torch.equal(value, alone[kind][key]), key
    assert seen == alone[kind].keys()


@pytest.mark.parametrize("kind", ["dora", "embedding"])
def test_they_are_exported_merged_and_for_peft(
    ranks: Ranks, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """With `--verify`, which compares with transformers and peft; and they start another run."""
    folder = tmp_path / "step-2"
    [expected] = ranks(1, save_adapters, small(), base, folder, KINDS[kind])
    for form in ("hf", "peft"):
        code = main(["convert-checkpoint", str(folder), str(tmp_path / form), "--to", form, "--verify"])
        out = capsys.readouterr().out
        assert code == 0 and "verified: yes" in out, out
    said = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert said["use_dora"] == (kind == "dora") and said["use_rslora"] == (kind != "dora")
    with safe_open(tmp_path / "peft/adapter_model.safetensors", "pt") as file:
        keys = set(file.keys())
    stem = "base_model.model.model"
    wanted = {
        "dora": {f"{stem}.layers.1.mlp.down_proj.lora_magnitude_vector"},
        "embedding": {f"{stem}.embed_tokens.lora_embedding_A", f"{stem}.embed_tokens.lora_embedding_B"},
    }
    assert wanted[kind] < keys
    [found] = ranks(1, load_adapters, small(), base, folder, KINDS[kind])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for result in ranks(2, load_adapters, small(mesh={"tp": 2}), base, folder, KINDS[kind]):
        assert all(float((result[name] - expected[name]).abs().max()) < 2e-6 for name in expected)


@pytest.mark.parametrize("kind", ["dora", "embedding"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_merged_model_computes_the_same(ranks: Ranks, base: Path, kind: str, world: int) -> None:
    layout = small(mesh={"tp": world}) if world > 1 else small()
    for found in ranks(world, merged_beside, layout, base, KINDS[kind]):
        assert found["merged"] < 1e-5 and found["as base"] == 0.0, found


def test_magnitudes_of_another_recipe_are_refused(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    ranks(1, save_adapters, small(), base, tmp_path / "step-2", KINDS["dora"])
    [said] = ranks(1, refused, base, tmp_path / "step-2", replace(KINDS["dora"], dora=False))
    assert "adapters with dora = True, but this recipe has False" in said


@pytest.mark.parametrize(
    ("config", "lora", "said"),
    [
        ({}, LoRA(dora=True, targets=["tok_embeddings"]), "tok_embeddings.weight cannot have magnitudes"),
        ({"tied": True}, LoRA(targets=["output"]), "output and tok_embeddings share a weight"),
        ({"tied": True}, LoRA(targets=["tok_embeddings"]), "tok_embeddings and output share a weight"),
    ],
)
def test_what_has_no_such_form_is_refused(config: dict[str, Any], lora: LoRA, said: str) -> None:
    with torch.device("meta"):
        model = build(recipe(Layout(**config)).model, seq_len=16)
    with pytest.raises(RecipeError) as caught:
        Adapters(lora).convert(model)
    assert said in caught.value.message and caught.value.hint


def test_experts_have_no_magnitudes() -> None:
    with torch.device("meta"):
        model = build(OWN, seq_len=16)
    with pytest.raises(RecipeError, match=r"experts\.w1 cannot have magnitudes"):
        Adapters(LoRA(dora=True, targets=["experts.*"])).convert(model)


def test_beside_experts_they_are_the_same_on_ep(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, save_random, tmp_path / "base", OWN)
    lora = LoRA(rank=8, dora=True, rslora=True, targets=["wq", "wo"])
    [alone] = ranks(1, steps, Layout(config=OWN), tmp_path / "base", 3, lora)
    for result in ranks(2, steps, Layout({"dp_shard": 2, "ep": 2}, config=OWN), tmp_path / "base", 3, lora):
        assert {key: d for key in result if (d := far(result[key], alone[key])) > 5e-5} == {}


def test_the_factor_of_rslora_is_that_of_the_root() -> None:
    assert Adapters(LoRA(rank=4, alpha=6.0, rslora=True)).scale == 3.0
    assert Adapters(LoRA(rank=4, alpha=6.0)).scale == 1.5
