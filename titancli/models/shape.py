"""What a decoder is made of, as plain data: what its module is built from, how it can be split, and what
`titan plan` computes with. Torch-free.

A family's config has a method `layer(number)` that returns a `Block`; `shape()` is the `Decoder` of them all,
which `titancli.models.blocks.decoder` builds. The functions at the end make what most have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

Style = Literal["column", "row", "vocab", "norm", "replicate", "expert"]
"""How a parameter is cut over mesh.tp (as in a model's `tensor_plan`) or, if an expert's, over mesh.ep."""


@dataclass(frozen=True)
class Parameter:
    name: str
    """Within its block or, above the blocks, within the model."""
    shape: tuple[int, ...]
    style: Style
    role: Literal["", "router"] = ""
    """In an optimizer's eyes, where that does not follow from the module; "": it does."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Rope:
    """Rotary positions."""

    dim: int
    """Numbers of a query or key that are rotated."""
    theta: float
    scaling: Any = None
    """How frequencies are stretched: a `titancli.models.sections` RopeScaling or Yarn; None: they are not."""
    length: float = 1.0
    """Factor of cosine and sine."""


@dataclass(frozen=True)
class Attention:
    """Softmax attention. A head reads `head_dim` numbers of a query and a key, and `value_dim` of a value."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    parameters: tuple[Parameter, ...]
    rope: Rope
    bias: Literal["", "qkv", "qkvo"] = ""
    """Which products have a bias."""
    qk_norm: Literal["", "head", "whole"] = ""
    """Whether queries and keys pass through a norm of their own: each head's numbers, or those of all."""
    norm_after: bool = False
    """Whether queries and keys, once rotated, pass through a norm without weights."""
    window: int | None = None
    """Tokens that a token sees at most, itself included; None: the whole row before it."""
    chunk: int | None = None
    """A token sees only its own chunk of so many; None: there are no chunks."""
    rotary: bool = True
    """Whether queries and keys are rotated by their positions."""
    scaled: Any = None
    """By what queries are multiplied, given their positions: a `titancli.models.llama4.AttnTemperature`."""
    scale: float | None = None
    """By what products of queries and keys are multiplied; None: 1 / √head_dim."""
    sinks: bool = False
    """Whether each head has a logit that takes its share of the softmax and gives nothing."""
    query_rank: int | None = None
    """Width of the latent that queries are made from (multi-head latent attention); None: from the stream."""
    kv_rank: int | None = None
    """Width of the latent that keys and values are made from; None: from the stream."""
    rope_dim: int | None = None
    """Numbers of a query or key that are rotated; None: all."""
    gated: bool = False
    """Whether what a head gives is multiplied by a gate, which comes out of the product with the query."""

    def most(self, seq_len: int) -> int:
        """Tokens that any token of a row so long sees at most."""
        return min(seq_len, self.window or seq_len, self.chunk or seq_len)

    def flops(self, seq_len: int) -> float:
        """Forward and backward of one token, its matrices left out."""
        return 6.0 * self.heads * (self.head_dim + self.value_dim) * self.most(seq_len)


@dataclass(frozen=True)
class DeltaNet:
    """A gated DeltaNet layer: each head of values keeps a matrix of `key_dim` x `value_dim`."""

    key_heads: int
    heads: int
    """Of values."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution covers."""
    parameters: tuple[Parameter, ...]

    @property
    def mixed(self) -> int:
        """Numbers of a token that pass the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def flops(self, seq_len: int) -> float:
        """Forward and backward of one token, its matrices left out: a head's matrix is read twice and written
        once. Products of chunks, which do the same in another order, are more."""
        return 18.0 * self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class FeedForward:
    """`w2(silu(w1 x) * w3 x)`."""

    hidden: int
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Experts:
    """A feed-forward layer of which each token visits `top_k` of the experts, and all of the shared ones."""

    experts: int
    top_k: int
    hidden: int
    """Of one routed expert."""
    parameters: tuple[Parameter, ...]
    routing: Any
    """How they are chosen: a `titancli.models.sections.MoE`."""
    shared_hidden: int = 0
    """Of all shared experts together; 0: there are none."""
    joined: bool = False
    """Whether the two matrices that an expert begins with are one."""
    score_before: bool = False
    """Whether scores multiply what goes into the experts, or what comes out of them."""
    clamped: tuple[float, float] | None = None
    """alpha and limit of experts that have biases, and whose two halves are clamped (gpt-oss)."""
    shared_gate: bool = False
    """Whether what the shared experts make of a token is multiplied by a sigmoid of it."""


@dataclass(frozen=True)
class Block:
    """Attention and feed-forward, each added to the residual stream."""

    attention: Attention | DeltaNet
    feed_forward: FeedForward | Experts
    norms: tuple[Parameter, ...]
    norms_after: bool = False
    """Whether each of the two norms what it returns (OLMo 2), not what it is given."""
    mtp: tuple[Parameter, ...] = ()
    """Of a block beyond the last, which predicts a token further ahead (`titancli.models.blocks.mtp`): what
    joins hidden states and embedding, and the norm before the output."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.norms, *self.attention.parameters, *self.feed_forward.parameters, *self.mtp)


@dataclass(frozen=True)
class Decoder:
    """Embedding, blocks named `layers.0` and on, a norm, and an output over the vocabulary.

    The last blocks may be those of multi-token prediction, which stand between the norm and the output.
    """

    dim: int
    vocab_size: int
    blocks: tuple[Block, ...]
    tied: bool = False
    """Whether the output uses the embedding's weight."""
    norm_eps: float = 1e-5
    zero_centred: bool = False
    """Whether norms, but those of gated DeltaNet, multiply by 1 + weight."""

    @property
    def embedding(self) -> Parameter:
        return Parameter("tok_embeddings.weight", (self.vocab_size, self.dim), "vocab")

    @property
    def norm(self) -> Parameter:
        return Parameter("norm.weight", (self.dim,), "norm")

    @property
    def output(self) -> Parameter:
        return Parameter("output.weight", (self.vocab_size, self.dim), "vocab")

    @property
    def mtp_layers(self) -> int:
        """Blocks that predict tokens further ahead, each with the output once more."""
        return sum(bool(block.mtp) for block in self.blocks)

    @property
    def tensor_plan(self) -> dict[str, Style]:
        """The style of every parameter, by a pattern of names."""
        kinds = {
            f"layers.*.{p.name}": p.style for block in dict.fromkeys(self.blocks) for p in block.parameters
        }
        return {p.name: p.style for p in (self.embedding, self.norm, self.output)} | kinds

    @property
    def roles(self) -> dict[str, Any]:
        """What parameters are in an optimizer's eyes, by a pattern of names; see `titancli.models.roles`."""
        blocks = dict.fromkeys(self.blocks)
        return {f"layers.*.{p.name}": p.role for block in blocks for p in block.parameters if p.role}

    def parameters(self) -> Iterator[Parameter]:
        """All of them by their names in the model; a tied one once, as the embedding's."""
        yield self.embedding
        for number, block in enumerate(self.blocks):
            for parameter in block.parameters:
                yield replace(parameter, name=f"layers.{number}.{parameter.name}")
        yield self.norm
        if not self.tied:
            yield self.output

    @property
    def size(self) -> int:
        """Parameters in all."""
        return sum(parameter.size for parameter in self.parameters())

    @property
    def active_size(self) -> int:
        """Parameters that take part in one token, the embedding (a look-up) left out."""
        size = self.norm.size + self.output.size * (1 + self.mtp_layers)
        for block in self.blocks:
            part = block.feed_forward
            share = part.top_k / part.experts if isinstance(part, Experts) else 1.0
            size += sum(round(p.size * share) if p.style == "expert" else p.size for p in block.parameters)
        return size

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward of one token: 6 per active parameter, and a layer has 12 · width of attention
        per token of the row (PaLM, arXiv 2204.02311, appendix B)."""
        return 6.0 * self.active_size + sum(block.attention.flops(seq_len) for block in self.blocks)


# --------------------------------------------------------------------------- what most families have


def grouped_query(
    dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    rope: Rope,
    qk_norm: Literal["", "head", "whole"] = "",
    bias: Literal["", "qkv", "qkvo"] = "",
    sinks: bool = False,
    gated: bool = False,
    **kinds: Any,
) -> Attention:
    """Grouped-query attention (arXiv 2305.13245) as `titancli.models.blocks.attention` has it; `kinds` are
    further fields of `Attention`."""
    products: dict[str, tuple[int, int, Style]] = {
        "q": (heads * head_dim * (1 + gated), dim, "column"),
        "k": (kv_heads * head_dim, dim, "column"),
        "v": (kv_heads * head_dim, dim, "column"),
        "o": (dim, heads * head_dim, "row"),
    }
    parameters = [Parameter("attention.sinks", (heads,), "column")] if sinks else []
    for name, (rows, columns, style) in products.items():
        parameters.append(Parameter(f"attention.w{name}.weight", (rows, columns), style))
        if name in bias:
            parameters.append(Parameter(f"attention.w{name}.bias", (rows,), style))
    if qk_norm:
        one = qk_norm == "head"
        for name, count in {"q": heads, "k": kv_heads}.items():
            size = head_dim if one else count * head_dim
            parameters.append(
                Parameter(f"attention.{name}_norm.weight", (size,), "norm" if one else "column")
            )
    return Attention(
        heads,
        kv_heads,
        head_dim,
        head_dim,
        tuple(parameters),
        rope,
        bias,
        qk_norm,
        sinks=sinks,
        rope_dim=None if rope.dim == head_dim else rope.dim,
        gated=gated,
        **kinds,
    )


def delta_net(dim: int, key_heads: int, heads: int, key_dim: int, value_dim: int, kernel: int) -> DeltaNet:
    """Gated DeltaNet (arXiv 2412.06464) as `titancli.models.blocks.delta` has it."""
    mixed, values = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim
    shapes: dict[str, tuple[tuple[int, ...], Style]] = {
        "conv": ((mixed, kernel), "column"),
        "A_log": ((heads,), "column"),
        "dt_bias": ((heads,), "column"),
        "wqkvz.weight": ((mixed + values, dim), "column"),
        "wba.weight": ((2 * heads, dim), "column"),
        "wo.weight": ((dim, values), "row"),
        "out_norm.weight": ((value_dim,), "norm"),
    }
    parameters = tuple(Parameter(f"attention.{name}", *found) for name, found in shapes.items())
    return DeltaNet(key_heads, heads, key_dim, value_dim, kernel, parameters)


def latent(
    dim: int,
    heads: int,
    *,
    query_rank: int | None,
    kv_rank: int,
    nope_dim: int,
    rope: Rope,
    value_dim: int,
    scale: float,
) -> Attention:
    """Multi-head latent attention (arXiv 2405.04434) as `titancli.models.blocks.latent` has it."""
    head_dim = nope_dim + rope.dim
    products: dict[str, tuple[int, int, Style]] = {"wq": (heads * head_dim, dim, "column")}
    if query_rank is not None:
        products = {
            "wq_a": (query_rank, dim, "replicate"),
            "wq_b": (heads * head_dim, query_rank, "column"),
        }
    products |= {
        "wkv_a": (kv_rank + rope.dim, dim, "replicate"),
        "wkv_b": (heads * (nope_dim + value_dim), kv_rank, "column"),
        "wo": (dim, heads * value_dim, "row"),
    }
    parameters = [
        Parameter(f"attention.{name}.weight", (rows, columns), style)
        for name, (rows, columns, style) in products.items()
    ]
    norms = {"kv_norm": kv_rank} | ({} if query_rank is None else {"q_norm": query_rank})
    parameters += [Parameter(f"attention.{name}.weight", (size,), "norm") for name, size in norms.items()]
    return Attention(
        heads,
        heads,
        head_dim,
        value_dim,
        tuple(parameters),
        rope,
        scale=scale,
        query_rank=query_rank,
        kv_rank=kv_rank,
        rope_dim=rope.dim,
    )


def swiglu(dim: int, hidden: int, name: str = "feed_forward") -> FeedForward:
    """`titancli.models.blocks.feed_forward`, as the child `name` of a block."""
    return FeedForward(
        hidden,
        (
            Parameter(f"{name}.w1.weight", (hidden, dim), "column"),
            Parameter(f"{name}.w2.weight", (dim, hidden), "row"),
            Parameter(f"{name}.w3.weight", (hidden, dim), "column"),
        ),
    )


def mixture(
    dim: int, routing: Any, *, joined: bool = False, shared_gate: bool = False, name: str = "moe"
) -> Experts:
    """`titancli.models.blocks.moe`, as the child `name` of a block, for a `titancli.models.sections.MoE`:
    shared experts are one of so many times the width, `joined` ones have w1 and w3 as one matrix. Tensor
    parallelism cuts the shared alone: to the others each rank brings its own part of the row."""
    experts, hidden, shared = routing.num_experts, routing.hidden_dim, routing.num_shared_experts
    parameters = [Parameter(f"{name}.router.gate.weight", (experts, dim), "replicate", "router")]
    if routing.gate_bias:
        parameters.append(Parameter(f"{name}.router.gate.bias", (experts,), "replicate", "router"))
    into = {"w13": 2 * hidden} if joined else {"w1": hidden, "w3": hidden}
    parameters.append(Parameter(f"{name}.experts.w2", (experts, dim, hidden), "expert"))
    for matrix, rows in into.items():
        parameters.append(Parameter(f"{name}.experts.{matrix}", (experts, rows, dim), "expert"))
    if shared:
        parameters += swiglu(dim, shared * hidden, f"{name}.shared_experts").parameters
    if shared_gate:
        parameters.append(Parameter(f"{name}.shared_gate.weight", (1, dim), "replicate", "router"))
    return Experts(
        experts,
        routing.top_k,
        hidden,
        tuple(parameters),
        routing,
        shared * hidden,
        joined,
        routing.score_before_experts,
        shared_gate=shared_gate,
    )


def block(
    dim: int,
    attention: Attention | DeltaNet,
    feed_forward: FeedForward | Experts,
    *,
    norms_after: bool = False,
) -> Block:
    """With the two norms of a Llama block."""
    norms = tuple(Parameter(f"{name}.weight", (dim,), "norm") for name in ("attention_norm", "ffn_norm"))
    return Block(attention, feed_forward, norms, norms_after)
