"""What a decoder is made of, as plain data: what its modules are built from. Torch-free.

A family's config has a method `layer(number)` that returns a `Block`; `shape()` is the `Decoder` of them all,
which `titancli.models.blocks.decoder` builds. An option of a layer is a field here, which its module reads:
each spec names the class of its module, which is called with the spec. A plugin may derive specs of its own.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

from titancli.registry.component import load_target


def _need(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


@dataclass(frozen=True)
class Norm:
    """A norm over the numbers of a token or of a head: `titancli.models.blocks.norm`."""

    eps: float = 1e-5
    kind: Literal["rms", "layer"] = "rms"
    """Divided by the root of the mean square (arXiv 1910.07467), or standardised (arXiv 1607.06450)."""
    bias: bool = False
    """Whether a bias is added, which only "layer" has."""
    zero_centred: bool = False
    """Whether it multiplies by 1 + weight, which only "rms" does."""

    def __post_init__(self) -> None:
        layer = self.kind == "layer"
        _need(layer or not self.bias, "only LayerNorm has a bias")
        _need(not (layer and self.zero_centred), "LayerNorm multiplies by its weight")


@dataclass(frozen=True)
class Rope:
    """Rotary positions."""

    dim: int
    """Numbers of a query or key that are rotated."""
    theta: float
    scaling: Any = None
    """How frequencies are stretched: a section of `titancli.models.sections`; None: they are not."""
    length: float = 1.0
    """Factor of cosine and sine."""


# ------------------------------------------------------------------------------------------ parts of a block


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a part of a block is built from."""

    module: ClassVar[str]
    """Class of the module, as "package.module:Class"."""
    dim: int
    """Width of the residual stream."""

    def build(self) -> Any:
        """Return the module on the current device, without initial values."""
        return load_target(self.module)(self)


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
    """Which products have a bias."""
    qk_norm: Literal["", "head", "whole"] = ""
    """Whether queries and keys pass through a norm of their own: each head's numbers, with weights that heads
    share, or those of all heads together."""
    norm: Norm = field(default_factory=Norm)
    """Of queries and keys."""
    norm_after: bool = False
    """Whether queries and keys, once rotated, pass through a norm without weights."""
    window: int | None = None
    """Tokens that a token sees at most, itself included; None: the whole row before it."""
    chunk: int | None = None
    """A token sees only its own chunk of so many; None: there are no chunks."""
    temperature: Any = None
    """By what queries are multiplied, given their positions, where nothing is rotated: a
    `titancli.models.sections.AttnTemperature`."""
    scale: float | None = None
    """By what products of queries and keys are multiplied; None: 1 / √head_dim."""
    cap: float | None = None
    """Scaled products x become cap · tanh(x / cap) (arXiv 2408.00118); None: they stay as they are."""
    sinks: bool = False
    """Whether each head has a logit that takes its share of the softmax and gives nothing."""
    gated: bool = False
    """Whether what a head gives is multiplied by the sigmoid of a gate, which `wq` makes beside the query."""

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
        """Return which of the decoder's `angles` it is given."""
        return self.temperature or self.rope

    def most(self, seq_len: int) -> int:
        """Tokens that any token of a row so long sees at most."""
        return min(seq_len, self.window or seq_len, self.chunk or seq_len)

    def flops(self, seq_len: int) -> float:
        """Forward and backward of one token, its matrices left out."""
        return 6.0 * self.heads * (self.head_dim + self.value_dim) * self.most(seq_len)


@dataclass(frozen=True, kw_only=True)
class Latent(Attention):
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads are made from one narrow
    vector of each token, which all rotated parts of keys are beside."""

    module: ClassVar[str] = "titancli.models.blocks.latent:LatentAttention"
    query_rank: int | None = None
    """Width of the latent that queries are made from; None: from the stream."""
    kv_rank: int
    """Width of the latent that keys and values are made from."""
    width: int
    """Numbers of a head's value."""
    norm: Norm = field(default_factory=lambda: Norm(1e-6))
    """Of the latents, whatever the model's other norms have: as in DeepSeek's own code."""

    def __post_init__(self) -> None:
        options = [one for one in fields(Attention) if one.default is not MISSING and one.name != "scale"]
        if wrong := [one.name for one in options if getattr(self, one.name) != one.default]:
            raise ValueError(f"latent attention has no {', '.join(wrong)}")

    @property
    def value_dim(self) -> int:
        return self.width

    @property
    def nope_dim(self) -> int:
        """Numbers of a head's query and key that are not rotated."""
        return self.head_dim - self.rope.dim


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Spec):
    """A gated DeltaNet layer (arXiv 2412.06464): each head of values keeps a matrix of `key_dim` x
    `value_dim`."""

    module: ClassVar[str] = "titancli.models.blocks.delta:GatedDeltaNet"
    key_heads: int
    heads: int
    """Of values."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution covers."""
    norm_eps: float

    @property
    def mixed(self) -> int:
        """Numbers of a token that pass the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def flops(self, seq_len: int) -> float:
        """Forward and backward of one token, its matrices left out: a head's matrix is read twice and written
        once. Products of chunks, which do the same in another order, are more."""
        return 18.0 * self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class FeedForward(Spec):
    """`w2(act(w1 x) * w3 x)` (arXiv 2002.05202) or, without a gate, `w2(act(w1 x))`."""

    module: ClassVar[str] = "titancli.models.blocks.feed_forward:FeedForward"
    hidden: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """"gelu_tanh" is the approximation of GELU by tanh (arXiv 1606.08415, section 2)."""
    gated: bool = True
    bias: bool = False
    """Whether its products have one."""


@dataclass(frozen=True, kw_only=True)
class Experts(Spec):
    """A feed-forward layer of which each token visits `top_k` of the experts, and all of the shared ones.

    Tensor parallelism cuts the shared alone: to the others each rank brings its own part of the row.
    """

    module: ClassVar[str] = "titancli.models.blocks.moe:MoE"
    routing: Any
    """How many there are, of what width, and how they are chosen: a `titancli.models.sections.MoE`."""
    joined: bool = False
    """Whether the two matrices that an expert begins with are one."""
    clamped: tuple[float, float] | None = None
    """alpha and limit of joined experts that have biases, and whose two halves are clamped (arXiv
    2508.10925)."""
    shared_gate: bool = False
    """Whether what the shared experts make of a token is multiplied by a sigmoid of it."""

    def __post_init__(self) -> None:
        _need(self.joined or self.clamped is None, "clamped experts are joined")

    @property
    def shared(self) -> FeedForward | None:
        """Shared experts are one of so many times the width."""
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
    attention: Attention | DeltaNet
    feed_forward: FeedForward | Experts
    norm: Norm = field(default_factory=Norm)
    norms: Literal["before", "after", "both"] = "before"
    """What is normed of attention and feed-forward: what each is given, what it returns (OLMo 2, arXiv
    2501.00656), or both."""
    parallel: bool = False
    """Whether both are given the same, by one norm, and are added together (arXiv 2204.02311)."""
    residual_scale: float = 1.0
    """By what each branch is multiplied before it is added."""

    def __post_init__(self) -> None:
        _need(not (self.parallel and self.norms == "after"), "parallel branches are normed before")

    @property
    def norm_names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = ("attention_norm",) if self.parallel else ("attention_norm", "ffn_norm")
        return (*names, "attention_post_norm", "ffn_post_norm") if self.norms == "both" else names


@dataclass(frozen=True, kw_only=True)
class MTPBlock(Block):
    """A block beyond the last, which predicts a token further ahead: what joins hidden states and embedding,
    the block, and the norm before the output."""

    module: ClassVar[str] = "titancli.models.blocks.mtp:MTPBlock"
    mtp: ClassVar[bool] = True

    @classmethod
    def of(cls, block: Block) -> MTPBlock:
        """Return one that is otherwise like another block."""
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
    """By what embeddings are multiplied, in their own dtype, to which it is rounded."""
    logit_scale: float = 1.0
    """By what logits are multiplied."""
    logit_cap: float | None = None
    """Scaled logits x become cap · tanh(x / cap); None: they stay as they are."""
    output_bias: bool = False
