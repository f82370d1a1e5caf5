"""The decoder that most families are: embedding, pre-norm blocks, norm, output.

Single-device code: it says what can be split, and the `decoder` plan splits it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from titancli.models.blocks.cache import KVCache, LayerCache
from titancli.models.blocks.feed_forward import FeedForward
from titancli.models.blocks.head import Output
from titancli.models.blocks.init import fill, normal_, ones_, trunc_normal_
from titancli.models.blocks.masks import document_masks
from titancli.models.blocks.moe import Experts, MoE, moe_layers
from titancli.models.blocks.rope import rotation

if TYPE_CHECKING:
    from titancli.data.batch import Batch
    from titancli.distributed.local import RowCut
    from titancli.losses.result import LossResult
    from titancli.protocols import Loss


class Sizes(Protocol):
    """What every family's config has."""

    @property
    def dim(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def tied(self) -> bool: ...


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self, dim: int, norm_eps: float, attention: nn.Module, feed_forward: FeedForward | MoE
    ) -> None:
        """`attention`: called as `titancli.models.blocks.attention.Attention` is."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        # Under names that say which it is: patterns for one should not match the other.
        self.moe = feed_forward if isinstance(feed_forward, MoE) else None
        self.feed_forward = feed_forward if isinstance(feed_forward, FeedForward) else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache | None = None
    ) -> Tensor:
        """[B, S, dim] -> [B, S, dim]."""
        x, normed = self.attention_branch(x, cos, sin, mask, cache)
        for branch in (self.moe, self.feed_forward):
            if branch is not None:
                x = x + branch(normed)
        return x

    def parts(self) -> list[tuple[nn.Module, str]]:
        """The methods that are compiled, and run again in backward, each for itself."""
        if self.moe is None:
            return [(self, "forward")]
        return [(self, "attention_branch"), *self.moe.parts()]

    def attention_branch(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and the same normed."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask, cache)
        return x, self.ffn_norm(x)


class Decoder(nn.Module):
    """A decoder of blocks; a family gives the blocks and the rotary frequencies."""

    row_cut: RowCut | None = None
    """Set by context parallel: how rows are cut over ranks."""
    inputs = ("tokens", "positions", "document_ids")
    sequence_dim: ClassVar = {"tokens": 1, "positions": 1}
    tensor_plan: ClassVar = {
        "tok_embeddings.weight": "vocab",
        "layers.*.attention.w[qkv].weight": "column",
        "layers.*.attention.w[qkv].bias": "column",
        "layers.*.attention.wo.weight": "row",
        "layers.*.attention.wo.bias": "row",
        "layers.*.attention.sinks": "column",
        "layers.*.feed_forward.w[13].weight": "column",
        "layers.*.feed_forward.w2.weight": "row",
        "layers.*.moe.router.gate.*": "replicate",
        "layers.*.moe.experts.*": "expert",
        "layers.*.moe.shared_experts.w[13].weight": "column",
        "layers.*.moe.shared_experts.w2.weight": "row",
        "layers.*_norm.weight": "norm",
        "norm.weight": "norm",
        "output.weight": "vocab",
    }

    def __init__(
        self, config: Sizes, block: Callable[[int], Block], frequencies: Callable[[], Tensor]
    ) -> None:
        """
        Args:
            block: makes the block of a number.
            frequencies: gives the rotary frequencies, [head_dim / 2] fp32 on the CPU.
        """
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): block(i) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Output(config.dim, config.vocab_size)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        self._make_frequencies = frequencies
        self._frequencies: Tensor | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        batch: Batch | None = None,
        loss: Loss | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | LossResult:
        """Logits [B, S, V], or a LossResult when a loss is given; with a cache the last token's, [B, 1, V].

        A pipeline stage lacks modules (None): it is given the hidden states of the stage before it instead of
        tokens, with positions, and returns hidden states if it is not the last.

        Args:
            tokens: [B, S] int64.
            positions: [B, S] int64; None counts from 0 in every row.
            document_ids: [B, S]; None means that a row is one document.
            batch: what the loss is computed on.
            loss: computed inside the output module.
            cache: holds the tokens before these, and is given these; it knows their positions, so `positions`
                and `document_ids` stay None.
        """
        if cache is not None:
            return self._continue(tokens, cache)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        pieces = None
        if self.row_cut is not None and document_ids is not None:
            pieces = self.row_cut.queries(document_ids.shape[1])
        mask = document_masks(document_ids, pieces)
        angles = self.angles(positions)
        hidden = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for block in self.layers.values():
            attention: Any = block.attention
            hidden = block(hidden, *angles[attention.angles], mask(attention.reach))
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.output is None else self.output(hidden, batch, loss)

    def new_cache(self, length: int, padding: Tensor | None = None) -> KVCache:
        """An empty cache for `forward(tokens, cache=…)`; see `KVCache`."""
        return KVCache(self.layers, length, padding)

    def _continue(self, tokens: Tensor, cache: KVCache) -> Tensor:
        positions, mask = cache.advance(tokens.shape[1], tokens.device)
        angles = self.angles(positions)
        hidden = self.tok_embeddings(tokens)
        for name, block in self.layers.items():
            attention: Any = block.attention
            hidden = block(hidden, *angles[attention.angles], mask(attention.reach), cache.layers[name])
        return self.output(self.norm(hidden[:, -1:]))

    def angles(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """What tells attention where tokens are, by the name under which a layer asks for it: for "rope" cos
        and sin, [B or 1, S, 1, head_dim / 2] fp32, of positions [B or 1, S]."""
        return {"rope": rotation(positions, self._rope_frequencies(positions.device))}

    def _rope_frequencies(self, device: torch.device) -> Tensor:
        # Not a buffer: that would be garbage after construction on meta, and cast with the parameters.
        if self._frequencies is None or self._frequencies.device != device:
            self._frequencies = self._make_frequencies().to(device)
        return self._frequencies

    # ------------------------------------------------------------------------------------------ experts

    @property
    def experts(self) -> dict[str, nn.Module]:
        """The routed experts of every layer that has some."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Experts)}

    def token_counts(self) -> dict[str, Tensor]:
        """How many tokens each expert has been trained on since the last step, on this rank: [E] int64 by
        layer."""
        return {name: layer.token_counts() for name, layer in moe_layers(self).items()}

    def forget_token_counts(self) -> None:
        """Begin to count anew."""
        for layer in moe_layers(self).values():
            layer.forget_counts()

    def after_step(self, counts: Mapping[str, Tensor]) -> None:
        """Balance the experts; `counts` are those of all ranks."""
        for name, layer in moe_layers(self).items():
            layer.balance(counts[name])

    # ------------------------------------------------------------------------------------------- values

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Matrices N(0, 0.02), those that end a branch scaled down with depth; norms 1; biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                ones_(parameter)
            elif name.endswith("bias"):
                fill(parameter, lambda whole: whole.zero_())
            elif name == "tok_embeddings.weight":
                # A tied embedding is the output's matrix as well, and must give logits of unit scale.
                std = self.config.dim**-0.5 if self.config.tied else 1.0
                normal_(parameter, std, generator_for(name))
            elif name == "output.weight":
                trunc_normal_(parameter, self.config.dim**-0.5, generator_for(name))
            else:
                trunc_normal_(parameter, _std(name), generator_for(name))
        for layer in moe_layers(self).values():
            layer.clear_bias()

    def flops_per_token(self, seq_len: int) -> float:
        """6 per matrix weight that a token meets, and in every layer 6 · heads · (head_dim + value_dim) ·
        seq_len, or as many tokens as it sees at most.

        Source: PaLM (arXiv 2204.02311), appendix B.
        """
        matrices = float(sum(p.numel() for p in self.parameters()))
        if not self.config.tied:
            matrices -= self.tok_embeddings.weight.numel()
        for layer in moe_layers(self).values():
            idle = 1 - layer.config.top_k / layer.config.num_experts
            matrices -= idle * sum(p.numel() for p in layer.experts.parameters())
        layers: list[Any] = [block.attention for block in self.layers.values()]
        seen = sum((a.head_dim + a.value_dim) * min(seq_len, a.reach.most or seq_len) for a in layers)
        return 6.0 * matrices + 6.0 * self.config.n_heads * seen


def _std(name: str) -> float:
    layer = int(name.split(".")[1])
    ends_branch = re.search(r"\.(wo|w2|w3)(\.weight)?$", name)
    return 0.02 / (2 * (layer + 1)) ** 0.5 if ends_branch else 0.02
