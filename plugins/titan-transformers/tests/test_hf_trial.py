"""A model of transformers is tried on a tiny copy: equal to transformers' own eager forward, or refused."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_causal_lm import CLOSE, Reads, in_transformers, made_of, tokens
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.generate.models import feed
from tests.models.hf_configs import CONFIGS, LLAMA, SPARSE
from titan_transformers import HFCausalLM, attention, trial
from titan_transformers.model import build
from titan_transformers.theirs import hf_config
from titan_transformers.tiny import tiny
from titancli.errors import RecipeError, TitanError
from titancli.models.blocks.masks import document_masks


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_tried", {})


def on_meta(values: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return build(HFCausalLM(config=values), seq_len=16)


def said(values: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        on_meta(values)
    return caught.value.message


# ------------------------------------------------------------------------------- attention that is not plain

LATENT: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    index_topk=4,
    index_n_heads=2,
    index_head_dim=16,
    vocab_size=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=128,
)
NOT_PLAIN = {
    "deepseek_v32": ({**LATENT, "model_type": "deepseek_v32"}, "DeepseekV32Attention", "indices"),
    "glm_moe_dsa": ({**LATENT, "model_type": "glm_moe_dsa"}, "GlmMoeDsaAttention", "indices"),
    "axk2": ({**CONFIG_MAPPING["axk2"]().to_dict(), "model_type": "axk2"}, "AXK2Attention", "indices"),
    "dots3_note": (
        {**CONFIG_MAPPING["dots3_note_text"]().to_dict(), "model_type": "dots3_note_text"},
        "Dots3NoteTextAttention",
        "indices",
    ),
    "minimax_m3": (SPARSE, "MiniMaxM3VLAttention", "block_indices"),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_attention_would_leave_out_is_refused_by_name(name: str) -> None:
    values, module, argument = NOT_PLAIN[name]
    message = said(values)
    assert f"{module} is not plain attention: it also takes {argument}" in message
    assert message.startswith("model.config: ")


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (dict(position_bias=torch.ones(4)), "position_bias"),
        (dict(dropout=0.1), "dropout"),
        (dict(is_causal=False), "is_causal"),
        (dict(something_new=1), "something_new"),
    ],
)
def test_arguments_that_nobody_knows_are_refused(given: dict[str, Any], word: str) -> None:
    attention.register_attention()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[attention.ATTENTION]
    q, module = torch.randn(1, 4, 6, 8), torch.nn.Module()
    known = dict(position_ids=torch.arange(6), sliding_window=4, output_attentions=False, cache=None)
    out, _ = attend(module, q, q, q, None, scaling=0.5, is_causal=True, **known)
    assert out.shape == (1, 6, 4, 8)
    with pytest.raises(RecipeError, match=f"it also takes {word}"):
        attend(module, q, q, q, None, **known, **given)


# ------------------------------------------------------------------------------------------------ the trial


def scaled(honest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, scaling=None, **more: honest(*args, scaling=2 * scaling, **more)


def without_documents(honest: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*, config: Any, **rest: Any) -> Any:
        config.titan_rows = attention.Rows(None, document_masks(None))
        return honest(config=config, **rest)

    return mask


def without_gradients(honest: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module: Any, query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Any:
        return honest(module, query, key.detach(), *rest, **more)

    return attend


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        ("attention", scaled, "on a tiny copy of the model, logits differ from those of transformers by"),
        (
            "attention",
            without_gradients,
            "on a tiny copy of the model, gradients differ from those of transformers by",
        ),
    ],
)
def test_a_model_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: str, wrong: Callable[..., Any], words: str
) -> None:
    monkeypatch.setattr(attention, place, wrong(getattr(attention, place)))
    values = CONFIGS["mistral"]
    message = said(values)
    assert message.startswith("model.config: mistral: ") and words in message
    monkeypatch.undo()
    attention.register_attention()
    trial._tried.clear()
    on_meta(values)


def test_documents_that_layers_do_not_keep_apart_become_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever joins them: here it is a mask without them, in a recurrent model its layers."""
    monkeypatch.setattr(attention, "mask", without_documents(attention.mask))
    assert on_meta(CONFIGS["mistral"]).apart
    monkeypatch.undo()
    attention.register_attention()
    trial._tried.clear()
    assert not on_meta(CONFIGS["mistral"]).apart


def test_a_config_is_tried_once_a_process_whatever_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    honest = trial._try
    monkeypatch.setattr(trial, "_try", lambda v, make: (tried.append(v["model_type"]), honest(v, make))[1])
    for _ in range(2):
        on_meta(CONFIGS["llama"])
        said(SPARSE)
    on_meta({**CONFIGS["llama"], "rms_norm_eps": 1e-3})
    assert tried == ["llama", "minimax_m3_vl_text", "llama"]


def test_it_leaves_nothing_behind() -> None:
    """Generators, default dtype, gradients being off."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            on_meta(CONFIGS["qwen3"])
            assert not torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "around",
    [torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["inference", "autocast"],
)
def test_what_the_caller_is_in_the_middle_of_does_not_count(around: Any) -> None:
    with around:
        on_meta(CONFIGS["llama"])


def test_random_numbers_in_forward_are_refused() -> None:
    values = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "router_jitter_noise": 0.1}
    assert "uses random numbers in forward" in said(values)
    on_meta({**values, "router_jitter_noise": 0.0})


LARGE = {
    "llama": {**LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
    | {"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256},
    "gemma3": {**CONFIGS["gemma3"], "hidden_size": 5376, "num_hidden_layers": 62, "head_dim": 128}
    | {"num_attention_heads": 32, "num_key_value_heads": 16, "intermediate_size": 21504}
    | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10 + ["sliding_attention"] * 2},
    "experts": {**CONFIGS["experts"], "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 4096}
    | {"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
}


def test_all_that_decides_how_far_attention_looks_is_within_a_row() -> None:
    """In lists and tables by layer, too."""
    values = {
        **LLAMA,
        "sliding_window": 4096,
        "layer_windows": [512, 4096, None],
        "per_layer_config": {"00": {"sliding_window": 1024}, "02": {"attention_chunk_size": 8192}},
        "num_hidden_layers": 3,
        "chunk_size_feed_forward": 0,
        "max_window_layers": 28,
    }
    copy = tiny(values)
    assert copy["sliding_window"] == 6 and copy["layer_windows"] == [6, 6, None]
    assert copy["per_layer_config"] == {"00": {"sliding_window": 6}, "02": {"attention_chunk_size": 6}}


@pytest.mark.parametrize("name", LARGE)  # of 405, 27 and 235 billion parameters
def test_a_copy_is_small_and_has_every_kind_of_layer(name: str) -> None:
    whole = hf_config(LARGE[name]).to_dict() | {"model_type": LARGE[name]["model_type"]}
    copy = tiny(whole)
    with torch.device("meta"):
        model = build(HFCausalLM(config=copy), seq_len=16)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e7
    kinds = whole.get("layer_types") or []
    assert set(copy.get("layer_types") or []) == set(kinds)
    assert copy["num_hidden_layers"] == len(model.layers) <= 8
    on_meta(LARGE[name])


# ----------------------------------------------------------------------------- RoPE that looks at other rows

PHI3: dict[str, Any] = {
    **LLAMA,
    "model_type": "phi3",
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DYNAMIC = {**LLAMA, "max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
GROWING = {"longrope": PHI3, "dynamic": DYNAMIC}


@pytest.mark.parametrize("kind", GROWING)
def test_rows_beside_a_longer_row_do_not_change(kind: str) -> None:
    """They cannot: beyond what all rows have in common they are refused, and no forward leaves anything."""
    model = made_of(GROWING[kind])
    theirs, text = in_transformers(model), tokens(2, 20)
    with torch.no_grad():
        alone = theirs(text[:1, :16], use_cache=False).logits
        moved = theirs(text, use_cache=False).logits[:1, :16]
        assert (moved - alone).abs().max() > 1e-3  # what is to be avoided
        for _ in range(2):
            torch.testing.assert_close(model(text[:, :16])[:1], alone, **CLOSE)
            with pytest.raises(
                TitanError, match=f"beyond 16, RoPE of the type {kind} depends on the longest"
            ):
                model(text)
            with pytest.raises(TitanError, match="rows of 20 tokens"):
                begin(model, text)
        with Reads() as reads:
            model(text[:, :16], torch.arange(16).expand(2, -1), torch.zeros(2, 16, dtype=torch.int32))
        assert reads.count == 0


def begin(model: Any, text: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return the logits of the last token of each row, and the cache that has them."""
    cache = model.new_cache()
    return feed(model, cache, [cache.begin() for _ in text], list(text)), cache


@torch.no_grad()
def test_one_long_row_is_generated_from_as_transformers_does() -> None:
    model, text = made_of(PHI3).eval(), tokens(1, 20)
    theirs = in_transformers(model)
    found, cache = begin(model, text[:, :18])
    torch.testing.assert_close(found, theirs(text[:, :18]).logits[:, -1], **CLOSE)
    torch.testing.assert_close(
        feed(model, cache, [0], [text[0, 18:19]]), theirs(text[:, :19]).logits[:, -1], **CLOSE
    )
    _, cache = begin(model, text[:, :15])
    with pytest.raises(TitanError, match="longrope"):  # the keys of the first 15 have other frequencies
        feed(model, cache, [0], [text[0, 15:17]])
    model = made_of(DYNAMIC).eval()
    with pytest.raises(TitanError, match="dynamic"):
        begin(model, text)


# -------------------------------------------------------------------------------- everything transformers has


def survey() -> Any:
    """benchmarks/survey.py."""
    path = Path(__file__).parents[3] / "benchmarks" / "survey.py"
    spec = importlib.util.spec_from_file_location("titan_survey", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model_type", ["granite", "gemma2", "gpt_oss", "mamba", "phi", "gptj"])
def test_other_outputs_attention_and_layers_equal_transformers(model_type: str) -> None:
    """Scaled logits; capped ones and capped scores; sinks; no attention; a bias; attention of its own."""
    found = survey().survey(model_type)
    assert found.accepted and found.wrong is None and found.weights == "yes", found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_what_is_accepted_computes_what_transformers_does(model_type: str) -> None:
    """On a copy of default values, other weights, longer rows and three documents; or it is refused."""
    found = survey().survey(model_type)
    assert found.wrong is None, found.wrong
    if not found.accepted:
        pytest.skip(f"refused: {found.why}")
