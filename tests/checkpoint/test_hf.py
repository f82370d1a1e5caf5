"""Hugging Face folders: transformers loads what we write, we load what transformers writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.tensors import RUN, bits
from titancli.checkpoint import CheckpointReader, export_hf, load_hf_weights, read_hf, save_checkpoint
from titancli.checkpoint.format.tensorfile import TensorFileWriter
from titancli.errors import EnvironmentProblem, TitanError
from titancli.models import Llama3
from titancli.protocols import HFFormDefaults
from titancli.registry.component import build, build_hf


class TinyForm(HFFormDefaults):
    """`double` is stored as two halves, transposed; the rest under another name."""

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if name == "double":
            first, second = tensor.chunk(2)
            return [("hf.first", first.t()), ("hf.second", second.t())]
        return [(f"hf.{name}", tensor)]

    def sources(self, name: str) -> list[str]:
        return ["hf.first", "hf.second"] if name == "double" else [f"hf.{name}"]

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.t() for tensor in tensors]) if name == "double" else tensors[0]

    def ignored(self, hf_name: str) -> bool:
        return hf_name.endswith("inv_freq")

    def config_json(self) -> dict[str, Any]:
        return {"architectures": ["TinyForCausalLM"], "model_type": "tiny"}


FORM = TinyForm()


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(5, 4, generator=generator) for i in (0, 1, 2, 10)}
    return {**tensors, "double": torch.randn(6, 3, generator=generator), "count": torch.tensor([7])}


def expected() -> dict[str, Tensor]:
    return {name: tensor for n, t in weights().items() for name, tensor in FORM.to_hf(n, t)}


def hf_files(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(bits(a[name]) == bits(b[name]) for name in a)


def test_an_export_that_fits_is_one_file(tmp_path: Path):
    export_hf(weights(), FORM, {}, tmp_path / "out", eos_id=2, bos_id=1)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    assert equal(hf_files(tmp_path / "out"), expected())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_export_that_does_not_fit_has_shards_and_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titancli.checkpoint.format.tensorfile.SHARD_BYTES", 170)
    export_hf(weights(), FORM, {}, tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights().values())
    assert equal(hf_files(tmp_path / "out"), expected())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    load_hf_weights(tmp_path / "out", FORM, loaded)
    assert equal(loaded, weights())


def test_layer_10_follows_layer_2(tmp_path: Path):
    export_hf(weights(), FORM, {}, tmp_path / "out")
    header = json.loads((tmp_path / "out" / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    layers = [name for name in header if "layers" in name]
    assert layers == [f"hf.layers.{i}.weight" for i in (0, 1, 2, 10)]


def test_the_configs_name_dtype_and_tokens(tmp_path: Path):
    export_hf(weights(), FORM, {}, tmp_path / "out", dtype=torch.bfloat16, eos_id=2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "architectures": ["TinyForCausalLM"],
        "model_type": "tiny",
        "bos_token_id": None,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    written = hf_files(tmp_path / "out")
    assert written["hf.first"].dtype == torch.bfloat16
    assert written["hf.count"].dtype == torch.int64
    assert bits(written["hf.layers.0.weight"]) == bits(weights()["layers.0.weight"].bfloat16())


def test_tokenizer_files_go_along_and_a_missing_one_leaves_nothing(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    export_hf(weights(), FORM, {"tokenizer.json": tmp_path / "tokenizer.json"}, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(EnvironmentProblem, match=r"missing\.json"):
        export_hf(weights(), FORM, {"missing.json": tmp_path / "missing.json"}, tmp_path / "gone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tokenizer.json"]


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EnvironmentProblem, match="full is not empty"):
        export_hf(weights(), FORM, {}, tmp_path / "full")
    with pytest.raises(EnvironmentProblem, match="file is a file"):
        export_hf(weights(), FORM, {}, tmp_path / "file")
    export_hf(weights(), FORM, {}, tmp_path / "empty")
    assert equal(hf_files(tmp_path / "empty"), expected())
    assert (tmp_path / "full" / "thesis.tex").read_text() == "mine"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(TensorFileWriter, "write_pieces", full)
    with pytest.raises(EnvironmentProblem, match=r"No space left on device. It needs 545 bytes"):
        export_hf(weights(), FORM, {}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_two_parameters_of_one_name_are_refused(tmp_path: Path):
    class Clash(TinyForm):
        def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
            return [("same", tensor)]

    with pytest.raises(TitanError, match="both become same"):
        export_hf(weights(), Clash(), {}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_exported_as_it_is_read(tmp_path: Path):
    tensors = {f"model.{name}": tensor for name, tensor in weights().items()}
    save_checkpoint(tmp_path / "step-1", tensors, {}, lock_text="", run_id=RUN)
    seen: list[tuple[int, int]] = []
    export_hf(
        CheckpointReader(tmp_path / "step-1", prefix="model."),
        FORM,
        {},
        tmp_path / "out",
        progress=lambda name, done, total: seen.append((done, total)),
    )
    assert equal(hf_files(tmp_path / "out"), expected())
    assert seen == [(i, 6) for i in range(1, 7)]


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path):
    tensors = expected()
    del tensors["hf.layers.1.weight"]
    tensors["hf.layers.0.weight"] = torch.zeros(5, 5)
    tensors["hf.first"] = torch.zeros(3, 4)
    tensors["hf.extra"] = torch.zeros(1)
    tensors["hf.rotary.inv_freq"] = torch.zeros(1)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    parameters = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    with pytest.raises(EnvironmentProblem) as caught:
        load_hf_weights(tmp_path, FORM, parameters)
    told = caught.value.message
    assert "it lacks: hf.layers.1.weight;" in told
    assert "the model lacks: hf.extra;" in told
    assert "hf.layers.0.weight is [5, 5], layers.0.weight is [5, 4]" in told
    assert "hf.first + hf.second is [3, 4] + [3, 3], double is [6, 3]" in told
    assert "inv_freq" not in told


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_the_base_model_alone_is_read(tmp_path: Path, tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            tie_word_embeddings=tied,
        )
    )
    theirs.save_pretrained(tmp_path / "whole")
    theirs.model.save_pretrained(tmp_path / "base")
    config = Llama3(**Llama3.from_config_json(json.loads((tmp_path / "whole/config.json").read_text())))
    form = build_hf(config)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in build(config, seq_len=64).named_parameters()}
    base = read_hf(tmp_path / "base", form)
    if not tied:
        with pytest.raises(EnvironmentProblem) as error:
            base.check(shapes)
        assert "it lacks: lm_head.weight" in error.value.message
        assert "without its output layer" in str(error.value.hint)
        return
    base.check(shapes)
    whole = read_hf(tmp_path / "whole", form)
    for name in shapes:
        assert torch.equal(base.parameter(name), whole.parameter(name))


def test_values_are_cast_to_the_parameters(tmp_path: Path):
    export_hf(weights(), FORM, {}, tmp_path / "out")
    parameters = {
        n: nn.Parameter(torch.zeros_like(t, dtype=torch.bfloat16))
        for n, t in weights().items()
        if n != "count"
    }
    parameters["count"] = torch.zeros(1, dtype=torch.int64)  # type: ignore[assignment]
    load_hf_weights(tmp_path / "out", FORM, parameters)
    assert bits(parameters["double"]) == bits(weights()["double"].bfloat16())
    assert parameters["double"].requires_grad


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"\x80\x02.")
    with pytest.raises(EnvironmentProblem, match="can run code") as caught:
        read_hf(tmp_path, FORM)
    assert "save_pretrained" in str(caught.value.hint)


def test_a_folder_without_weights_is_told(tmp_path: Path):
    with pytest.raises(EnvironmentProblem, match="contains no weights"):
        read_hf(tmp_path, FORM)
    with pytest.raises(EnvironmentProblem, match="does not exist"):
        read_hf(tmp_path / "missing", FORM)


INDEXES: dict[str, Any] = {
    "no map": {},
    "a list": [],
    "a path out of the folder": {"weight_map": {"x": "../model.safetensors"}},
    "an absolute path": {"weight_map": {"x": "/tmp/model.safetensors"}},
    "a pickle": {"weight_map": {"x": "pytorch_model.bin"}},
    "a number": {"weight_map": {"x": 3}},
    "a missing file": {"weight_map": {"x": "model-00001-of-00001.safetensors"}},
    "a missing tensor": {"weight_map": {"x": "model.safetensors"}},
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES.keys())
def test_a_hostile_index_is_refused(tmp_path: Path, index: Any):
    save_file({"y": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EnvironmentProblem):
        read_hf(tmp_path, FORM)


def test_weights_that_are_there_twice_are_refused(tmp_path: Path):
    """transformers, vLLM and an index's words disagree on which of them count."""
    out = tmp_path / "out"
    export_hf(weights(), FORM, {}, out, max_shard=64)
    first, *_, last = sorted(out.glob("*.safetensors"))
    assert read_hf(out, FORM).names()
    save_file({}, out / "model.safetensors")
    with pytest.raises(EnvironmentProblem, match=r"twice: model\.safetensors, and those"):
        read_hf(out, FORM)
    (out / "model.safetensors").unlink()
    key = next(iter(load_file(last)))
    save_file({**load_file(first), key: torch.ones(1)}, first)
    with pytest.raises(EnvironmentProblem, match=f"{key} is in {first.name} and in {last.name}"):
        read_hf(out, FORM)


def test_a_folder_whose_index_is_missing_or_whose_file_is_a_pointer_says_so(tmp_path: Path):
    save_file({"y": torch.zeros(1)}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(EnvironmentProblem, match="contains no weights") as caught:
        read_hf(tmp_path, FORM)
    assert "index.json, which names its other files, is missing" in str(caught.value.hint)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(EnvironmentProblem, match=r"model\.safetensors is a pointer of Git LFS"):
        read_hf(tmp_path, FORM)


def test_a_truncated_file_is_named(tmp_path: Path):
    export_hf(weights(), FORM, {}, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EnvironmentProblem, match=r"model\.safetensors is"):
        read_hf(tmp_path / "out", FORM)


def _load_sharded(folder: str) -> dict[str, bytes]:
    model = nn.Linear(3, 6, bias=False)
    model.layers = nn.ModuleDict({str(i): nn.Linear(4, 5, bias=False) for i in (0, 1, 2, 10)})
    fully_shard(model)
    parameters: dict[str, Tensor] = {
        name if name != "weight" else "double": parameter.detach()
        for name, parameter in model.named_parameters()
    }
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    parameters["count"] = torch.zeros(1, dtype=torch.int64)
    load_hf_weights(Path(folder), FORM, parameters)
    return {n: bits(p.full_tensor() if isinstance(p, DTensor) else p) for n, p in parameters.items()}


@pytest.mark.ranks
def test_sharded_parameters_are_filled_with_their_parts(ranks: Any, tmp_path: Path):
    """5 rows over 2 ranks: uneven parts."""
    export_hf(weights(), FORM, {}, tmp_path / "out")
    whole = {name: bits(tensor) for name, tensor in weights().items()}
    assert ranks(2, _load_sharded, str(tmp_path / "out")) == [whole, whole]
