"""The decoder of most families: embedding, blocks, norm, output.

Single-device code: it declares what can be split, and the `decoder` plan splits it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from titancli.models.blocks.cache import Extension, KVCache, keeps_cache
from titancli.models.blocks.declared import declared
from titancli.models.blocks.head import Output
from titancli.models.blocks.init import normal_, ones_, trunc_normal_, zeros_
from titancli.models.blocks.masks import document_masks
from titancli.models.blocks.moe import Experts, MoE, moe_layers
from titancli.models.blocks.mtp import MTPBlock, further, padding_ahead
from titancli.models.blocks.norm import norm_of
from titancli.models.blocks.rope import frequencies, rotation
from titancli.protocols import Routing, shape

if TYPE_CHECKING:
    from titancli.distributed.local import RowCut
    from titancli.models.sections import Sizes
    from titancli.protocols import Loss
    from titancli.protocols.batch import Batch
    from titancli.protocols.result import LossResult


class Decoder(nn.Module):
    """A decoder of blocks, built from its config's `titancli.protocols.shape.Decoder`."""

    row_cut: RowCut | None = None
    """How rows are split over ranks; set by context parallelism."""
    inputs: tuple[str, ...] = ("tokens", "positions", "document_ids", "routes", "padding")
    sequence_dim: ClassVar = {"tokens": 1, "positions": 1, "routes": 1, "padding": 1}
    styles: ClassVar = {"tok_embeddings": "vocab", "output": "vocab"}

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.config = config
        self.shape = config.shape()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        if self.shape.scales_within_embedding:
            vars(self.tok_embeddings)["later_factor"] = self.shape.embedding_scale
        self.layers = nn.ModuleDict({str(i): spec.build() for i, spec in enumerate(self.shape.blocks)})
        self.norm = norm_of(self.shape.norm, config.dim)
        self.output = Output(config.dim, config.vocab_size, bias=self.shape.output_bias)
        self.output.scale, self.output.cap = self.shape.logit_scale, self.shape.logit_cap
        self.output.mtp_loss_weight = getattr(config, "mtp_loss_weight", 0.0)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        if lacking := self._without_cache():
            self.new_cache, self.why_no_cache = None, lacking  # type: ignore[assignment, method-assign]
        self._frequencies: dict[shape.Rope, Tensor] = {}
        # Declared now: converters may add parameters later, and a pipeline stage has only some.
        self.tensor_plan, self.roles = declared(self, "styles"), declared(self, "roles")
        self._active = self._active_parameters()
        routers = {name: block.moe for name, block in self._main.items() if _has_experts(block)}
        self._routed = {name: number for number, name in enumerate(routers)}
        """The blocks with experts, and where in `routes` their own are."""
        kinds = {(layer.config.top_k, layer.config.num_experts) for layer in routers.values()}
        self.routing = Routing(len(routers), *kinds.pop()) if len(kinds) == 1 else None
        if not moe_layers(self):  # nothing else counts tokens
            self.inputs = tuple(name for name in self.inputs if name != "padding")

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        routes: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        batch: Batch | None = None,
        loss: Loss | None = None,
        cache: Extension | None = None,
    ) -> Tensor | LossResult:
        """Return logits [B, S, V], or a LossResult if a loss is given; with a cache, the logits of the last
        token of each row, [R, V].

        A pipeline stage lacks modules (None): its `tokens` are the hidden states of the previous stage, with
        positions, and unless it is the last, it returns hidden states.

        Args:
            tokens: [B, S] int64.
            positions: [B, S] int64; None counts from 0 in every row.
            document_ids: [B, S]; None means that a row is one document.
            routes: [B, S, layers, top_k]; see `titancli.protocols.ModelDefaults.routing`.
            padding: [B, S] bool, the tokens that routers do not count; None: there are none.
            batch: the batch that the loss is computed on.
            loss: computed inside the output module.
            cache: what `KVCache.extend` returned for the rows whose tokens these are, [1, N]; it knows their
                positions, so `positions` and `document_ids` stay None.
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
        hidden = tokens
        embedded: list[Tensor] = []
        uncounted: list[Tensor] = []
        if batch is not None and (steps := self._steps_ahead(loss)):
            ahead = [self._my_part(further(batch["tokens"], step, 0)) for step in steps]
            uncounted = [self._my_part(padding_ahead(batch, step)) for step in steps]
            # A single look-up for all, so that FSDP2 gathers the embeddings once.
            hidden, *embedded = self._embedded(torch.cat((tokens, *ahead))).split(len(tokens))
        elif self.tok_embeddings is not None:
            hidden = self._embedded(tokens)
        for name, block in self._main.items():
            attention: Any = block.attention
            for_experts = {}
            if routes is not None and name in self._routed:
                for_experts["routes"] = routes[:, :, self._routed[name]]
            if padding is not None and name in self._routed:
                for_experts["padding"] = padding
            given = (*angles[attention.angles], mask(attention.reach, hidden.dtype))
            hidden = block(hidden, *given, **for_experts)
        if self.norm is not None:
            hidden = self.norm(hidden)
        predicted = [hidden]
        for block, tokens_ahead, not_counted in zip(self._mtp, embedded, uncounted, strict=False):
            attention = block.attention
            given = (*angles[attention.angles], mask(attention.reach, hidden.dtype))
            predicted.append(block(predicted[-1], *given, embedded=tokens_ahead, padding=not_counted))
        if self.output is None:
            return hidden
        # Without gradients, the blocks have only counted tokens per expert.
        return self.output(hidden, batch, loss, predicted[1:] if torch.is_grad_enabled() else ())

    def _embedded(self, tokens: Tensor) -> Tensor:
        found, scale = self.tok_embeddings(tokens), self.shape.embedding_scale
        return found if scale == 1.0 else found * found.new_full((), scale)

    @property
    def _main(self) -> dict[str, Any]:
        """The blocks that predict the next token, by name."""
        return {name: block for name, block in self.layers.items() if not isinstance(block, MTPBlock)}

    @property
    def _mtp(self) -> list[Any]:
        """The multi-token prediction blocks, each predicting one token further than the previous."""
        return [block for block in self.layers.values() if isinstance(block, MTPBlock)]

    def _steps_ahead(self, loss: Loss | None) -> range:
        """Return how far ahead each multi-token prediction block reads; empty if no loss is trained."""
        layers = self._mtp
        counted = any(layer.counting is not None for layer in moe_layers(self).values()) if layers else False
        trained = loss is not None and (torch.is_grad_enabled() or counted)
        return range(1, len(layers) + 1) if trained else range(0)

    def _my_part(self, rows: Tensor) -> Tensor:
        return rows if self.row_cut is None else self.row_cut.cut(rows, 1)

    def _without_cache(self) -> str:
        """Return which block or mixer does not continue rows; "" if each does."""
        for name, block in self._main.items():
            for path, module in ((f"layers.{name}", block), (f"layers.{name}.attention", block.attention)):
                if not keeps_cache(module):
                    return f"{path} ({type(module).__name__}) does not declare keeps_cache = True"
        return ""

    def new_cache(self) -> KVCache:
        """Return an empty cache, whose rows `forward(tokens, cache=…)` extends; see `KVCache`."""
        return KVCache({name: block.attention for name, block in self._main.items()})

    def _continue(self, tokens: Tensor, cache: Extension) -> Tensor:
        angles = self.angles(cache.positions)
        hidden = self._embedded(tokens)
        for name, block in self._main.items():
            attention: Any = block.attention
            hidden = block(hidden, *angles[attention.angles], None, cache.of(name))
        logits: Tensor = self.output(self.norm(hidden[:, cache.last]))
        return logits[0]

    def angles(self, positions: Tensor) -> dict[Any, tuple[Tensor, Tensor]]:
        """Return the position encodings for positions [B or 1, S], by the keys that layers use: cosine and
        sine of a `titancli.protocols.shape.Rope`, [B or 1, S, 1, dim / 2] fp32; or the factor of queries,
        [B or 1, S, 1, 1] fp32, twice; or the positions themselves, twice."""
        layers: list[Any] = [block.attention for block in self.layers.values()]
        # Layers without position encodings, and with their own.
        found: dict[Any, Any] = {None: (None, None), shape.POSITIONS: (positions, positions)}
        for one in dict.fromkeys(layer.angles for layer in layers if layer.angles not in found):
            rope = isinstance(one, shape.Rope)
            found[one] = self._rotation(one, positions) if rope else _scale(one, positions)
        return found

    def _rotation(self, rope: shape.Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Not a buffer: that would be uninitialized after construction on meta, and cast with the parameters.
        known = self._frequencies.get(rope)
        if known is None or known.device != positions.device:
            known = self._frequencies[rope] = frequencies(rope).to(positions.device)
        cos, sin = rotation(positions, known)
        return (cos, sin) if rope.length == 1.0 else (cos * rope.length, sin * rope.length)

    # ------------------------------------------------------------------------------------------ experts

    @property
    def experts(self) -> dict[str, nn.Module]:
        """The routed experts of every layer that has any."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Experts)}

    def token_counts(self) -> dict[str, Tensor]:
        """Return the tokens per expert trained on since the last step, on this rank: [E] int64 by layer."""
        return {name: layer.token_counts() for name, layer in moe_layers(self).items()}

    def forget_token_counts(self) -> None:
        """Reset the token counts."""
        for layer in moe_layers(self).values():
            layer.forget_counts()

    def after_step(self, counts: Mapping[str, Tensor]) -> None:
        """Balance the experts; `counts` are summed over all ranks."""
        for name, layer in moe_layers(self).items():
            layer.balance(counts[name])

    # ------------------------------------------------------------------------------------------- values

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Initialize all parameters: matrices N(0, 0.02), those at the end of a branch scaled down with
        depth; norms 1; biases 0; and modules with `init_own` by that."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                ones_(parameter)
            elif name.endswith("bias"):
                zeros_(parameter)
            elif name == "tok_embeddings.weight":
                # A tied embedding is also the output's matrix, and must give logits of unit scale.
                std = self.config.dim**-0.5 if self.config.tied else 1.0
                normal_(parameter, std, generator_for(name))
            elif name == "output.weight":
                trunc_normal_(parameter, self.config.dim**-0.5, generator_for(name))
            else:
                trunc_normal_(parameter, _std(name), generator_for(name))
        for path, module in self.named_modules():
            if (init_own := getattr(module, "init_own", None)) is not None:
                init_own(partial(_within, generator_for, path))
        for layer in moe_layers(self).values():
            layer.clear_bias()

    def _active_parameters(self) -> int:
        """Return the number of parameters active for one token, without the embedding (a look-up)."""
        layers = moe_layers(self).values()
        shares = {id(p): layer.active_share for layer in layers for p in layer.experts.parameters()}
        size = sum(round(p.numel() * shares.get(id(p), 1.0)) for p in self.layers.parameters())
        again = self.output.weight.numel() * len(self._mtp)
        return size + again + sum(p.numel() for part in (self.norm, self.output) for p in part.parameters())

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for one token: 6 per active parameter, plus 12 · width
        per layer and token of the row for attention (PaLM, arXiv 2204.02311, appendix B)."""
        return 6.0 * self._active + sum(block.attention.flops(seq_len) for block in self.shape.blocks)


def _has_experts(block: Any) -> bool:
    return isinstance(getattr(block, "moe", None), MoE)


def _scale(temperature: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    # Left padding has negative positions, which would have no logarithm.
    steps = ((positions.clamp(min=0) + 1) // temperature.floor_scale).float()
    scale = (steps.log1p() * temperature.attn_scale + 1)[..., None, None]
    return scale, scale


def _within(generator_for: Callable[[str], torch.Generator], path: str, name: str) -> torch.Generator:
    return generator_for(f"{path}.{name}")


def _std(name: str) -> float:
    layer = int(name.split(".")[1])
    ends_branch = re.search(r"\.(wo|w2|w3)(\.weight)?$", name)
    return 0.02 / (2 * (layer + 1)) ** 0.5 if ends_branch else 0.02


def build(config: Sizes, *, seq_len: int) -> Decoder:
    """Build the model on the current device, without initializing it."""
    return Decoder(config)
