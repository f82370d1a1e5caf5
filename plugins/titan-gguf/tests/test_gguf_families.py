"""Each family as a file: read back, by transformers, and by llama.cpp where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from gguf_cases import CASES, PYTHON, REFUSED, WORKING, few_rows, model_of, there, weights, write

from tests.models.families import FAMILIES
from titan_gguf.families import FAMILIES as KNOWN
from titan_gguf.families import notes
from titan_gguf.verify import LIMITS, QUANTIZED_LIMIT, Stored, run_llamacpp
from titancli.checkpoint.hf.compare import far, our_logits
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.errors import TitanError, UsageError
from titancli.models import Llama3, Qwen3, RopeScaling
from titancli.models.sections import MoE

TOKENS = torch.randint(0, 257, (1, 97), generator=torch.Generator().manual_seed(0))
"""More than every window of the small models."""
ROUNDED = ("gpt_oss", "as released")
"""Its YaRN is computed otherwise by llama.cpp, which is said."""


def value(file: Path, key: str) -> Any:
    field = GGUFReader(file).get_field(key)
    return None if field is None else field.contents()


@pytest.mark.parametrize("name, variant", WORKING)
def test_what_is_read_back_is_what_the_checkpoint_has(name: str, variant: str, tmp_path: Path) -> None:
    config, state = weights(name, variant)
    model = model_of(config, state)
    write(model, tmp_path / "m.gguf")
    stored = Stored(tmp_path / "m.gguf", model)
    form = hf_form(config)
    read = [one for one in state if form.sources(one)]
    assert len(read) > 10
    for one in read:
        torch.testing.assert_close(stored.read(one), state[one], rtol=0, atol=2e-7)


@pytest.mark.parametrize("name, variant", sorted(REFUSED))
def test_what_llama_cpp_does_not_compute_is_refused_by_name(name: str, variant: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        write(model_of(*weights(name, variant)), tmp_path / "m.gguf")
    assert REFUSED[name, variant] in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", sorted({one.name for one in FAMILIES} - {name for name, _ in CASES}))
def test_other_families_are_refused_with_those_that_work(family: str) -> None:
    found = next(one for one in FAMILIES if one.name == family)
    with pytest.raises(UsageError, match="cannot be written as GGUF") as caught:
        model_of(*weights(family, next(iter(found.variants))))
    assert ", ".join(sorted(KNOWN)) in str(caught.value.hint)


LLAMA = ("multi-head", "grouped", "tied", "head_dim")


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("name, variant", [*(("llama3", one) for one in LLAMA), ("qwen3", "tied")])
def test_transformers_reads_it_with_equal_logits(name: str, variant: str, kind: str, tmp_path: Path) -> None:
    """An independent reader, of families and fields that it knows: it takes Qwen 3's heads to be of 128, and
    has no scaled RoPE of Llama 3.1."""
    from transformers import AutoModelForCausalLM

    changes = {"head_dim": 128} if name == "qwen3" else {}
    config, state = weights(name, variant, **changes)
    model = model_of(config, state, kind)
    write(model, tmp_path / "m.gguf")
    ours = our_logits(config, Stored(tmp_path / "m.gguf", model), TOKENS)
    loaded: Any = AutoModelForCausalLM
    theirs = loaded.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    assert far(theirs(input_ids=TOKENS).logits.detach(), ours.detach()) <= 1e-6


@pytest.mark.llamacpp
@there
@pytest.mark.parametrize("name, variant", WORKING)
def test_llama_cpp_computes_the_same_logits(name: str, variant: str, tmp_path: Path) -> None:
    config, state = weights(name, variant)
    model = model_of(config, state)
    write(model, tmp_path / "m.gguf")
    theirs = run_llamacpp(PYTHON, tmp_path / "m.gguf", TOKENS[0].tolist(), [])
    ours = our_logits(config, Stored(tmp_path / "m.gguf", model), TOKENS)[0].detach()
    apart = far(torch.from_numpy(theirs["logits"])[:, : ours.shape[1]], ours)
    # llama.cpp reads GELU from a table of float16 numbers.
    limit = LIMITS["f32"] if name == "gemma3" else 2e-5
    assert (apart > 0.01) if (name, variant) == ROUNDED else (apart <= limit), apart


@pytest.mark.llamacpp
@there
@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q6_k", "q4_k_m"])
@pytest.mark.parametrize("experts", [0, 4])
def test_llama_cpp_computes_quantized_files(kind: str, experts: int, tmp_path: Path) -> None:
    """With rows of whole super-blocks, of experts too."""
    routing = dict(score_func="softmax", route_norm=True, score_before_experts=False)
    moe = dict(moe=MoE(num_experts=experts, top_k=2, hidden_dim=256, **routing)) if experts else {}
    small = dict(dim=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=512, max_seq_len=256)
    config, state = few_rows(Qwen3(**small, **moe, vocab_size=300), 300)
    model = model_of(config, state, kind)
    write(model, tmp_path / "m.gguf")
    theirs = run_llamacpp(PYTHON, tmp_path / "m.gguf", TOKENS[0].tolist(), [])
    ours = our_logits(config, Stored(tmp_path / "m.gguf", model), TOKENS)[0].detach()
    assert far(torch.from_numpy(theirs["logits"])[:, : ours.shape[1]], ours) <= LIMITS.get(
        kind, QUANTIZED_LIMIT
    )


def test_numbers_are_metadata(tmp_path: Path) -> None:
    config, state = weights("qwen3", "experts")
    write(model_of(config, state, "bf16"), tmp_path / "m.gguf")
    found = {
        key: value(tmp_path / "m.gguf", f"qwen3moe.{key}")
        for key in (
            "block_count",
            "context_length",
            "embedding_length",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "rope.freq_base",
            "expert_count",
            "expert_used_count",
            "expert_feed_forward_length",
            "vocab_size",
        )
    }
    assert list(found.values()) == [2, config.max_seq_len, 64, 4, 2, 24, 10000.0, 8, 3, 48, 300]
    assert value(tmp_path / "m.gguf", "general.file_type") == 32
    assert value(tmp_path / "m.gguf", "general.architecture") == "qwen3moe"
    shapes = {one.name: one.shape.tolist() for one in GGUFReader(tmp_path / "m.gguf").tensors}
    assert shapes["blk.1.ffn_down_exps.weight"] == [48, 64, 8]


def test_frequencies_of_llama_3_1_are_divided_as_transformers_divides_them() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Llama3(dim=64, n_layers=1, n_heads=2, hidden_dim=96, vocab_size=300, rope_scaling=RopeScaling())
    made = model_of(*few_rows(config, 300))
    from transformers import AutoConfig

    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**hf_form(config).config_json()), "cpu")
    plain = config.rope_theta ** -(torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(plain / made.made["rope_freqs.weight"], theirs, rtol=1e-6, atol=0)
    assert made.made["rope_freqs.weight"].unique().numel() > 2


def test_a_file_whose_yarn_llama_cpp_rounds_comes_with_a_note() -> None:
    assert "rounds" in notes(model_of(*weights(*ROUNDED)).config)[0]
    assert not notes(model_of(*weights("gpt_oss", "whole pairs")).config)


def test_two_parameters_that_would_become_one_tensor_are_refused() -> None:
    config, state = weights("llama3", "grouped")
    state["norm.twin.weight"] = state["norm.weight"]

    class Twice(type(hf_form(config))):  # type: ignore[misc]
        def to_hf(self, name: str, tensor: torch.Tensor) -> Any:
            return super().to_hf(name.replace("norm.twin", "norm"), tensor)

    from titan_gguf.export import Model
    from titancli.checkpoint.format.tensors import MemoryTensors

    with pytest.raises(TitanError, match=r"norm\.twin\.weight and norm\.weight would all become output_norm"):
        Model(MemoryTensors(state), Twice(config), "f32")
