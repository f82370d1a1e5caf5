"""Shrink everything costly in a transformers config: the same architecture and kinds of layers.

Sizes are recognized by their names in transformers' configs. Limits on how far attention looks are made
smaller than the test rows, so that they have an effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

VOCABULARY, INNER, RANK, EXPERTS, REACH, LAYERS = 128, 96, 32, 8, 6, 8
"""Maximum sizes: rows of the embedding, widths inside feed-forward, ranks of latents, experts, tokens
covered by a window or an index, and layers."""

DEPTH = ("num_hidden_layers", "n_layer", "num_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads")
MAMBA = ("mamba_expand", "mamba_d_head")
"""Keys that, with the hidden size, determine the number of heads."""
KV_HEADS = re.compile(r"(num|n)_(\w+_)?(key_value|kv)_heads|n_head_kv|num_kv_heads")
CAPS = [
    (re.compile(r"vocab_size(_per_layer_input)?"), VOCABULARY),
    (re.compile(r"\w*(intermediate_size|ffn_hidden_size|ffn_dim|hidden_dim)|n_inner"), INNER),
    (re.compile(r"hidden_size_per_\w+"), RANK),
    (re.compile(r"\w*lora_rank"), RANK),
    (re.compile(r"linear_num_heads"), 2),
    (re.compile(r"linear_head_dim"), RANK),
    (re.compile(r"n_groups?|num_expert_groups?"), 2),
    (re.compile(r"topk_groups?"), 1),
    (re.compile(r"num_experts_per_token"), 2),
    (re.compile(r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_selected_experts|experts_top_k"), 2),
    (re.compile(r"n_shared_experts|num_shared_experts|moe_num_shared_experts"), 1),
    (re.compile(r"n_routed_experts|(moe_)?num_(local_)?experts|zero_expert_num|num_routed_experts"), EXPERTS),
    (re.compile(r"\w*(window|window_size|chunk_size)s?"), REACH),
    (re.compile(r"index_topk|index_block_size"), 4),
    (re.compile(r"index_n_heads|index_topk_blocks|num_layers_per_stack"), 2),
    (re.compile(r"first_k_dense_replace|num_dense_layers"), 2),
    (re.compile(r"num_nextn_predict_layers|moe_layer_start_index"), 1),
]  # fmt: skip
PERIODS = re.compile(
    r"_?sliding_window_pattern|decoder_sparse_step|\w+_interval|\w+_every_n_layers|\w+_period"
)
INDICES = ("mlp_only_layers", "full_attn_idxs")
"""Lists of layer indices."""


def tiny(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with all sizes made small.

    Args:
        values: the whole config, including defaults.
    """
    made = fewer_layers(values)
    heads = next((made[key] for key in HEADS if isinstance(made.get(key), int)), None)
    if heads is None:
        return made
    key_values = next((made[k] for k in made if KV_HEADS.fullmatch(k) and isinstance(made[k], int)), heads)
    fewer = min(heads, 4)
    fewer_kv = fewer if key_values == heads else min(key_values, 2)
    for key, value in made.items():
        if key in HEADS:
            made[key] = fewer
        elif isinstance(value, int) and KV_HEADS.fullmatch(key):
            made[key] = 1 if value == 1 else fewer_kv
        elif key in ("hidden_size", "n_embd", "d_model") and isinstance(value, int):
            made[key] = (value // heads if value % heads == 0 else max(value // heads // 8 * 8, 8)) * fewer
        elif key == "num_attention_heads_per_layer" and isinstance(value, list):
            made[key] = [fewer] * len(value)
    if all(isinstance(made.get(key), int) for key in (*MAMBA, "hidden_size", "mamba_n_heads")):
        expand, width = (made[key] for key in MAMBA)
        made["mamba_n_heads"] = max(expand * made["hidden_size"] // width, 1)
    return made


def fewer_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with few layers of each kind, few experts, a small vocabulary, and short windows,
    but unchanged layer widths."""
    made = {key: _capped(key, value) for key, value in values.items()}
    vocabulary = made.get("vocab_size")
    for key, value in made.items():
        if re.fullmatch(r"\w+_token_id", key) and isinstance(value, int) and isinstance(vocabulary, int):
            made[key] = min(value, vocabulary - 1)
        elif re.fullmatch(r"\w+_token_id", key) and isinstance(value, list):
            made[key] = None
    depth = next((key for key in DEPTH if isinstance(values.get(key), int)), None)
    if depth is None:
        return made
    kept, shared = _kept(values, values[depth])
    places = {layer: place for place, layer in enumerate(kept)}
    for key, value in made.items():
        if isinstance(value, list) and key in INDICES:
            made[key] = [places[layer] for layer in value if layer in places]
        elif isinstance(value, list) and len(value) == values[depth]:
            made[key] = [value[layer] for layer in kept]
        elif _by_layer(value):
            made[key] = {f"{places[int(n)]:02d}": v for n, v in value.items() if int(n) in places}
        elif key in DEPTH:
            made[key] = len(kept)
        elif key == "num_kv_shared_layers" and value:
            made[key] = shared
        elif key in ("max_window_layers", "moe_layer_end_index") and isinstance(value, int):
            made[key] = min(value, len(kept) - 1)
    return made


def _capped(key: str, value: Any) -> Any:
    if isinstance(value, list):  # one number per layer
        return [_capped(key, item) for item in value]
    if isinstance(value, dict):
        return {name: _capped(str(name), item) for name, item in value.items()}
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return min([value, *(most for pattern, most in CAPS if pattern.fullmatch(key))])


def _by_layer(value: Any) -> bool:
    """Return whether it is a table whose keys are layer indices."""
    tables = isinstance(value, dict) and bool(value) and all(isinstance(row, dict) for row in value.values())
    return tables and all(str(key).isdigit() for key in value)


def _kept(values: Mapping[str, Any], depth: int) -> tuple[list[int], int]:
    """Return the layers that represent all kinds, and how many of them use the keys of others."""
    kinds = [_kind(values, layer, depth) for layer in range(depth)]
    shared = values.get("num_kv_shared_layers") or 0
    own = list(_first_of_each(kinds[: depth - shared], 0))
    late = list(_first_of_each(kinds[depth - shared :], depth - shared))
    kept = sorted({*own[:LAYERS], *late[:LAYERS]})
    periods = [v for key, v in values.items() if PERIODS.fullmatch(key) and isinstance(v, int)]
    dense = [values.get(key) or 0 for key in ("first_k_dense_replace", "num_dense_layers")]
    wanted = min(
        depth, max([2, *(min(period, LAYERS) + 1 for period in periods), *(min(n, 2) + 1 for n in dense)])
    )
    others = (layer for layer in range(depth - shared) if layer not in kept)
    while len(kept) < wanted and (layer := next(others, None)) is not None:
        kept.append(layer)
    return sorted(kept), len(late)


def _kind(values: Mapping[str, Any], layer: int, depth: int) -> str:
    """Return a layer's entries in lists and tables by layer."""
    lists = {
        k: v[layer] for k, v in values.items() if isinstance(v, list) and len(v) == depth and k not in INDICES
    }
    listed = {k: layer in v for k, v in values.items() if k in INDICES and isinstance(v, list)}
    tables = {
        k: next((x for n, x in v.items() if int(n) == layer), None) for k, v in values.items() if _by_layer(v)
    }
    return repr((lists, listed, tables))


def _first_of_each(kinds: list[str], start: int) -> Iterator[int]:
    seen: set[str] = set()
    for number, kind in enumerate(kinds, start):
        if kind not in seen:
            seen.add(kind)
            yield number
