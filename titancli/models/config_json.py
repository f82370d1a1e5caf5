"""Reading config.json: which keys become `[model]`, which do not matter, and which are refused. Torch-free.

One file a family. A reader is a function with `@reads` on it: every key of config.json is then read, or does
not change what the model computes, or has the value of a model without it; any other is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.models.quantization import KEY, quantization_of

# fmt: off
HARMLESS = frozenset(
    (
        # what it is called, and how it is stored
        "architectures", "auto_map", "dtype", "model_type", KEY, "tokenizer_class", "torch_dtype",
        "transformers_version",
        # tokens
        "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "mask_token_id",
        "pad_token_id", "sep_token_id",
        # what transformers returns, and how it goes about it
        "cache_implementation", "chunk_size_feed_forward", "ep_size", "id2label", "label2id",
        "max_position_embeddings", "num_labels", "output_attentions", "output_hidden_states",
        "output_router_logits", "pretraining_tp", "problem_type", "return_dict",
        "task_specific_params", "use_cache",
        # training alone
        "attention_dropout", "aux_loss_alpha", "initializer_range", "router_aux_loss_coef",
        "router_jitter_noise", "seq_aux",
        # sampling, where it stood before there was a generation_config.json
        "do_sample", "length_penalty", "max_length", "max_new_tokens", "min_length", "num_beams",
        "repetition_penalty", "temperature", "top_p",
    )
)
# fmt: on
"""Keys that do not change what a model computes from tokens and weights."""
NEUTRAL: Mapping[str, Any] = {
    "embedding_multiplier": 1,
    "is_causal": True,
    "logit_scale": 1,
    "logits_scaling": 1,
    "partial_rotary_factor": 1,
    "residual_multiplier": 1,
    "rotary_pct": 1,
    "use_rope": True,
}
"""Values at which a key changes nothing, where that is not null, false, zero or empty."""

Read = Callable[[Mapping[str, Any]], dict[str, Any]]


class ConfigJSON(Mapping[str, Any]):
    """The keys of a config.json, which remembers those that were asked for."""

    def __init__(self, values: Mapping[str, Any], within: str = "") -> None:
        self._values, self._within = values, within
        self._asked: set[str] = set()
        self._tables: dict[str, ConfigJSON] = {}
        self.refused: list[str] = []
        """What a reader has found that the model does not have."""

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def table(self, key: str) -> ConfigJSON:
        """A table within it, empty where there is none; what is not read of it counts as well."""
        if key not in self._tables:
            self._tables[key] = ConfigJSON(self.get(key) or {}, f"{self._within}{key}.")
        return self._tables[key]

    def foreign(self, ignoring: Collection[str] = ()) -> list[str]:
        """What was refused, and what nobody asked for although it changes a model, each with its value."""
        found = list(self.refused)
        for key, value in self._values.items():
            known = key in self._asked or key in HARMLESS or key in ignoring
            if not (known or key.startswith(("_", "unsloth")) or _neutral(key, value)):
                found.append(f"{self._within}{key} = {value!r}")
        return found + [line for table in self._tables.values() for line in table.foreign(ignoring)]


def _neutral(key: str, value: Any) -> bool:
    return value is None or (value == NEUTRAL[key] if key in NEUTRAL else not value)


def reads(model: str, *, ignoring: Collection[str] = ()) -> Callable[[Callable[[ConfigJSON], Any]], Read]:
    """Make a reader refuse every key that it leaves unread and that could change what the model computes.

    Args:
        model: the component's name.
        ignoring: further keys that change nothing in this family.
    """

    def decorate(read: Callable[[ConfigJSON], Any]) -> Read:
        @functools.wraps(read)
        def from_config_json(config_json: Mapping[str, Any]) -> dict[str, Any]:
            keys = ConfigJSON(config_json)
            try:
                found = read(keys)
            except (KeyError, TypeError, ValueError):
                _refuse(model, keys.refused)  # of another family, which explains what is missing
                raise
            _refuse(model, keys.foreign(ignoring))
            return found

        return from_config_json

    return decorate


def _refuse(model: str, foreign: list[str]) -> None:
    if foreign:
        raise EnvironmentProblem(
            f"config.json has {', '.join(foreign)}, which the model {model} does not support",
            hint="use other weights, or another model (hf_causal_lm for models of transformers); a key "
            "that has no effect can be removed from config.json",
        )


def refuse_others(
    config_json: ConfigJSON, expected: Mapping[str, Any], computed: Mapping[str, Any] | None = None
) -> None:
    """Note the keys whose values are not as the model needs them. What is `computed` goes before the file.

    Raises:
        EnvironmentProblem: the weights are quantized in a way that is not read.
    """
    quantization_of(config_json)
    computed = computed or {}
    for key, good in expected.items():
        there = config_json.get(key, good)
        value = computed.get(key, there)
        if value != good:
            config_json.refused.append(f"{key} = {value!r}")


def rope_of(config_json: ConfigJSON) -> tuple[str, ConfigJSON]:
    """The kind of rotary embedding, `"default"` for the plain one, and its parameters.

    transformers 4 writes `rope_scaling` and `rope_theta`, 5 both into `rope_parameters`.
    """
    older = config_json.table("rope_scaling")
    rope = config_json.table("rope_parameters") or older
    kinds = [rope[key] for key in ("rope_type", "type") if key in rope]
    return (kinds[0] if kinds else "default"), rope


def theta_of(config_json: ConfigJSON, default: float = 10000.0) -> float:
    """The base of the rotary frequencies."""
    apart, within = config_json.get("rope_theta"), rope_of(config_json)[1].get("rope_theta")
    if apart and within and float(apart) != float(within):
        config_json.refused.append(f"rope_theta = {apart!r}, but {within!r} in its table of RoPE")
    return float(apart or within or default)


def llama3_rope_keys(config_json: ConfigJSON) -> dict[str, Any]:
    """The key `rope_scaling` of `[model]`, or none where frequencies are plain."""
    kind, rope = rope_of(config_json)
    if kind != "llama3":
        return {}
    scaling = {
        "factor": float(rope["factor"]),
        "low_freq_factor": float(rope["low_freq_factor"]),
        "high_freq_factor": float(rope["high_freq_factor"]),
        "original_max_position": int(rope["original_max_position_embeddings"]),
    }
    return {"rope_scaling": scaling}
