"""config.json, both ways: one table per family, from which it is read and written. Torch-free.

A row has our name and config.json's name of a value, what a config.json without it means, and, if the model
supports only one value, that value. Every key of a config.json must be in the table, have no effect on what
the model computes, or have the value of a model without the feature; any other is rejected by name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.models.quantization import KEY, quantization_of

# fmt: off
HARMLESS = frozenset(
    (
        # names and storage
        "architectures", "auto_map", "dtype", "is_llama_config", "model_type", KEY, "tokenizer_class",
        "torch_dtype", "transformers.js_config", "transformers_version",
        # tokens
        "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "mask_token_id",
        "pad_token_id", "sep_token_id",
        # what transformers returns, and how it computes
        "cache_implementation", "chunk_size_feed_forward", "ep_size", "id2label", "label2id",
        "max_position_embeddings", "num_labels", "output_attentions", "output_hidden_states", "use_cache",
        "output_router_logits", "pretraining_tp", "problem_type", "return_dict", "task_specific_params",
        # training only
        "attention_dropout", "aux_loss_alpha", "initializer_range", "router_aux_loss_coef",
        "router_jitter_noise", "seq_aux",
        # sampling, from before generation_config.json existed
        "do_sample", "length_penalty", "max_length", "max_new_tokens", "min_length", "num_beam_groups",
        "num_beams", "num_return_sequences", "repetition_penalty", "temperature", "top_k", "top_p",
        "typical_p",
    )
)
# fmt: on
"""Keys that do not change what a model computes from tokens and weights."""
IN_TRAINING = {"attention_dropout", "output_router_logits", "router_jitter_noise"}
"""Keys of these that, unless null, false or zero, change what transformers trains: dropout, and router
losses."""
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
"""Values at which a key has no effect, if other than null, false, zero or empty."""


class ConfigJSON(Mapping[str, Any]):
    """The keys of a config.json, recording which of them were read."""

    def __init__(self, values: Mapping[str, Any], within: str = "") -> None:
        self._values, self._within = values, within
        self._read: set[str] = set()
        self._tables: dict[str, ConfigJSON] = {}
        self.refused: list[str] = []
        """Keys whose values the model does not support."""

    def refuse(self, key: str, value: Any) -> None:
        """Record a key whose value the model does not support."""
        self.refused.append(f"{self._within}{key} = {value!r}")

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def table(self, key: str) -> ConfigJSON:
        """Return a nested table, empty if missing; its unread keys count as well."""
        if key not in self._tables:
            self._tables[key] = ConfigJSON(self.get(key) or {}, f"{self._within}{key}.")
        return self._tables[key]

    def rejected(self) -> list[str]:
        """Return the rejected keys, including those of nested tables."""
        return [*self.refused, *(line for table in self._tables.values() for line in table.rejected())]

    def foreign(self, ignoring: Collection[str] = ()) -> list[str]:
        """Return the rejected keys, and the unread keys that change a model, each with its value."""
        found = list(self.refused)
        for key, value in self._values.items():
            harmless = key in HARMLESS and key not in IN_TRAINING
            known = key in self._read or harmless or key in ignoring
            if not (known or key.startswith(("_", "unsloth")) or _neutral(key, value)):
                found.append(f"{self._within}{key} = {value!r}")
        return found + [line for table in self._tables.values() for line in table.foreign(ignoring)]


def _neutral(key: str, value: Any) -> bool:
    if key == "layer_types":
        return value is None or set(value) <= {"full_attention"}
    return value is None or (value == NEUTRAL[key] if key in NEUTRAL else not value)


class Ours(dict[str, Any]):
    """Fields of `[model]` by dotted name; missing ones are None."""

    def __missing__(self, name: str) -> None:
        return None


class _Fields(Ours):
    """The fields of a config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._config = config

    def __missing__(self, name: str) -> Any:
        return reduce(lambda value, key: getattr(value, key, None), name.split("."), self._config)


_UNSET: Any = object()
LAYERS = 1 << 14
"""Most layers of a model that a config.json describes: lists with an entry for each are made."""


@dataclass(frozen=True)
class Key:
    """A row of a table. `default` and `only` may be functions of our fields."""

    ours: str | None
    """Field of `[model]`, dotted within a section; None: no field."""
    theirs: str | None
    """Key of config.json; None: no key."""
    default: Any = _UNSET
    """Value that a missing key stands for; without a default, the key is required."""
    only: Any = _UNSET
    """Only supported value: any other is rejected, both ways."""
    also: tuple[str, ...] = ()
    """Other names of the key."""
    nullable: bool = False
    """Whether null is a value of its own."""
    written: bool = True
    """Whether it is written, or only read."""
    read: Callable[[ConfigJSON, Ours], Any] | None = None
    """Computes our value, if it is not config.json's."""
    write: Callable[[Ours], Any] | None = None
    """Computes config.json's value, if it is not ours."""

    def take(self, there: ConfigJSON, ours: Ours) -> None:
        """Read the value from config.json into our fields."""
        there.get(str(self.theirs))  # marks it as read
        value = self._found(there, ours) if self.read is None else self.read(there, ours)
        if self.ours is not None:
            ours[self.ours] = value
        if self.theirs is not None and self.only is not _UNSET and value != _of(self.only, ours):
            there.refuse(self.theirs, value)

    def give(self, ours: Ours, there: dict[str, Any]) -> str | None:
        """Write the value from our fields to config.json; return a value that transformers does not
        support, if it is one."""
        value = ours[self.ours] if self.ours is not None else _of(self.only, ours)
        if self.ours is not None and self.only is not _UNSET and value != _of(self.only, ours):
            return f"{self.ours} = {value!r}"
        value = value if self.write is None else self.write(ours)
        said = value is not _UNSET and (value is not None or self.nullable)
        if self.theirs is not None and self.written and said:
            there[self.theirs] = value
        return None

    def _found(self, there: ConfigJSON, ours: Ours) -> Any:
        names = () if self.theirs is None else (self.theirs, *self.also)
        found = [there[name] for name in names if name in there]
        for value in found:
            if value is not None or self.nullable:
                return value
        usual = self.only if self.default is _UNSET else self.default
        value = _of(usual, ours)
        if value is _UNSET:
            if self.ours is not None:
                raise KeyError(self.theirs)
            return None
        # null stands for false, for nothing, or for a value that follows from other keys
        if found and value and not callable(usual):
            raise KeyError(self.theirs)
        return value


def _of(value: Any, ours: Ours) -> Any:
    return value(ours) if callable(value) else value


@dataclass(frozen=True)
class RopeKeys:
    """The rows of RoPE: its base, and its scaling table.

    transformers 4 writes `rope_scaling` and `rope_theta`, transformers 5 writes both into `rope_parameters`.
    """

    theta: float = 10000.0
    """Base, if config.json has none."""
    ours: str | None = None
    """Section of `[model]` for its scaling; None: no scaling."""
    kind: str = "default"
    """Name of this kind of scaling in transformers."""
    keys: tuple[Key, ...] = ()
    """Rows of the scaling table."""
    plain: Mapping[str, Any] | None = None
    """Value written without scaling."""
    unsaid: Mapping[str, Any] | None = None
    """Section used if config.json has no RoPE keys at all."""
    beside: tuple[Key, ...] = ()
    """Rows that may be inside or outside of the table, as the base may."""
    by_layer: bool = False
    """Whether layers with a sliding window are never scaled; transformers 5 has one table per kind of
    layer."""
    local: Key | None = None
    """Row of these layers' base, if they have their own."""

    def take(self, there: ConfigJSON, ours: Ours) -> None:
        """Read the rows, see `Key.take`."""
        older = there.table("rope_scaling")
        table = there.table("rope_parameters") or older
        if self.by_layer and "full_attention" in table:
            table, sliding = table.table("full_attention"), table.table("sliding_attention")
            Key(None, "rope_type", only="default").take(sliding, ours)
            same = Key(None, "rope_theta", only=lambda ours: table.get("rope_theta"))
            (same if self.local is None else replace(self.local, theirs="rope_theta")).take(sliding, ours)
        elif self.local is not None:
            self.local.take(there, ours)
        for key in (Key("rope_theta", "rope_theta", self.theta), *self.beside):
            name = str(key.theirs)
            apart, within = there.get(name), table.get(name)
            if apart is not None and within is not None and float(apart) != float(within):
                there.refused.append(f"{name} = {apart!r}, but {within!r} in its table of RoPE")
            key.take(there if apart is not None else table, ours)
        kinds = [table[key] for key in ("rope_type", "type") if key in table]
        kind = kinds[0] if kinds else "default"
        if kind not in ("default", self.kind):
            there.refuse("rope_type", kind)
        elif kind != "default":
            for key in self.keys:
                key.take(table, ours)
        elif self.unsaid and not table:
            ours |= {f"{self.ours}.{key}": value for key, value in self.unsaid.items()}

    def give(self, ours: Ours, there: dict[str, Any]) -> str | None:
        """Write the rows, see `Key.give`."""
        for key in (Key("rope_theta", "rope_theta"), *self.beside, *((self.local,) if self.local else ())):
            key.give(ours, there)
        table: dict[str, Any] | None = None
        if self.ours is not None and ours[self.ours] is not None:
            table = {"rope_type": self.kind}
            for key in self.keys:
                key.give(ours, table)
        there["rope_scaling"] = self.plain if table is None else table
        return None


class Table:
    """The config.json of a transformers architecture."""

    def __init__(self, architecture: str, *rows: Key | RopeKeys, ignoring: Collection[str] = ()) -> None:
        """Create the table; `ignoring` are further keys without effect in this family."""
        self.architecture, self.rows, self.ignoring = architecture, rows, ignoring

    def read(self, model: str, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `[model]` for the component `model`.

        Raises:
            EnvironmentProblem: the weights are quantized in an unsupported way, or keys, which it names,
                belong to another model.
            KeyError: a key is missing.
        """
        quantization_of(config_json)
        there, ours = ConfigJSON(config_json), Ours()
        try:
            for row in self.rows:
                row.take(there, ours)
        except (KeyError, TypeError, ValueError):
            _refuse(model, there.rejected())  # another family's config, which explains the missing key
            raise
        _refuse(model, there.foreign(self.ignoring))
        found: dict[str, Any] = {}
        for name, value in ours.items():
            *sections, last = name.split(".")
            if value is not None:
                reduce(lambda table, key: table.setdefault(key, {}), sections, found)[last] = value
        return found

    def theirs(self, ours: str) -> str | None:
        """Return config.json's name of a field of `[model]`, dotted within a section; None: it has none."""
        ropes = [row for row in self.rows if isinstance(row, RopeKeys)]
        keys = [row for row in self.rows if isinstance(row, Key)]
        keys += [
            key for row in ropes for key in (*row.keys, *row.beside, *((row.local,) if row.local else ()))
        ]
        named = {key.ours: key.theirs for key in keys}
        return named.get(ours) or ("rope_theta" if ropes and ours == "rope_theta" else None)

    def write(self, model_type: str, config: Any) -> dict[str, Any]:
        """Return the config.json for a model's config with all fields explicit.

        Raises:
            EnvironmentProblem: transformers' model does not support the config (names all differences).
        """
        found: dict[str, Any] = {"architectures": [self.architecture], "model_type": model_type}
        ours = _Fields(config)
        wrong = [fault for row in self.rows if (fault := row.give(ours, found)) is not None]
        if wrong:
            raise EnvironmentProblem(f"transformers' {self.architecture} has no {', '.join(wrong)}")
        return found


def _refuse(model: str, foreign: list[str]) -> None:
    if foreign:
        raise EnvironmentProblem(
            f"config.json has {', '.join(foreign)}, which the model {model} does not support",
            hint="use other weights, or another model (hf_causal_lm for models of transformers); keys "
            "that have no effect, or that training can do without (dropout), can be removed from "
            "config.json",
        )


# --------------------------------------------------------------------------- what most families have


_DECODER = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}


def decoder(
    max_seq_len: int,
    norm_eps: float = 1e-6,
    *,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    eps: str = "rms_norm_eps",
    **usual: Any,
) -> tuple[Key, ...]:
    """Return the rows that every decoder has.

    Args:
        max_seq_len, norm_eps, usual: defaults of its transformers class, by our names.
        activation: key and value.
        eps: key of the norms' epsilon.
    """
    usual = {"max_seq_len": max_seq_len, "norm_eps": norm_eps, "tied": False, **usual}
    key, value = activation
    names = {**_DECODER, "norm_eps": eps}
    reads = {"n_layers": _layers}
    rows = [
        Key(ours, theirs, usual.get(ours, _UNSET), read=reads.get(ours)) for ours, theirs in names.items()
    ]
    return (*rows, Key(None, key, only=value))


def _layers(there: ConfigJSON, ours: Ours) -> int:
    """Return the number of layers, from 1 to `LAYERS`."""
    found = there[_DECODER["n_layers"]]
    if type(found) is not int or not 1 <= found <= LAYERS:
        raise ValueError(f"num_hidden_layers is {reprlib.repr(found)}, not a number from 1 to {LAYERS:,}")
    return found


def alike(**usual: Any) -> tuple[Key, ...]:
    """Return rows of fields with the same name in config.json, with the values that a config.json without
    them means."""
    return tuple(Key(name, name, default) for name, default in usual.items())


def windows(every: int) -> Key:
    """Return the row for layers that all have a sliding window except every n-th."""
    kinds = ("full_attention", "sliding_attention")
    return Key(
        None,
        "layer_types",
        only=lambda ours: [kinds[(number + 1) % every != 0] for number in range(ours["n_layers"])],
    )


GROUPED = (
    Key("n_kv_heads", "num_key_value_heads", lambda ours: ours["n_heads"]),
    Key("head_dim", "head_dim", lambda ours: ours["dim"] // ours["n_heads"]),
)
"""Rows of grouped-query attention."""
NO_BIAS = Key(None, "attention_bias", only=False)
ROPE_SCALING = tuple(
    Key(f"rope_scaling.{ours}", theirs)
    for ours, theirs in {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position": "original_max_position_embeddings",
    }.items()
)

SHARED_EXPERTS = (
    Key("moe.num_experts", "n_routed_experts"),
    Key("moe.top_k", "num_experts_per_tok"),
    Key("moe.hidden_dim", "moe_intermediate_size"),
    Key(
        "moe.num_shared_experts",
        "n_shared_experts",
        read=lambda there, ours: there["n_shared_experts"],
        only=lambda ours: max(1, ours["moe.num_shared_experts"] or 0),
    ),
    Key("moe.load_balance_coeff", None, 1e-3),
)
"""Rows of DeepSeek's experts: some shared by all tokens, with choices balanced by a bias."""
STORED_BIAS = Key("moe.freeze_expert_bias", None, True)
"""Row for folders that store this bias, which fine-tuning with transformers leaves unchanged."""


def yarn_keys(section: str, original_max_position: Any = _UNSET) -> tuple[Key, ...]:
    """Return the rows of YaRN in a RoPE table."""
    return (
        Key(f"{section}.factor", "factor"),
        Key(f"{section}.original_max_position", "original_max_position_embeddings", original_max_position),
        Key(f"{section}.beta_fast", "beta_fast", 32.0),
        Key(f"{section}.beta_slow", "beta_slow", 1.0),
        Key(f"{section}.truncate", "truncate", True),
    )


def routing(*, groups: bool = False, **only: Any) -> tuple[Key, ...]:
    """Return rows for the fixed behaviour of transformers' routing: fields of `moe` with their values.

    Without `groups`, experts are not grouped and scores are not scaled.
    """
    rows = {"score_before_experts": False, "gate_bias": False}
    plain = {} if groups else {"num_expert_groups": None, "route_scale": 1.0}
    return tuple(Key(f"moe.{name}", None, only=value) for name, value in (only | rows | plain | only).items())


def expert_groups(
    default: int, top_k: int, grouped: Callable[[ConfigJSON], bool] = lambda there: True
) -> tuple[Key, ...]:
    """Return the rows of DeepSeek's groups of experts, ranked by the sum of `top_k` scores; one group counts
    as none.

    Args:
        default: number of groups if config.json has none.
        grouped: whether a config.json forms groups.
    """

    def groups(there: ConfigJSON, ours: Ours) -> int | None:
        count = there.get("n_group", default) or 1
        return count if grouped(there) and count > 1 else None

    def limited(there: ConfigJSON, ours: Ours) -> int | None:
        there.get("topk_group")  # has no effect with one group
        return there["topk_group"] if ours["moe.num_expert_groups"] else None

    def of(name: str) -> Callable[[Ours], Any]:
        return lambda ours: ours[name] or 1

    return (
        Key("moe.num_expert_groups", "n_group", read=groups, write=of("moe.num_expert_groups")),
        Key("moe.num_limited_groups", "topk_group", read=limited, write=of("moe.num_limited_groups")),
        Key(
            "moe.group_top_k",
            None,
            only=lambda ours: top_k if ours["moe.num_expert_groups"] else ours["moe.group_top_k"],
        ),
    )


KERNEL_KEYS = {"attn_implementation", "experts_implementation"}
"""Keys that only select transformers' kernels; some begin with an underscore."""


def kernels_of_the_hub(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of config.json that would make transformers download a kernel from the Hub and run
    it."""
    for key, value in values.items():
        names = value.values() if isinstance(value, dict) else (value,)
        if str(key).lstrip("_") in KERNEL_KEYS:
            yield from ((key, name) for name in names if isinstance(name, str) and "/" in name)
        elif isinstance(value, dict):
            yield from kernels_of_the_hub(value)
