"""Adapters out of a checkpoint: merged or for peft, against peft's own merge; and what --verify notices."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.tensors import RUN
from tests.converters.test_lora_experts import OWN, TRANSPOSED
from tests.models.families import DEEPSEEK
from tests.models.hf_configs import CONFIGS, LLAMA
from tests.ranks.layouts import GPT_OSS, IROPE
from tests.rows import rows
from titan_transformers import HFCausalLM
from titancli.checkpoint import CheckpointReader, export_hf, read_hf, save_checkpoint
from titancli.checkpoint import base as merging
from titancli.checkpoint.base import base_of
from titancli.checkpoint.hf import peft
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.peft_names import beside_experts, placed
from titancli.cli import main
from titancli.converters.lora import adapter_names
from titancli.models import Llama3
from titancli.registry.component import build, component_info

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "wq", "wk", "wv", "wo")
ADAPTED = tuple(f"{name}.weight" for name in LAYERS)
STACKED = tuple(f"experts.{name}" for name in ("w1", "w2", "w3", "w13", "gate_up_proj", "down_proj"))
RANK, ALPHA = 8, 16.0
MODELS: dict[str, Any] = {
    "llama3": Llama3(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=300),
    "gpt_oss": replace(GPT_OSS, moe=replace(GPT_OSS.moe, load_balance_coeff=None)),  # biases, square layers
    "llama4": replace(IROPE, moe=replace(IROPE.moe, load_balance_coeff=None)),
    "qwen2": HFCausalLM(config={**LLAMA, "model_type": "qwen2", "intermediate_size": 37}),
    "qwen3": OWN,  # folders have experts one by one
    "experts": HFCausalLM(config=CONFIGS["experts"]),
    "experts, transposed": TRANSPOSED,
}


@dataclass
class Adapted:
    """A base in bfloat16, adapters of it, and what both make together in fp64."""

    config: Any
    base: Path
    checkpoint: Path
    merged: dict[str, Tensor]
    """Under Hugging Face names."""


def adapted(folder: Path, name: str) -> Adapted:
    config = MODELS[name]
    form, model = hf_form(config), build(config, seq_len=64)
    drawn = torch.Generator().manual_seed(0)
    weights = {
        key: (0.3 * torch.randn(parameter.shape, generator=drawn)).bfloat16()
        for key, parameter in model.named_parameters()
    }
    export_hf(weights, form, {}, folder / "base")
    adapters: dict[str, Tensor] = {}
    merged = {hf: value.double() for key, x in weights.items() for hf, value in form.to_hf(key, x)}
    for key, weight in weights.items():
        if key.endswith((*ADAPTED, *STACKED)):
            *many, out, inner = weight.shape
            a, b = (torch.randn(*many, *s, generator=drawn) * 0.2 for s in ((RANK, inner), (out, RANK)))
            adapters |= dict(zip((f"model.{own}" for own in adapter_names(key)), (a, b), strict=True))
            together = weight.double() + ALPHA / RANK * b.double() @ a.double()
            merged |= dict(form.to_hf(key, together))
    facts = {
        "form": "lora",
        "rank": RANK,
        "alpha": ALPHA,
        "rslora": False,
        "dora": False,
        "base": base_of(folder / "base"),
    }
    state = {"engine": {"adapters": facts}, "model": {"type": component_info(config).name, **asdict(config)}}
    save_checkpoint(folder / "step-1", adapters, state, lock_text="", run_id=RUN)
    return Adapted(config, folder / "base", folder / "step-1", merged)


Convert = Callable[..., tuple[int, str]]


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """`convert(FORM, OPTION...)`: of the checkpoint in the test's folder to FORM there; exit code, output."""

    def run(form: str, *options: str) -> tuple[int, str]:
        capsys.readouterr()
        arguments = ["convert-checkpoint", str(tmp_path / "step-1"), str(tmp_path / form), "--to", form]
        code = main([*arguments, *options])
        return code, capsys.readouterr().out

    return run


def figures(out: str) -> tuple[float, list[float]]:
    """The difference of logits that was printed, and what is left of it without rounding, where that was."""
    [[whole]] = [re.findall(r"absolute, (\S+) of", line) for line in out.splitlines() if "absolute" in line]
    left = [line for line in out.splitlines() if "not counting the rounding" in line]
    return float(whole), [float(x) for line in left for x in re.findall(r"\d\S*", line.partition(":")[2])]


def differences(made: dict[str, Tensor], meant: dict[str, Tensor]) -> float:
    assert made.keys() == meant.keys()
    return max(float((made[key].double() - meant[key]).abs().max()) for key in meant)


def tensors_of(folder: Path, config: Any) -> dict[str, Tensor]:
    form, reader = hf_form(config), read_hf(folder, hf_form(config))
    with torch.device("meta"):
        names = [name for name, _ in build(config, seq_len=1).named_parameters()]
    return {hf: value for name in names for hf, value in form.to_hf(name, reader.parameter(name))}


@pytest.mark.parametrize("name", rows(MODELS, slow=("qwen3", "experts", "experts, transposed")))
def test_an_export_in_fp32_is_merged_in_fp32_and_is_what_peft_makes(
    tmp_path: Path, convert: Convert, name: str
) -> None:
    made = adapted(tmp_path, name)
    code, out = convert("hf", "--dtype", "float32", "--verify")
    assert code == 0 and "verified: yes" in out, out
    difference, left = figures(out)
    assert difference < 1e-5 and not left
    found = tensors_of(tmp_path / "hf", made.config)
    assert differences(found, made.merged) < 1e-6
    code, out = convert("peft", "--verify")
    assert code == 0 and "verified: yes" in out, out
    assert figures(out)[0] < 1e-5
    theirs = of_peft(made.base, tmp_path / "peft").merge_and_unload().state_dict()
    both = theirs.keys() & found.keys()  # experts of whom a folder has one tensor each are stacked there
    assert len(both) > len(made.merged) / 4
    assert differences({key: theirs[key] for key in both}, {key: made.merged[key] for key in both}) < 1e-6


def test_an_adapter_of_experts_is_one_of_each_where_folders_have_them_one_by_one() -> None:
    weight = "layers.1.moe.experts.w2"
    found = placed(OWN, [weight])[weight]
    assert [one.expert for one in found] == list(range(8))
    assert found[3].keys[1] == "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_B.weight"
    a, b = torch.randn(8, 4, 16), torch.randn(8, 32, 4)
    for expert, one in enumerate(found):
        assert all(map(torch.equal, one.of(a, b), (a[expert], b[expert])))


def of_peft(base: Path, folder: Path) -> Any:
    from titancli.checkpoint.hf.compare import load_in_transformers

    return load_in_transformers(base, folder)


def test_an_export_in_the_bases_dtype_is_rounded_once_and_says_how_far(
    tmp_path: Path, convert: Convert
) -> None:
    made = adapted(tmp_path, "llama3")
    code, out = convert("hf", "--verify")
    assert code == 0, out
    difference, left = figures(out)
    assert difference > 1e-4 and left and max(left) < 1e-5
    found = tensors_of(tmp_path / "hf", made.config)
    for key, value in made.merged.items():
        assert found[key].dtype == torch.bfloat16
        assert torch.equal(found[key], value.float().bfloat16()), key


def test_rounded_adapters_say_how_far(tmp_path: Path, convert: Convert) -> None:
    adapted(tmp_path, "llama3")
    code, out = convert("peft", "--dtype", "bfloat16", "--verify")
    assert code == 0, out
    difference, left = figures(out)
    assert difference > 1e-4 and left and max(left) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_notices_a_merge_that_is_wrong(
    tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """It does not ask the merge what the merge should have been: one that rounds too early, or scales."""
    adapted(tmp_path, "llama3")
    honest = merging.merge
    wrong = (lambda *x: honest(*x).bfloat16()) if dtype == "float32" else (lambda w, *x: honest(w, *x) * 1.01)
    monkeypatch.setattr(merging, "merge", wrong)
    code, out = convert("hf", "--dtype", dtype, "--verify")
    assert code == 1 and "verified: NO" in out


def test_verify_notices_a_peft_folder_that_is_wrong(
    tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted(tmp_path, "llama3")
    honest = peft.adapter_config
    monkeypatch.setattr(peft, "adapter_config", lambda *x: honest(*x) | {"lora_alpha": 2 * ALPHA})
    code, out = convert("peft", "--verify")
    assert code == 1 and "verified: NO" in out


def test_verify_without_peft_is_refused_before_anything_is_written(
    tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted(tmp_path, "llama3")
    monkeypatch.setattr(peft, "find_spec", lambda name: None)
    assert convert("peft", "--verify")[0] == 5
    assert not (tmp_path / "peft").exists()
    assert convert("peft")[0] == 0


def test_peft_is_compared_over_a_base_that_is_a_checkpoint_too(tmp_path: Path, convert: Convert) -> None:
    made = adapted(tmp_path, "qwen2")
    (tmp_path / "step-1").rename(tmp_path / "of-hf")
    options = ("--to", "titan", "--model-component", "hf_causal_lm")
    assert main(["convert-checkpoint", str(made.base), str(tmp_path / "ckpt"), *options]) == 0
    reader = CheckpointReader(tmp_path / "of-hf")
    state = reader.manifest.state
    state["engine"]["adapters"]["base"] = base_of(tmp_path / "ckpt")
    tensors = {name: reader.read(name).clone() for name in reader.names()}
    save_checkpoint(tmp_path / "step-1", tensors, state, lock_text="", run_id=RUN)
    before = sorted(path.name for path in tmp_path.iterdir())
    code, out = convert("peft", "--verify")
    assert code == 0 and "verified: yes" in out, out
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "peft"])


def test_adapters_that_peft_takes_for_those_of_experts_are_known() -> None:
    """Of dense and shared feed-forwards; of attention and of the experts themselves it does not."""
    names = ("attention.wo.weight", "moe.experts.w1", "moe.shared_experts.w2.weight")
    weights = ["layers.0.feed_forward.w1.weight", *(f"layers.2.{name}" for name in names)]
    found = [one for several in placed(DEEPSEEK.variant("V3"), weights).values() for one in several]
    assert beside_experts(found) == [
        "model.layers.0.mlp.gate_proj",
        "model.layers.2.mlp.shared_experts.down_proj",
    ]
