"""How each family of models is written: its architecture in GGUF, its metadata, and what its tensors become.

A family is found by the `model_type` of the config.json that an export would have. Source: the loaders of
llama.cpp (src/models), and the names of tensors of the gguf package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType, get_tensor_name_map
from torch import Tensor

from titancli.errors import UsageError

Config = Mapping[str, Any]
EXPERT = re.compile(r"\.experts\.(\d+)\.")
FUSED = re.compile(r"(.*\.mlp\.experts\.)(gate_up|down)_proj(_bias)?")
"""gpt-oss's experts, as transformers stores them: all of a layer in one tensor, gate and up in turn."""


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` are written."""

    arch: MODEL_ARCH
    more: Callable[[GGUFWriter, Config], None] = lambda writer, config: None
    """Writes what only this family has, and refuses what llama.cpp does not compute."""
    interleaved: bool = False
    """Whether RoPE turns neighbors, not the two halves of a head: rows of queries and keys change places."""
    norm_offset: float = 0.0
    """Added to the weights of norms (Gemma stores their difference from 1)."""
    activation: str = "silu"


def part(family: Family, config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what a tensor of a Hugging Face folder becomes, in GGUF's values, under names of that folder.

    A tensor of one expert keeps its number in its name (`.experts.3.`).
    """
    if (found := FUSED.fullmatch(name)) is not None:
        stem, kind, bias = found[1], found[2], found[3]
        end = "bias" if bias else "weight"
        value = tensor if bias else tensor.transpose(-1, -2)
        if kind == "down":
            yield f"{stem}down_proj.{end}", value
        else:
            yield f"{stem}gate_proj.{end}", value[:, 0::2]
            yield f"{stem}up_proj.{end}", value[:, 1::2]
        return
    heads = _heads(family, config, name)
    if heads:
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if name.endswith("norm.weight"):
        tensor = tensor.float() + family.norm_offset if family.norm_offset else tensor
    yield name + ".weight" * name.endswith(".sinks"), tensor


def whole(family: Family, config: Config, name: str, get: Callable[[str], Tensor]) -> Tensor:
    """Return the tensor of a Hugging Face folder that was written in parts: the reverse of `part`.

    Args:
        get: returns the values of a part by the name that `part` gives it.
    """
    if (found := FUSED.fullmatch(name)) is not None:
        stem, kind, bias = found[1], found[2], found[3]
        end = "bias" if bias else "weight"
        if kind == "down":
            value = get(f"{stem}down_proj.{end}")
        else:
            both = [get(f"{stem}{one}_proj.{end}") for one in ("gate", "up")]
            value = torch.stack(both, 2).flatten(1, 2)
        return value if bias else value.transpose(-1, -2)
    tensor = get(name + ".weight" * name.endswith(".sinks"))
    heads = _heads(family, config, name)
    if heads:
        tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return tensor - family.norm_offset if name.endswith("norm.weight") else tensor


def _heads(family: Family, config: Config, name: str) -> int:
    """Return how many heads a tensor has whose rows change places; 0: they stay."""
    found = re.search(r"\.self_attn\.([qk])_proj\.(weight|bias)$", name) if family.interleaved else None
    if found is None:
        return 0
    return int(config["num_attention_heads"] if found[1] == "q" else config["num_key_value_heads"])


class Names:
    """The names in GGUF of a model's tensors."""

    def __init__(self, family: Family, layers: int) -> None:
        self._known = get_tensor_name_map(family.arch, layers)

    def of(self, name: str) -> tuple[str, int | None]:
        """Return the name in GGUF of a part, and which expert of that tensor it is; None: it is all of it.

        Raises:
            UsageError: the architecture has no such tensor.
        """
        expert = EXPERT.search(name)
        plain = EXPERT.sub(".experts.", name)
        found = self._known.get_name(plain, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UsageError(
                f"GGUF has no place for the tensor {name} in this architecture",
                hint="export the checkpoint with --to hf",
            )
        return found, int(expert[1]) if expert else None


def family_of(config: Config) -> Family:
    """Return the family of a model by its config.json.

    Raises:
        UsageError: it is none of those that are known here, or uses what llama.cpp does not compute.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UsageError(
            f"models of type {kind!r} cannot be written as GGUF",
            hint=f"these can: {', '.join(sorted(FAMILIES))}; export others with --to hf",
        )
    family = FAMILIES[kind]
    activation = config.get("hidden_activation") or config.get("hidden_act")
    _require(activation == family.activation, f"hidden_act = {activation!r}")
    return family


def write_sizes(writer: GGUFWriter, family: Family, config: Config, rows: int) -> None:
    """Write the model's numbers.

    Args:
        config: config.json with every default filled in.
        rows: how many tokens the embedding has.

    Raises:
        UsageError: the model uses what llama.cpp does not compute.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_vocab_size(rows)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _write_rope(writer, family, rope_of(config))
    family.more(writer, config)


def rope_of(config: Config, layers: str = "full_attention") -> dict[str, Any]:
    """Return the rotary embedding of a kind of layers."""
    found: dict[str, Any] = config.get("rope_parameters") or {}
    return dict(found.get(layers) or found)


def _write_rope(writer: GGUFWriter, family: Family, rope: Mapping[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    factor: Any = rope.get("factor")
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    elif kind == "yarn":
        usual = 0.1 * math.log(factor) + 1
        attention = rope.get("attention_factor")
        odd = [key for key in ("mscale", "mscale_all_dim") if rope.get(key)]
        odd += ["attention_factor"] if attention and not math.isclose(attention, usual, rel_tol=1e-4) else []
        _require(not odd, f"{' and '.join(odd)} of YaRN")
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    elif kind == "llama3":
        _require(family.arch == MODEL_ARCH.LLAMA, "rope_type = 'llama3' in this family")
    else:
        _require(kind == "default", f"rope_type = {kind!r}")


def notes(config: Config) -> list[str]:
    """Return in what llama.cpp computes something else than the model that was trained, though it runs it."""
    rope = rope_of(config)
    if rope.get("rope_type") == "yarn" and rope.get("truncate", True) is False:
        return ["llama.cpp rounds the bounds of YaRN, which this model does not: its logits differ a little"]
    return []


def made_tensors(family: Family, config: Config) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that no checkpoint has, by their names in GGUF: by what Llama 3.1 divides frequencies.

    Source: "The Llama 3 Herd of Models", section 3.4.3, and transformers' `rope_type = "llama3"`.
    """
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    length = 2 * math.pi * rope["rope_theta"] ** exponents
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    smooth = ((original / length - low) / (high - low)).clamp(0, 1)
    yield "rope_freqs.weight", (1 / ((1 - smooth) / factor + smooth)).float()


def _require(good: bool, what: str) -> None:
    """
    Raises:
        UsageError: unless `good`.
    """
    if not good:
        raise UsageError(f"llama.cpp does not compute this model: {what}", hint="export it with --to hf")


# ------------------------------------------------------------------------------------------- what is special


def _no_window(writer: GGUFWriter, config: Config) -> None:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    _require(window is None, f"sliding_window = {window}")


def _mixtral(writer: GGUFWriter, config: Config) -> None:
    _no_window(writer, config)
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def _qwen3_moe(writer: GGUFWriter, config: Config) -> None:
    _no_window(writer, config)
    _require(config["norm_topk_prob"], "norm_topk_prob = false")
    dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    _require(not dense, "layers without experts among others")
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _windows(writer: GGUFWriter, config: Config, every: int) -> None:
    """Write which layers see a window: all but each `every`-th, unless the file says otherwise."""
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    if any(kinds):
        writer.add_sliding_window(config["sliding_window"])
        if kinds != [(number + 1) % every != 0 for number in range(len(kinds))]:
            writer.add_sliding_window_pattern(kinds)


def _gemma3(writer: GGUFWriter, config: Config) -> None:
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    usual = config["hidden_size"] // heads if layers == 62 else config["head_dim"]
    scalar = config["query_pre_attn_scalar"]
    _require(scalar == usual, f"query_pre_attn_scalar = {scalar}, where it takes {usual}")
    _require(not config.get("attn_logit_softcapping"), "attn_logit_softcapping")
    _require(not config.get("use_bidirectional_attention"), "use_bidirectional_attention")
    _require(not config.get("attention_bias"), "attention_bias")
    _windows(writer, config, 6)
    local = rope_of(config, "sliding_attention")
    _require(local.get("rope_type", "default") == "default", "scaled RoPE in layers with a window")
    writer.add_rope_freq_base_swa(local["rope_theta"])
    if cap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)


def _granite(writer: GGUFWriter, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _olmo(writer: GGUFWriter, config: Config) -> None:
    _require(not config["tie_word_embeddings"], "tie_word_embeddings = true")
    _require(not config.get("attention_bias"), "attention_bias")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    narrow = head_dim * config["num_attention_heads"] != config["hidden_size"]
    _require(not narrow, f"head_dim = {head_dim}")
    if config.get("layer_types"):
        _windows(writer, config, 4)


def _gpt_oss(writer: GGUFWriter, config: Config) -> None:
    _require(not config["tie_word_embeddings"], "tie_word_embeddings = true")
    limits = config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)
    _require(limits == (1.702, 7.0), f"swiglu_alpha, swiglu_limit = {limits}")
    _windows(writer, config, 2)
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


FAMILIES: dict[Any, Family] = {
    "llama": Family(MODEL_ARCH.LLAMA, interleaved=True),
    "mistral": Family(MODEL_ARCH.LLAMA, _no_window, interleaved=True),
    "mixtral": Family(MODEL_ARCH.LLAMA, _mixtral, interleaved=True),
    "granite": Family(MODEL_ARCH.GRANITE, _granite, interleaved=True),
    "qwen2": Family(MODEL_ARCH.QWEN2, _no_window),
    "qwen3": Family(MODEL_ARCH.QWEN3, _no_window),
    "qwen3_moe": Family(MODEL_ARCH.QWEN3MOE, _qwen3_moe),
    "gemma3_text": Family(MODEL_ARCH.GEMMA3, _gemma3, norm_offset=1.0, activation="gelu_pytorch_tanh"),
    "olmo2": Family(MODEL_ARCH.OLMO2, _olmo),
    "olmo3": Family(MODEL_ARCH.OLMO2, _olmo),
    "gpt_oss": Family(MODEL_ARCH.GPT_OSS, _gpt_oss),
}
"""By `model_type`."""
