"""`titan convert-checkpoint`, both ways, against transformers itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import Tensor

from tests.checkpoint.tensors import RUN, bits
from titancli.checkpoint import CheckpointReader, save_checkpoint
from titancli.checkpoint.hf.compare import load_in_transformers
from titancli.cli import main
from titancli.errors import EnvironmentProblem
from titancli.models import Llama3
from titancli.recipe import load_recipe, lock_text
from titancli.registry.component import build

SMALL = ["model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.hidden_dim=48"]
SMALL += ["model.vocab_size=300"]
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 299,
            "content": "<|end|>",
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
    ],
    "model": {"type": "WordLevel", "vocab": {"hello": 0, "<|end|>": 299}, "unk_token": "hello"},
}


def _randomise(model: torch.nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def make_checkpoint(folder: Path, *overrides: str) -> dict[str, Tensor]:
    loaded = load_recipe("llama3_debug", [*SMALL, *overrides])
    tensors = _randomise(build(loaded.recipe.model, seq_len=64))
    optimizer = {name.replace("model.", "optimizer.") + ".step": torch.tensor(1.0) for name in tensors}
    save_checkpoint(folder, {**tensors, **optimizer}, {}, lock_text=lock_text(loaded), run_id=RUN)
    return tensors


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def convert(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["convert-checkpoint", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("tied", ["true", "false"])
def test_transformers_loads_an_export_as_it_is(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], tied: str
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = make_checkpoint(
        tmp_path / "step-1", f"model.tied={tied}", "tokenizer.type=hf", f"tokenizer.path={tokenizer}"
    )
    code, out, err = convert(capsys, tmp_path / "step-1", tmp_path / "out", "--to", "hf", "--verify")
    assert code == 0, err
    assert "verified: yes" in out
    assert str(tmp_path / "out") in out.splitlines()[-2]
    assert f"AutoModelForCausalLM.from_pretrained('{tmp_path / 'out'}')" in out.splitlines()[-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 299
    assert bits(model.model.embed_tokens.weight) == bits(tensors["model.tok_embeddings.weight"])
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == (tied == "true")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([0]) == "hello"


def test_a_run_stands_for_its_newest_good_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "run" / "checkpoints" / "step-1")
    make_checkpoint(tmp_path / "run" / "checkpoints" / "step-2")
    (tmp_path / "run" / "checkpoints" / "step-2" / "metadata.json").write_text("{}")
    code, _, err = convert(capsys, tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert code == 0, err
    assert "step-2 is skipped: metadata.json has 2 bytes" in err
    assert f"exporting {tmp_path / 'run' / 'checkpoints' / 'step-1'}" in err


def test_a_cast_export_is_verified_as_cast(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "step-1")
    code, out, err = convert(
        capsys, tmp_path / "step-1", tmp_path / "out", "--to", "hf", "--dtype", "bfloat16", "--verify"
    )
    assert code == 0, err
    assert "verified: yes" in out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_verify_fails_where_the_weights_are_not_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """An export with q and k swapped in one layer: the kind of mistake that loads without a word."""
    from titancli.models.blocks.hf import DecoderHF

    make_checkpoint(tmp_path / "step-1", "model.n_kv_heads=4")
    honest = DecoderHF.sources

    def swapped(self: DecoderHF, name: str) -> list[str]:
        other = {"layers.1.attention.wq.weight": "wk", "layers.1.attention.wk.weight": "wq"}.get(name)
        return honest(self, f"layers.1.attention.{other}.weight" if other else name)

    monkeypatch.setattr(DecoderHF, "sources", swapped)
    code, out, _ = convert(capsys, tmp_path / "step-1", tmp_path / "out", "--to", "hf", "--verify")
    assert code == 1
    assert "verified: NO" in out


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers_comes_in_and_goes_out_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool
):
    """Grouped-query attention, scaled RoPE, shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    code, out, err = convert(capsys, tmp_path / "hf", tmp_path / "ckpt", "--to", "titan", "--verify")
    assert code == 0, err
    assert "verified: yes" in out
    assert out.splitlines()[-1] == f"start a run from it with: weights={tmp_path / 'ckpt'}"
    reader = CheckpointReader(tmp_path / "ckpt")
    assert reader.manifest.step == 0
    assert reader.manifest.state["model"]["type"] == "titan/llama3"
    assert ("model.output.weight" in reader.names()) == (not tied)
    code, out, err = convert(capsys, tmp_path / "ckpt", tmp_path / "again", "--to", "hf", "--verify")
    assert code == 0, err
    again = LlamaForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(bits(again[name]) == bits(tensor) for name, tensor in theirs.state_dict().items())


def test_experts_are_stacked_on_the_way_in_and_parted_on_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=300,
    )
    theirs = Qwen3MoeForCausalLM(config).bfloat16()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    options = ["--max-shard-size", "8kB", "--verify"]
    code, out, err = convert(capsys, tmp_path / "hf", tmp_path / "ckpt", "--to", "titan", *options)
    assert (code, "verified: yes" in out) == (0, True), err
    reader = CheckpointReader(tmp_path / "ckpt", prefix="model.")
    assert reader.shape("layers.1.moe.experts.w1") == (4, 16, 32)
    code, out, err = convert(capsys, tmp_path / "ckpt", tmp_path / "again", "--to", "hf", *options)
    assert (code, "verified: yes" in out) == (0, True), err
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    files = {index["weight_map"][f"model.layers.1.mlp.experts.{e}.gate_proj.weight"] for e in range(4)}
    files |= {index["weight_map"][f"model.layers.0.mlp.experts.{e}.gate_proj.weight"] for e in range(4)}
    assert len(files) > 1
    again = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(bits(again[name]) == bits(tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("512MiB", 1 << 29), ("1.5 kb", 1500), ("7B", 7), ("0B", None)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int | None):
    from titancli.cli.convert import Size

    if size is None:
        with pytest.raises(click.BadParameter, match="at least one byte"):
            Size().convert(text, None, None)
    else:
        assert Size().convert(text, None, None) == size


def test_weights_can_be_cast_on_the_way_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "step-1")
    assert convert(capsys, tmp_path / "step-1", tmp_path / "hf", "--to", "hf")[0] == 0
    code, _, err = convert(
        capsys, tmp_path / "hf", tmp_path / "ckpt", "--to", "titan", "--dtype", "bfloat16", "--verify"
    )
    assert code == 0, err
    reader = CheckpointReader(tmp_path / "ckpt")
    assert {reader.dtype(name) for name in reader.names()} == {torch.bfloat16}


def test_a_converted_checkpoint_gives_a_run_its_first_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from titancli.checkpoint import load_checkpoint

    tensors = make_checkpoint(tmp_path / "step-1")
    convert(capsys, tmp_path / "step-1", tmp_path / "hf", "--to", "hf")
    convert(capsys, tmp_path / "hf", tmp_path / "ckpt", "--to", "titan")
    wanted = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_checkpoint(tmp_path / "ckpt", wanted)
    assert all(bits(wanted[name]) == bits(tensor) for name, tensor in tensors.items())


def _wrong(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str]:
    code, out, err = convert(capsys, *args)
    assert out == ""
    assert "Traceback" not in err
    return code, err


def test_mistakes_are_told_with_their_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "step-1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text('{"model_type": "llama"}')
    cases = [
        ([tmp_path / "missing", tmp_path / "out", "--to", "hf"], 5, "neither a checkpoint nor a run"),
        ([tmp_path / "step-1", tmp_path / "full", "--to", "hf"], 5, "full is not empty"),
        ([tmp_path / "missing", tmp_path / "out", "--to", "titan"], 5, "not a Hugging Face model folder"),
        (
            [tmp_path / "odd", tmp_path / "out", "--to", "titan"],
            4,
            "no installed model reads model_type 'mamba'",
        ),
        ([tmp_path / "half", tmp_path / "out", "--to", "titan"], 5, "lacks 'hidden_size'"),
        ([tmp_path / "half", tmp_path / "out", "--to", "titan", "--model-component", "gpt9"], 4, "gpt9"),
        ([tmp_path / "step-1", tmp_path / "out", "--to", "onnx"], 2, "onnx"),
        ([tmp_path / "step-1", tmp_path / "out", "--to", "hf", "--max-shard-size", "big"], 2, "use 5GB"),
    ]
    for args, code, text in cases:
        found, err = _wrong(capsys, *args)
        assert found == code, err
        assert text in err
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_hugging_face_form_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from dataclasses import replace

    make_checkpoint(tmp_path / "step-1")
    monkeypatch.setattr(Llama3, "__component__", replace(Llama3.__component__, hf=None))  # type: ignore[attr-defined]
    code, err = _wrong(capsys, tmp_path / "step-1", tmp_path / "out", "--to", "hf")
    assert code == 2
    assert "no Hugging Face form" in err


def test_a_checkpoint_of_another_model_than_its_recipe_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    loaded = load_recipe("llama3_debug", SMALL)
    save_checkpoint(tmp_path / "s", {"model.x": torch.ones(1)}, {}, lock_text=lock_text(loaded), run_id=RUN)
    code, err = _wrong(capsys, tmp_path / "s", tmp_path / "out", "--to", "hf")
    assert code == 1
    assert "it lacks" in err
    assert "the model lacks: x" in err


def test_help_imports_no_torch():
    code = (
        "import sys; from titancli.cli import main; main(['convert-checkpoint', '--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--verify" in done.stdout


def test_a_comparison_runs_no_kernel_that_a_folder_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "attn_implementation": "who/kernel"}')
    with pytest.raises(EnvironmentProblem, match="'who/kernel' names a kernel on the Hub, which is code"):
        load_in_transformers(tmp_path)


def test_a_folder_that_transformers_refuses_is_no_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": "yes"}')
    with pytest.raises(EnvironmentProblem, match=r"transformers cannot load .*tie_word_embeddings"):
        load_in_transformers(tmp_path)
