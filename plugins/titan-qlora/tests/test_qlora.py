"""Adapters beside a quantized base: a dense model's gradients, the same on every layout, resumed bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qlora_cases import (
    DENSE,
    EXPERTS,
    GPT_OSS,
    MOE,
    QLORA,
    TWO,
    UNEVEN,
    held,
    resume,
    save_and_go_on,
    save_base,
    save_rounded,
    save_trained,
    snapshot_and_sample,
    steps,
)

from tests.engine.cases import Layout
from tests.ranks import Ranks
from titan_qlora import QLoRA
from titan_qlora.converter import bytes_of
from titancli.checkpoint import read_hf
from titancli.checkpoint.format.metadata import open_metadata
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.cli import main
from titancli.converters import LoRA
from titancli.registry.component import build

pytestmark = pytest.mark.ranks
TOLERANCE = 1e-5
MODELS: dict[str, Any] = {"dense": DENSE, "uneven": UNEVEN, "experts": MOE, "two": TWO, "gpt_oss": GPT_OSS}
CONVERTERS = {name: QLORA if name in ("dense", "uneven") else EXPERTS for name in MODELS}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "FSDP2": (2, "dense", {"mesh": {"dp_shard": 2}}),
    "FSDP4, uneven": (4, "uneven", {"mesh": {"dp_shard": 4}}),
    "HSDP": (2, "dense", {"mesh": {"dp_replicate": 2}}),
    "TP2": (2, "dense", {"mesh": {"tp": 2}}),
    "FSDP2xTP2": (4, "dense", {"mesh": {"dp_shard": 2, "tp": 2}}),
    "PP2": (2, "dense", {"mesh": {"pp": 2}}),
    "CP2": (2, "dense", {"mesh": {"cp": 2}}),
    "FSDP2, AC": (2, "dense", {"mesh": {"dp_shard": 2}, "activation_checkpoint": {"mode": "full"}}),
    "experts, FSDP2": (2, "experts", {"mesh": {"dp_shard": 2}}),
    "EP2": (2, "experts", {"mesh": {"dp_shard": 2, "ep": 2}}),
    "EP2xTP2": (4, "experts", {"mesh": {"dp_shard": 2, "tp": 2, "ep": 2}}),
    "EP2xFSDP2": (4, "experts", {"mesh": {"dp_shard": 4, "ep": 2}}),
    "two experts, FSDP4": (4, "two", {"mesh": {"dp_shard": 4}}),
    "gpt_oss, EP2": (2, "gpt_oss", {"mesh": {"dp_shard": 2, "ep": 2}}),
}


def layout(model: str, **more: Any) -> Layout:
    return Layout(**{"mesh": {}, **more}, config=MODELS[model])


@pytest.fixture(scope="module")
def bases(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def base(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp("qlora") / "base"
            ranks(1, save_base, made[model], layout(model))
        return made[model]

    return base


@pytest.fixture(scope="module")
def alone(ranks: Ranks, bases: Any) -> Any:
    made: dict[str, dict[str, Any]] = {}

    def found(model: str) -> dict[str, Any]:
        if model not in made:
            [made[model]] = ranks(1, steps, layout(model), bases(model), CONVERTERS[model])
        return made[model]

    return found


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_a_dense_model_with_the_dequantized_weights(
    ranks: Ranks, bases: Any, alone: Any, tmp_path: Path, model: str
) -> None:
    converter = CONVERTERS[model]
    ranks(1, save_rounded, bases(model), tmp_path / "rounded", layout(model), converter)
    lora = LoRA(rank=converter.rank, alpha=converter.alpha, targets=converter.targets)
    [expected] = ranks(1, steps, layout(model), tmp_path / "rounded", lora)
    found = alone(model)
    assert found.keys() == expected.keys()
    assert any("lora_b" in name for name in found)
    for name, value in expected.items():
        assert far(found[name], value) <= 1e-6, name
        if name.startswith("base "):
            assert torch.equal(found[name], value), name


def test_dora_has_the_magnitudes_of_the_quantized_base(ranks: Ranks, bases: Any, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"rank": 8, "alpha": 12.0, "rslora": True, "dora": True}
    ranks(1, save_rounded, bases("dense"), tmp_path / "rounded", layout("dense"), QLORA)
    [expected] = ranks(1, steps, layout("dense"), tmp_path / "rounded", LoRA(**fields))
    found = ranks(2, steps, layout("dense", mesh={"tp": 2}), bases("dense"), QLoRA(**fields))
    for name, value in expected.items():
        assert far(found[0][name], value) < TOLERANCE, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_the_same_adapters(ranks: Ranks, bases: Any, alone: Any, name: str) -> None:
    count, model, more = LAYOUTS[name]
    expected = alone(model)
    results = ranks(count, steps, layout(model, **more), bases(model), CONVERTERS[model])
    assert {key for result in results for key in result} == expected.keys()
    for result in results:
        for key, value in result.items():
            if key.startswith("base "):  # the values that are computed with
                assert torch.equal(value, expected[key]), key
            assert far(value, expected[key]) < TOLERANCE, key


@pytest.mark.parametrize("count", [1, 2])
def test_bfloat16_has_adapters_in_float32(ranks: Ranks, bases: Any, count: int) -> None:
    wide = Layout({"dp_shard": count}, config=MOE, dtype="bfloat16")
    for found in ranks(count, held, wide, bases("experts"), EXPERTS):
        names = [name for name in found if not name.startswith("bytes ")]
        assert {found[name][:2] for name in names if "lora" in name} == {(torch.float32, True)}
        assert all(not found[name][1] for name in names if "lora" not in name)
        stacks = [name for name in names if found[name][2] and ".experts." in name]
        assert len(stacks) == 2 * 3
        for name in stacks:
            assert found[f"bytes {name}"] <= bytes_of((4, 128, 64)) // count + 4 * 8
            assert not any(other.startswith(f"{name}_full") for other in names)


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_checkpoints_hold_adapters_alone_and_go_on_bitwise(
    ranks: Ranks, bases: Any, tmp_path: Path, model: str
) -> None:
    folder, converter = tmp_path / "step-2", CONVERTERS[model]
    two = layout(model, mesh={"dp_shard": 2})
    expected = ranks(2, save_and_go_on, two, bases(model), folder, converter)[0]
    tensors = open_metadata(folder).tensors
    assert all("lora_a" in name or "lora_b" in name for name in tensors)
    for result in ranks(2, resume, two, bases(model), folder, converter):
        assert all(torch.equal(result[name], value) for name, value in expected.items())
    other = layout(model, mesh={"tp": 2} if model == "dense" else {"dp_shard": 2, "ep": 2})
    for result in ranks(2, resume, other, bases(model), folder, converter):
        assert all(far(result[name], value) < TOLERANCE for name, value in expected.items())


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_exports_are_what_was_trained(
    ranks: Ranks, bases: Any, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "step-2"
    [trained] = ranks(1, save_trained, layout(model), bases(model), folder, CONVERTERS[model])
    for form in ("hf", "peft"):
        options = ["--dtype", "float32"] if form == "hf" else []
        code = main(
            ["convert-checkpoint", str(folder), str(tmp_path / form), "--to", form, "--verify", *options]
        )
        said = capsys.readouterr()
        assert code == 0 and "verified: yes" in said.out, said.err
    found = read_hf(tmp_path / "hf", hf_form(MODELS[model]))
    for name, tensor in hf_tensors(found, MODELS[model]).items():
        assert far(tensor, trained[name]) < 1e-6, name


def hf_tensors(reader: Any, config: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        names = [name for name, _ in build(config, seq_len=1).named_parameters()]
    form = hf_form(config)
    return {hf: value for name in names for hf, value in form.to_hf(name, reader.parameter(name))}


@pytest.mark.parametrize(("count", "mesh"), [(1, {}), (2, {"dp_shard": 2}), (2, {"tp": 2})])
def test_a_copy_has_the_same_codes_and_draws_the_same(
    ranks: Ranks, bases: Any, count: int, mesh: dict[str, int]
) -> None:
    wide = Layout(mesh, config=DENSE, dtype="bfloat16")
    for difference, drawn, again, said in ranks(count, snapshot_and_sample, wide, bases("dense"), QLORA):
        assert difference == 0.0
        assert drawn == again and len(drawn) == 4
        assert "cannot be written to" in said
