"""A folder that peft has saved, as `weights`: its adapters train on, or are merged; compared with peft."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.cli.conftest import Titan, titan
from tests.converters.test_lora_experts import OWN
from tests.engine.cases import recipe, small, whole_batch
from titan_testing.behaviour.engines import weights
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.peft_in import PeftFolder
from titancli.checkpoint.hf.peft_names import placed
from titancli.converters import LoRA
from titancli.converters.lora import Adapters, adapter_names, weights_of
from titancli.engine import Engine
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.recipe import load_recipe
from titancli.registry.component import build

__all__ = ["titan"]
peft = pytest.importorskip("peft", reason="the extra [dev] installs it")
pytestmark = pytest.mark.ranks
MODEL: Any = recipe(small()).model
BLOCK = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OURS = ["layers.*"]
KINDS: dict[str, tuple[dict[str, Any], LoRA]] = {
    "lora": ({"target_modules": BLOCK}, LoRA(rank=4, alpha=6.0)),
    "rslora": (
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
        LoRA(rank=4, alpha=6.0, rslora=True, targets=["wq", "w2"]),
    ),
    "dora": (
        {"target_modules": BLOCK, "use_dora": True},
        LoRA(rank=4, alpha=6.0, dora=True, targets=OURS),
    ),
    "ends": (
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        LoRA(rank=4, alpha=6.0, targets=["tok_embeddings", "output", "wq"]),
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    in_transformers(MODEL).save_pretrained(folder)
    return folder


def in_transformers(model: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    keys = hf_form(model).config_json()
    config = AutoConfig.for_model(**{k: v for k, v in keys.items() if k != "architectures"})
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of adapters that are nowhere zero, as peft saves them."""
    made = {}
    for name, (changes, _) in KINDS.items():
        model = in_peft(base, peft.LoraConfig(r=4, lora_alpha=6.0, task_type="CAUSAL_LM", **changes))
        torch.manual_seed(2)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_magnitude" in key:
                    parameter.mul_(torch.empty_like(parameter).uniform_(0.8, 1.2))
                elif "lora_" in key:
                    parameter.normal_(0.0, 0.2)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])  # with copies of the base's embedding and output, if they have any
    return made


def in_peft(base: Path, how: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    if isinstance(how, Path):
        return peft.PeftModel.from_pretrained(model, how, is_trainable=True)
    return peft.get_peft_model(model, how)


def begun(folder: str, lora: LoRA | None, mesh: dict[str, int]) -> tuple[Tensor, dict[str, Tensor], bool]:
    """Log-probabilities of a batch, and this rank's first weights, whole."""
    layout = small(mesh, converters=[lora] if lora else [])
    made = dataclasses.replace(recipe(layout), weights=Path(folder))
    with Engine.build(made) as engine:
        return engine.forward(whole_batch()), weights(engine), engine.begins_as_base


@pytest.mark.parametrize("name", list(KINDS))
def test_adapters_are_those_of_peft(ranks: Any, folders: dict[str, Path], base: Path, name: str) -> None:
    folder, lora = folders[name], KINDS[name][1]
    theirs = in_peft(base, folder).eval()
    batch = whole_batch()
    with torch.no_grad():
        logits = theirs(batch["tokens"]).logits.log_softmax(-1)
        expected = logits.gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0]
        expected = expected.where(batch["targets"] >= 0, 0.0)
        merged = theirs.merge_and_unload()
    ((beside, first, as_base),) = ranks(1, begun, str(folder), lora, {})
    assert not as_base
    torch.testing.assert_close(beside, expected, rtol=1e-6, atol=2e-6)
    ((plain, tensors, _),) = ranks(1, begun, str(folder), None, {})
    torch.testing.assert_close(plain, expected, rtol=1e-6, atol=4e-6)
    form, meant = hf_form(MODEL), dict(merged.named_parameters())
    for ours, tensor in tensors.items():
        for hf_name, value in form.to_hf(ours, tensor):
            torch.testing.assert_close(value, meant[hf_name].detach(), rtol=1e-6, atol=1e-6)
    for kind, alone in ((lora, first), (None, tensors)):
        for mesh in ({"dp_shard": 2}, {"tp": 2}):
            for _, found, _ in ranks(2, begun, str(folder), kind, mesh):
                assert found.keys() == alone.keys()
                assert all(torch.equal(found[key], alone[key]) for key in found), (mesh, kind)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (LoRA(rank=8, alpha=6.0), "rank = 4, but this recipe has 8"),
        (LoRA(rank=4, alpha=8.0), "alpha = 6.0, but this recipe has 8.0"),
        (LoRA(rank=4, alpha=6.0, rslora=True), "rslora = False, but this recipe has True"),
        (LoRA(rank=4, alpha=6.0, dora=True), "dora = False, but this recipe has True"),
        (LoRA(rank=4, alpha=6.0, targets=["wq"]), "targets of the converter to ['w1', 'w2', 'w3', 'wk'"),
    ],
)
def test_other_adapters_are_refused(ranks: Any, folders: dict[str, Path], lora: LoRA, words: str) -> None:
    (said,) = ranks(1, refused, str(folders["lora"]), lora)
    assert words in said


def test_merged_vocabulary_grows(ranks: Any, folders: dict[str, Path], base: Path) -> None:
    """New rows are the mean of the merged ones, on any layout."""
    merged = in_peft(base, folders["ends"]).merge_and_unload()
    for mesh in ({}, {"tp": 2}):
        for found in ranks(2 if mesh else 1, grown_by_two, str(folders["ends"]), mesh):
            for name, theirs in (("tok_embeddings", merged.model.embed_tokens), ("output", merged.lm_head)):
                rows = theirs.weight.detach()
                expected = torch.cat((rows, rows.mean(0, keepdim=True).expand(2, -1)))
                torch.testing.assert_close(found[f"{name}.weight"], expected, rtol=1e-5, atol=1e-6)


def grown_by_two(folder: str, mesh: dict[str, int]) -> dict[str, Tensor]:
    larger = dataclasses.replace(MODEL, vocab_size=MODEL.vocab_size + 2)
    made = dataclasses.replace(recipe(small(mesh)), model=larger, weights=Path(folder), weights_vocab="grow")
    with Engine.build(made) as engine:
        return weights(engine)


def refused(folder: str, lora: LoRA) -> str:
    try:
        begun(folder, lora, {})
    except TitanError as error:
        return f"{error.message} {error.hint}"
    return "nothing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = "),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = "),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern = "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices = "),
        ({"layer_replication": [[0, 1]]}, "layer_replication = "),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"a_key_of_the_future": 1}, "a_key_of_the_future = 1"),
        ({"r": "4"}, "r = '4'"),
        ({"r": 0}, "r = 0"),
        ({"use_dora": True}, "it lacks"),
    ],
)
def test_what_titan_lacks_is_refused(
    folders: dict[str, Path], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    for path in folders["lora"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(EnvironmentProblem) as caught:
        PeftFolder(tmp_path, MODEL)
    assert words in caught.value.message
    assert "merge_and_unload" in str(caught.value.hint)


def test_hint_of_adapters_of_some_layers(base: Path, tmp_path: Path) -> None:
    how = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=["q_proj"], layers_to_transform=[1])
    in_peft(base, how).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = build(MODEL, seq_len=1)
    adapters = Adapters(LoRA(rank=4, alpha=6.0, targets=["wq"]))
    adapters.convert(model)
    with pytest.raises(TitanError, match=r"only here: layers\.0\.attention\.wq\.weight") as caught:
        PeftFolder(tmp_path, MODEL).require_same(adapters)
    assert caught.value.hint == "set targets of the converter to ['layers.1.attention.wq']"


@pytest.mark.parametrize("change", ["values", "vocabulary"])
def test_another_copy_of_the_base_is_refused(
    ranks: Any, folders: dict[str, Path], base: Path, tmp_path: Path, change: str
) -> None:
    """peft stores the embedding again, and would load it over the base's."""
    from safetensors.torch import load_file

    for path in folders["ends"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file, key = (
        tmp_path / "adapter_model.safetensors",
        "base_model.model.model.embed_tokens.base_layer.weight",
    )
    tensors = load_file(file)
    whole = tensors[key]
    PeftFolder(tmp_path, MODEL).check_copies(base)
    tensors[key] = whole + 0.1 if change == "values" else torch.cat((whole, whole[:1]))
    save_file(tensors, file)
    (said,) = ranks(1, refused, str(tmp_path), KINDS["ends"][1])
    assert "which differs from tok_embeddings.weight" in said and "merge_and_unload" in said


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_ends_of_a_tied_base_are_refused(tmp_path: Path, end: str) -> None:
    """One merged weight would serve both, of which peft computes one without the adapter."""
    from transformers import AutoModelForCausalLM

    tied = dataclasses.replace(MODEL, tied=True)
    in_transformers(tied).save_pretrained(tmp_path / "tied")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[end, "q_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    made.save_pretrained(tmp_path / "adapters")
    with pytest.raises(EnvironmentProblem, match="are one weight") as caught:
        PeftFolder(tmp_path / "adapters", tied)
    assert "tie_word_embeddings = false" in str(caught.value.hint)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "tied", tie_word_embeddings=False)
    own.lm_head.weight = torch.nn.Parameter(own.get_input_embeddings().weight.detach().clone())
    merged = peft.PeftModel.from_pretrained(own, tmp_path / "adapters").merge_and_unload()
    tokens = whole_batch()["tokens"]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, made.eval()(tokens).logits, rtol=1e-4, atol=1e-5)


def test_only_tensors_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes((folders["lora"] / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(EnvironmentProblem, match="can run code"):
        PeftFolder(tmp_path, MODEL)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 32)
    with pytest.raises(EnvironmentProblem):
        PeftFolder(tmp_path, MODEL)


RECIPE = 'recipe = 1\nweights = "{}"\n[tokenizer]\ntype = "byte"\n[dataset]\ntype = "python_stdlib"\n'


def test_the_model_is_that_of_the_base(folders: dict[str, Path], base: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(RECIPE.format(folders["lora"]) + "[training]\nsteps = 1\nseq_len = 8\n")
    assert load_recipe(file).recipe.model.vocab_size == MODEL.vocab_size
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folders["lora"].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    for base_name in ("meta-llama/Llama-3.1-8B", str(copy), None, 3):
        config = json.loads((copy / "adapter_config.json").read_text())
        (copy / "adapter_config.json").write_text(
            json.dumps({**config, "base_model_name_or_path": base_name})
        )
        with pytest.raises(RecipeError, match="not a Hugging Face folder on this machine") as caught:
            load_recipe(file, [f"weights={copy}"])
        assert "download the base, and set base_model_name_or_path" in str(caught.value.problems[0].hint)
    (copy / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(TitanError, match="cannot be read"):
        load_recipe(file, [f"weights={copy}"])


def test_a_run_trains_on(titan: Titan, folders: dict[str, Path], base: Path, tmp_path: Path) -> None:
    Path("r.toml").write_text(RECIPE.format(folders["dora"]))
    few = [
        "training.steps=2",
        "training.seq_len=16",
        "training.local_batch_size=1",
        "lr_scheduler.warmup_steps=0",
    ]
    few += ["checkpoint.interval=1", "training.mixed_precision_param=float32", "model.vocab_size=257"]
    vocabulary = MODEL.vocab_size
    assert vocabulary < 257  # the byte tokenizer has more ids: both kinds of folders at once
    few += ["weights_vocab=grow"]
    lora = ['converters=[{type="lora", rank=4, alpha=6.0, dora=true, targets=["layers.*"]}]']
    done = titan("train", "r.toml", *few, *lora, "--run-dir", "beside")
    assert done.code == 0, done.err
    done = titan("train", "beside", "--resume", "training.steps=3")
    assert done.code == 0, done.err
    done = titan("convert-checkpoint", "beside", "out", "--to", "hf", "--verify")
    assert done.code == 0, done.err
    done = titan("train", "r.toml", *few, "--run-dir", "merged")
    assert done.code == 0, done.err
    assert "merging the adapters in" in done.err


def test_adapters_of_experts_come_back(tmp_path: Path) -> None:
    """Folders with experts one by one, whose export is compared with peft elsewhere."""
    config = dataclasses.replace(OWN)
    with torch.device("meta"):
        model = build(config, seq_len=1)
    Adapters(LoRA(rank=8, alpha=6.0, targets=["wq", "wo", "experts.*"])).convert(model)
    own = {
        name: torch.randn(parameter.shape) for name, parameter in model.named_parameters() if "lora_" in name
    }
    tensors: dict[str, Tensor] = {}
    for weight, several in placed(config, weights_of(own)).items():
        for one in several:
            made = one.of(*(own[name] for name in adapter_names(weight)))
            tensors |= dict(zip(one.keys, made, strict=False))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    keys = {"peft_type": "LORA", "r": 8, "lora_alpha": 6.0, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(keys))
    found = dict(PeftFolder(tmp_path, config).tensors())
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    del tensors[next(key for key in tensors if "experts.1." in key)]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(EnvironmentProblem, match="it lacks"):
        PeftFolder(tmp_path, config)
