"""What a decoder is made of, as plain numbers: the sizes that `titan plan` computes with. Torch-free.

A model's config that has a method `shape()` returns a `Decoder`; its parameters are then, name by name and
shape by shape, those of the module that the config builds. The functions at the end make what most have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Style = Literal["column", "row", "vocab", "norm", "replicate", "expert"]
"""How a parameter is cut over mesh.tp (as in a model's `tensor_plan`) or, if an expert's, over mesh.ep."""


@dataclass(frozen=True)
class Parameter:
    name: str
    """Within its block or, above the blocks, within the model."""
    shape: tuple[int, ...]
    style: Style

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Attention:
    """Softmax attention. A head reads `head_dim` numbers of a query and a key, and `value_dim` of a value."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    parameters: tuple[Parameter, ...]
    qk_norm: bool = False
    """Whether queries and keys pass through a norm of their own."""
    norm_after: bool = False
    """Whether queries and keys, once rotated, pass through a norm without weights."""
    window: int | None = None
    """Tokens that a token sees at most, itself included; None: the whole row before it."""
    chunk: int | None = None
    """A token sees only its own chunk of so many; None: there are no chunks."""
    rotary: bool = True
    """Whether queries and keys are rotated by their positions."""
    scaled: bool = False
    """Whether queries are multiplied by what follows from their positions."""
    sinks: bool = False
    """Whether each head has a logit that takes its share of the softmax and gives nothing."""
    query_rank: int | None = None
    """Width of the latent that queries are made from (multi-head latent attention); None: from the stream."""
    kv_rank: int | None = None
    """Width of the latent that keys and values are made from; None: from the stream."""
    rope_dim: int | None = None
    """Numbers of a query or key that are rotated; None: all."""

    def most(self, seq_len: int) -> int:
        """Tokens that any token of a row so long sees at most."""
        return min(seq_len, self.window or seq_len, self.chunk or seq_len)


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
    shared_hidden: int = 0
    """Of all shared experts together; 0: there are none."""
    joined: bool = False
    """Whether the two matrices that an expert begins with are one."""
    score_before: bool = False
    """Whether scores multiply what goes into the experts, or what comes out of them."""
    clamped: bool = False
    """Whether experts have biases, and what their two halves make is clamped (gpt-oss)."""


@dataclass(frozen=True)
class Block:
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    attention: Attention
    feed_forward: FeedForward | Experts
    norms: tuple[Parameter, ...]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.norms, *self.attention.parameters, *self.feed_forward.parameters)


@dataclass(frozen=True)
class Decoder:
    """Embedding, blocks named `layers.0` and on, a norm, and an output over the vocabulary."""

    dim: int
    vocab_size: int
    blocks: tuple[Block, ...]
    tied: bool = False
    """Whether the output uses the embedding's weight."""

    @property
    def embedding(self) -> Parameter:
        return Parameter("tok_embeddings.weight", (self.vocab_size, self.dim), "vocab")

    @property
    def norm(self) -> Parameter:
        return Parameter("norm.weight", (self.dim,), "norm")

    @property
    def output(self) -> Parameter:
        return Parameter("output.weight", (self.vocab_size, self.dim), "vocab")

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
        size = self.norm.size + self.output.size
        for block in self.blocks:
            part = block.feed_forward
            share = part.top_k / part.experts if isinstance(part, Experts) else 1.0
            size += sum(round(p.size * share) if p.style == "expert" else p.size for p in block.parameters)
        return size

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward of one token: 6 per active parameter, and a layer has 12 · width of attention
        per token of the row (PaLM, arXiv 2204.02311, appendix B)."""
        return 6.0 * self.active_size + sum(
            6.0 * a.heads * (a.head_dim + a.value_dim) * a.most(seq_len)
            for a in (block.attention for block in self.blocks)
        )


# --------------------------------------------------------------------------- what most families have


def grouped_query(
    dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qk_norm: bool = False,
    bias: bool = False,
    sinks: bool = False,
    window: int | None = None,
) -> Attention:
    """Grouped-query attention (arXiv 2305.13245) as `titancli.models.blocks.attention` has it."""
    products: dict[str, tuple[int, int, Style]] = {
        "wq": (heads * head_dim, dim, "column"),
        "wk": (kv_heads * head_dim, dim, "column"),
        "wv": (kv_heads * head_dim, dim, "column"),
        "wo": (dim, heads * head_dim, "row"),
    }
    parameters = [Parameter("attention.sinks", (heads,), "column")] if sinks else []
    for name, (rows, columns, style) in products.items():
        parameters.append(Parameter(f"attention.{name}.weight", (rows, columns), style))
        if bias:
            parameters.append(Parameter(f"attention.{name}.bias", (rows,), style))
    if qk_norm:
        parameters += [
            Parameter(f"attention.{name}.weight", (head_dim,), "norm") for name in ("q_norm", "k_norm")
        ]
    return Attention(
        heads,
        kv_heads,
        head_dim,
        head_dim,
        tuple(parameters),
        qk_norm=qk_norm,
        window=window,
        sinks=sinks,
    )


def latent(
    dim: int,
    heads: int,
    *,
    query_rank: int | None,
    kv_rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
) -> Attention:
    """Multi-head latent attention (arXiv 2405.04434) as `titancli.models.blocks.latent` has it."""
    head_dim = nope_dim + rope_dim
    products: dict[str, tuple[int, int, Style]] = {"wq": (heads * head_dim, dim, "column")}
    if query_rank is not None:
        products = {
            "wq_a": (query_rank, dim, "replicate"),
            "wq_b": (heads * head_dim, query_rank, "column"),
        }
    products |= {
        "wkv_a": (kv_rank + rope_dim, dim, "replicate"),
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
        query_rank=query_rank,
        kv_rank=kv_rank,
        rope_dim=rope_dim,
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
    dim: int,
    hidden: int,
    experts: int,
    top_k: int,
    *,
    shared: int = 0,
    gate_bias: bool = False,
    joined: bool = False,
    score_before: bool = False,
    name: str = "moe",
) -> Experts:
    """`titancli.models.blocks.moe`, as the child `name` of a block; `shared` experts are one of so many times
    the width, `joined` ones have w1 and w3 as one matrix. Tensor parallelism cuts the shared alone: to the
    others each rank brings its own part of the row."""
    parameters = [Parameter(f"{name}.router.gate.weight", (experts, dim), "replicate")]
    if gate_bias:
        parameters.append(Parameter(f"{name}.router.gate.bias", (experts,), "replicate"))
    into = {"w13": 2 * hidden} if joined else {"w1": hidden, "w3": hidden}
    parameters.append(Parameter(f"{name}.experts.w2", (experts, dim, hidden), "expert"))
    for matrix, rows in into.items():
        parameters.append(Parameter(f"{name}.experts.{matrix}", (experts, rows, dim), "expert"))
    if shared:
        parameters += swiglu(dim, shared * hidden, f"{name}.shared_experts").parameters
    return Experts(experts, top_k, hidden, tuple(parameters), shared * hidden, joined, score_before)


def block(dim: int, attention: Attention, feed_forward: FeedForward | Experts) -> Block:
    """With the two norms of a Llama block."""
    norms = tuple(Parameter(f"{name}.weight", (dim,), "norm") for name in ("attention_norm", "ffn_norm"))
    return Block(attention, feed_forward, norms)
