"""Families that titan does not have, each of values of specs that none of its own uses: compared with
transformers as these are, by `test_families.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from tests.models.families import DENSE, Family
from titancli.models.config_json import GROUPED, NO_BIAS, Key, RopeKeys, Table, alike, decoder, windows
from titancli.models.names import BIASES, LAYER, Names, Pairs, Source
from titancli.models.sections import BUILD, FORM, DecoderConfig
from titancli.protocols.shape import Block, Decoder, Norm
from titancli.registry.component import component

GELU = "gelu_pytorch_tanh"


def biased(*modules: str) -> dict[str, str]:
    return {f"{name}.bias": str(LAYER[f"{name}.weight"]).replace("weight", "bias") for name in modules}


@component("model", "starcoder2", target=BUILD, hf=FORM)
class StarCoder2(DecoderConfig):
    """LayerNorm, a feed-forward without gate, biases everywhere, a sliding window."""

    hidden_dim: int
    sliding_window: int | None = None
    max_seq_len: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    hf_tables: ClassVar = {
        "starcoder2": Table(
            "Starcoder2ForCausalLM",
            *decoder(4096, 1e-5, activation=("hidden_act", GELU), eps="norm_epsilon", tied=True),
            *GROUPED,
            Key("hidden_dim", "intermediate_size"),
            Key("sliding_window", "sliding_window", None, nullable=True),
            Key(None, "use_bias", only=True),
            Key(None, "layer_types", only=lambda ours: ["full_attention"] * ours["n_layers"], written=False),
            RopeKeys(10000.0),
            ignoring=("residual_dropout", "embedding_dropout", "layer_types"),
        )
    }

    def hf_names(self) -> Names:
        layers = {
            f"feed_forward.w{n}.{end}": f"mlp.{m}.{end}"
            for n, m in ((1, "c_fc"), (2, "c_proj"))
            for end in ("weight", "bias")
        }
        return {**LAYER, **BIASES, **layers, **biased("attention_norm", "ffn_norm")}

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_eps, "layer", bias=True)

    def layer(self, number: int) -> Block:
        feed_forward = self.feed_forward(self.hidden_dim, activation="gelu_tanh", gated=False, bias=True)
        return self.block(self.attention(bias="qkvo", window=self.sliding_window), feed_forward)


@component("model", "phi", target=BUILD, hf=FORM)
class Phi(DecoderConfig):
    """Attention and feed-forward in parallel, half of a head rotated, a bias of the output."""

    hidden_dim: int
    max_seq_len: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    hf_tables: ClassVar = {
        "phi": Table(
            "PhiForCausalLM",
            *decoder(2048, 1e-5, activation=("hidden_act", "gelu_new"), eps="layer_norm_eps"),
            *GROUPED,
            Key("hidden_dim", "intermediate_size"),
            RopeKeys(beside=(Key(None, "partial_rotary_factor", only=0.5),)),
            Key(None, "qk_layernorm", only=False),
            ignoring=("embd_pdrop", "resid_pdrop"),
        )
    }

    def hf_names(self) -> Names:
        ends = ("weight", "bias")
        layers = {
            "attention.wo": "self_attn.dense",
            "feed_forward.w1": "mlp.fc1",
            "feed_forward.w2": "mlp.fc2",
        }
        top = {f"norm.{end}": f"model.final_layernorm.{end}" for end in ends}
        renamed = {f"{ours}.{end}": f"{theirs}.{end}" for ours, theirs in layers.items() for end in ends}
        return {**LAYER, **BIASES, **renamed, **top, **biased("attention_norm")}

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_eps, "layer", bias=True)

    def layer(self, number: int) -> Block:
        feed_forward = self.feed_forward(self.hidden_dim, activation="gelu_tanh", gated=False, bias=True)
        return self.block(self.attention(bias="qkvo", share=0.5), feed_forward, parallel=True)

    def shape(self) -> Decoder:
        return replace(super().shape(), output_bias=True)


@component("model", "cohere", target=BUILD, hf=FORM)
class Cohere(DecoderConfig):
    """Parallel branches, LayerNorm without bias, scaled logits, pairs that are neighbours."""

    hidden_dim: int
    logit_scale: float = 0.0625
    max_seq_len: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = True

    hf_tables: ClassVar = {
        "cohere": Table(
            "CohereForCausalLM",
            *decoder(8192, 1e-5, eps="layer_norm_eps", tied=True),
            *GROUPED,
            Key("hidden_dim", "intermediate_size"),
            *alike(logit_scale=0.0625),
            Key(None, "use_qk_norm", only=False),
            NO_BIAS,
            RopeKeys(500000.0),
        )
    }

    def hf_names(self) -> Names:
        pairs = (Pairs(group=self.head_width),)
        turned = {f"attention.w{n}.weight": Source(f"self_attn.{n}_proj.weight", pairs) for n in "qk"}
        return {**LAYER, **turned}

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_eps, "layer")

    def layer(self, number: int) -> Block:
        return self.block(self.attention(), self.feed_forward(self.hidden_dim), parallel=True)

    def shape(self) -> Decoder:
        return replace(super().shape(), logit_scale=self.logit_scale)


@component("model", "gemma2", target=BUILD, hf=FORM)
class Gemma2(DecoderConfig):
    """Soft caps of scores and logits."""

    hidden_dim: int
    sliding_window: int = 4096
    attn_logit_softcapping: float = 50.0
    final_logit_softcapping: float = 30.0
    max_seq_len: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = True

    hf_tables: ClassVar = {
        "gemma2": Table(
            "Gemma2ForCausalLM",
            *decoder(8192, activation=("hidden_activation", GELU), tied=True),
            *GROUPED,
            Key("hidden_dim", "intermediate_size"),
            *alike(sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
            Key(None, "query_pre_attn_scalar", only=64),
            Key(None, "use_bidirectional_attention", only=None),
            windows(2),
            NO_BIAS,
            RopeKeys(10000.0),
        )
    }

    def hf_names(self) -> Names:
        norms = {"attention_post_norm": "post_attention", "ffn_norm": "pre_feedforward"}
        norms |= {"ffn_post_norm": "post_feedforward"}
        return {**LAYER, **{f"{k}.weight": f"{v}_layernorm.weight" for k, v in norms.items()}}

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_eps, zero_centred=True)

    def layer(self, number: int) -> Block:
        window = self.sliding_window if (number + 1) % 2 else None
        attention = self.attention(scale=0.125, cap=self.attn_logit_softcapping, window=window)
        return self.block(attention, self.feed_forward(self.hidden_dim, activation="gelu_tanh"), norms="both")

    def shape(self) -> Decoder:
        cap = self.final_logit_softcapping
        return replace(super().shape(), embedding_scale=self.dim**0.5, logit_cap=cap)


def family(config: Any, **variants: dict[str, Any]) -> Family:
    from titancli.registry.component import component_info

    small = dict(DENSE, n_layers=2, hidden_dim=96)
    nothing: Any = dict(sizes={}, flops={}, counted=(), refused=())
    name = component_info(config).name
    return Family(name=name, config=config, small=small, variants=variants, caches=tuple(variants), **nothing)


BY_SPEC = (
    family(StarCoder2, plain={}, window={"sliding_window": 16, "tied": True}),
    family(Phi, plain={}),
    family(Cohere, plain={}, untied={"tied": False, "n_kv_heads": 4}),
    family(
        Gemma2, capped={"sliding_window": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
)
