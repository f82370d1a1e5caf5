"""The shape of a decoder, as plain data from which its modules are built. Torch-free.

A family's config has a method `layer(number)` that returns a `Block`; `shape()` is the `Decoder` of them all,
which `titancli.models.blocks.decoder` builds. An option of a layer is a field here, which its module reads:
each spec names the class of its module, which is called with the spec. A plugin may derive specs of its own.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

from titancli.registry.component import load_target

POSITIONS = "positions"
"""`angles` of a mixer that is given positions, [B or 1, S] int64, in place of cosine and of sine."""


def _need(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


@dataclass(frozen=True)
class Norm:
    """A norm over the numbers of a token or of a head: `titancli.models.blocks.norm`."""

    eps: float = 1e-5
    kind: Literal["rms", "layer"] = "rms"
    """Whether numbers are divided by the root of their mean square (arXiv 1910.07467), or standardized
    (arXiv 1607.06450)."""
    bias: bool = False
    """Whether a bias is added; only for "layer"."""
    zero_centred: bool = False
    """Whether the factor is 1 + weight; only for "rms"."""

    def __post_init__(self) -> None:
        layer = self.kind == "layer"
        _need(layer or not self.bias, "only LayerNorm has a bias")
        _need(not (layer and self.zero_centred), "LayerNorm multiplies by its weight")


@dataclass(frozen=True)
class Rope:
    """Rotary positions."""

    dim: int
    """The number of rotated elements of a query or key."""
    theta: float
    scaling: Any = None
    """The scaling of frequencies: a section of `titancli.models.sections`; None: no scaling."""
    length: float = 1.0
    """The factor of cosine and sine."""


# ------------------------------------------------------------------------------------------ parts of a block


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The specification of a part of a block."""

    module: ClassVar[str]
    """Class of the module, as "package.module:Class"."""
    dim: int
    """Width of the residual stream."""

    def build(self) -> Any:
        """Return the module on the current device, without initial values."""
        return load_target(self.module)(self)

    def flops(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for one token, without those of its matrices."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Attention(Spec):
    """Grouped-query softmax attention (arXiv 2305.13245). A head reads `head_dim` numbers of a query and a
    key, and `value_dim` of a value."""

    module: ClassVar[str] = "titancli.models.blocks.attention:Attention"
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    rotary: bool = True
    """Whether queries and keys are rotated by their positions."""
    bias: Literal["", "qkv", "qkvo"] = ""
    """The projections that have a bias."""
    qk_norm: Literal["", "head", "whole"] = ""
    """Whether queries and keys pass through a norm of their own: for each head, with weights that heads
    share, or for all heads together."""
    norm: Norm = field(default_factory=Norm)
    """The norm of queries and keys."""
    norm_after: bool = False
    """Whether queries and keys, once rotated, pass through a norm without weights."""
    window: int | None = None
    """The most tokens that a token sees, including itself; None: the whole row before it."""
    chunk: int | None = None
    """The size of chunks, if a token sees only its own chunk; None: there are no chunks."""
    temperature: Any = None
    """The factor of queries, given their positions, if nothing is rotated: a
    `titancli.models.sections.AttnTemperature`."""
    scale: float | None = None
    """The factor of the products of queries and keys; None: 1 / √head_dim."""
    cap: float | None = None
    """Scaled products x become cap · tanh(x / cap) (arXiv 2408.00118); None: they stay as they are."""
    sinks: bool = False
    """Whether each head has a logit that takes a share of the softmax and adds no value."""
    gated: bool = False
    """Whether the output of a head is multiplied by the sigmoid of a gate, which `wq` computes with the
    query."""

    def __post_init__(self) -> None:
        plain = self.qk_norm != "whole" or self.norm == Norm(self.norm.eps)
        _need(plain, "a norm over all heads is RMSNorm by its weight")
        _need(not (self.temperature and self.rotary), "a temperature takes the place of rotary positions")
        _need(self.rotary or not self.norm_after, "a norm after rotation needs rotary positions")

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def angles(self) -> Any:
        """Return which of the decoder's `angles` the attention uses."""
        return self.temperature or self.rope

    def most(self, seq_len: int) -> int:
        """Return the most tokens that a token sees in a row of this length."""
        return min(seq_len, self.window or seq_len, self.chunk or seq_len)

    def flops(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for one token, without those of its matrices."""
        return 6.0 * self.heads * (self.head_dim + self.value_dim) * self.most(seq_len)


@dataclass(frozen=True, kw_only=True)
class Latent(Attention):
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads are made from one
    narrow latent of each token; the rotated part of keys is computed beside it."""

    module: ClassVar[str] = "titancli.models.blocks.latent:LatentAttention"
    query_rank: int | None = None
    """Width of the latent for queries; None: they are made from the residual stream."""
    kv_rank: int
    """Width of the latent for keys and values."""
    width: int
    """Width of a head's value."""
    norm: Norm = field(default_factory=lambda: Norm(1e-6))
    """The norm of the latents, whatever the model's other norms are: as in DeepSeek's own code."""

    def __post_init__(self) -> None:
        options = [one for one in fields(Attention) if one.default is not MISSING and one.name != "scale"]
        if wrong := [one.name for one in options if getattr(self, one.name) != one.default]:
            raise ValueError(f"latent attention has no {', '.join(wrong)}")

    @property
    def value_dim(self) -> int:
        return self.width

    @property
    def nope_dim(self) -> int:
        """The number of elements of a head's query and key that are not rotated."""
        return self.head_dim - self.rope.dim


@dataclass(frozen=True, kw_only=True)
class FeedForward(Spec):
    """`w2(act(w1 x) * w3 x)` (arXiv 2002.05202) or, without a gate, `w2(act(w1 x))`."""

    module: ClassVar[str] = "titancli.models.blocks.feed_forward:FeedForward"
    hidden: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """"gelu_tanh" is the approximation of GELU by tanh (arXiv 1606.08415, section 2)."""
    gated: bool = True
    bias: bool = False
    """Whether its projections have a bias."""


@dataclass(frozen=True, kw_only=True)
class Experts(Spec):
    """A feed-forward layer of experts: each token visits `top_k` of the routed ones, and all shared ones.

    Tensor parallelism shards only the shared ones: each rank brings its own part of the row to the others.
    """

    module: ClassVar[str] = "titancli.models.blocks.moe:MoE"
    routing: Any
    """The number, width and choice of experts: a `titancli.models.sections.MoE`."""
    joined: bool = False
    """Whether the first two matrices of an expert are one."""
    clamped: tuple[float, float] | None = None
    """alpha and limit of joined experts with biases, whose two halves are clamped (arXiv 2508.10925)."""
    shared_gate: bool = False
    """Whether the output of the shared experts for a token is multiplied by a sigmoid of it."""

    def __post_init__(self) -> None:
        _need(self.joined or self.clamped is None, "clamped experts are joined")

    @property
    def shared(self) -> FeedForward | None:
        """The shared experts as one feed-forward layer of their total width."""
        hidden = self.routing.num_shared_experts * self.routing.hidden_dim
        return FeedForward(dim=self.dim, hidden=hidden) if hidden else None

    @property
    def stacks(self) -> str:
        """Class of the module that holds the routed experts."""
        if self.clamped is not None:
            return "titancli.models.blocks.clamped:ClampedExperts"
        return f"titancli.models.blocks.moe:{'JoinedExperts' if self.joined else 'Experts'}"


# ----------------------------------------------------------------------------------- a block, and the decoder


@dataclass(frozen=True, kw_only=True)
class Block(Spec):
    """Attention and feed-forward, each added to the residual stream."""

    module: ClassVar[str] = "titancli.models.blocks.block:Block"
    mtp: ClassVar[bool] = False
    """Whether it predicts a token further ahead, beyond the last block."""
    attention: Spec
    """An `Attention`, or a plugin's spec of a layer in its place."""
    feed_forward: FeedForward | Experts
    norm: Norm = field(default_factory=Norm)
    norms: Literal["before", "after", "both"] = "before"
    """The place of norms of attention and feed-forward: before them, after them (OLMo 2, arXiv
    2501.00656), or both."""
    parallel: bool = False
    """Whether both get the same normed input, and are added together (arXiv 2204.02311)."""
    residual_scale: float = 1.0
    """The factor of each branch before it is added."""

    def __post_init__(self) -> None:
        _need(not (self.parallel and self.norms == "after"), "parallel branches are normed before")

    @property
    def norm_names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = ("attention_norm",) if self.parallel else ("attention_norm", "ffn_norm")
        return (*names, "attention_post_norm", "ffn_post_norm") if self.norms == "both" else names


@dataclass(frozen=True, kw_only=True)
class MTPBlock(Block):
    """A block beyond the last, which predicts a token further ahead: a projection that joins hidden states
    and embedding, the block, and the norm before the output."""

    module: ClassVar[str] = "titancli.models.blocks.mtp:MTPBlock"
    mtp: ClassVar[bool] = True

    @classmethod
    def of(cls, block: Block) -> MTPBlock:
        """Return an MTP block that is otherwise like another block."""
        return cls(**{one.name: getattr(block, one.name) for one in fields(block)})


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Embedding, blocks named `layers.0` and on, a norm, and an output over the vocabulary.

    The last blocks may be those of multi-token prediction, which stand between the norm and the output.
    """

    dim: int
    vocab_size: int
    blocks: tuple[Block, ...]
    tied: bool = False
    """Whether the output uses the embedding's weight."""
    norm: Norm = field(default_factory=Norm)
    embedding_scale: float = 1.0
    """The factor of embeddings, rounded to their own dtype."""
    scales_within_embedding: bool = False
    """Whether that factor is a part of the embedding, as transformers has it (Gemma): noise on embeddings is
    added after it, where it is otherwise multiplied by it (Granite)."""
    logit_scale: float = 1.0
    """The factor of logits."""
    logit_cap: float | None = None
    """Scaled logits x become cap · tanh(x / cap); None: they stay as they are."""
    output_bias: bool = False
