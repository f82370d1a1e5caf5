"""FLUX.1: the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from titan_flux import Flux
from titan_flux.blocks import (
    EPS,
    TIME_DIM,
    DoubleBlock,
    Features,
    SingleBlock,
    modulated,
    rotation,
    time_features,
)
from titancli import TitanError
from titancli.models.blocks.init import normal_, ones_, uniform_, zeros_

if TYPE_CHECKING:
    from titancli import Batch, LossResult
    from titancli.protocols import Loss

CONDITIONS = ("embedding.time.", "embedding.pooled.", "embedding.guidance.")
"""Parameters applied once per row rather than once per token; so are those named modulation."""


class Embedding(nn.Module):
    """Projects all inputs to the width of the model: one module, so that FSDP2 gathers it at once."""

    def __init__(self, config: Flux) -> None:
        super().__init__()
        self.image = nn.Linear(config.in_channels, config.dim)
        self.text = nn.Linear(config.context_dim, config.dim)
        self.time = Features(TIME_DIM, config.dim)
        self.pooled = Features(config.pooled_dim, config.dim)
        self.guidance = Features(TIME_DIM, config.dim) if config.guidance_embed else None

    def forward(
        self, latents: Tensor, text: Tensor, pooled: Tensor, timesteps: Tensor, guidance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the image [B, S, dim], the text [B, T, dim], and the conditions of all tokens, [B, dim].

        Raises:
            TitanError: an input does not have the model's width, or the guidance is missing.
        """
        widths = (self.image.in_features, self.text.in_features, self.pooled.inner.in_features)
        named = ("latents", "text", "pooled")
        for name, tensor, width in zip(named, (latents, text, pooled), widths, strict=True):
            if tensor.shape[-1] != width:
                raise TitanError(
                    f"the model takes {name} of width {width}, but the dataset returns {tensor.shape[-1]}",
                    hint="in_channels, context_dim and pooled_dim of [model] must match the data",
                )
        vec = self.time(time_features(timesteps)) + self.pooled(pooled)
        if self.guidance is not None:
            if guidance is None:
                raise TitanError("this model needs a guidance strength", hint="write dataset.guidance")
            vec = vec + self.guidance(time_features(guidance))
        # Only here, after FSDP2's gather, do the weights have the compute dtype.
        dtype = self.image.weight.dtype
        return self.image(latents.to(dtype)), self.text(text.to(dtype)), vec


class Output(nn.Module):
    """The last layer, with the loss inside its forward."""

    def __init__(self, config: Flux) -> None:
        super().__init__()
        self.modulation = nn.Linear(config.dim, 2 * config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=EPS, elementwise_affine=False)
        self.linear = nn.Linear(config.dim, config.in_channels)

    def forward(
        self, image: Tensor, vec: Tensor, batch: Batch | None = None, loss: Loss | None = None
    ) -> Tensor | LossResult:
        """Map [B, S, dim] to velocities [B, S, in_channels], or to a LossResult if a loss is given.

        Raises:
            TitanError: the loss needs log-probabilities.
        """
        if loss is not None and loss.output != "model":
            raise TitanError(
                "flux returns velocities, not log-probabilities", hint='set loss = "flow_matching"'
            )
        shift, scale = self.modulation(silu(vec))[:, None].chunk(2, dim=-1)
        velocity = self.linear(modulated(self.norm(image), shift, scale))
        return velocity if loss is None or batch is None else loss(velocity, batch)


class FluxModel(nn.Module):
    """The transformer: double-stream blocks, then single-stream blocks, in one dict by index."""

    sequence_dim: ClassVar = {"latents": 1, "places": 1, "text": 1}
    token_inputs: ClassVar = ("text", "latents")
    tensor_plan: ClassVar[dict[str, Any]] = {}
    roles: ClassVar[dict[str, Any]] = {"embedding.*": "embedding", "*.modulation.*": "modulation"}
    experts: ClassVar[dict[str, nn.Module]] = {}

    def __init__(self, config: Flux) -> None:
        super().__init__()
        self.config = config
        guided = ("guidance",) if config.guidance_embed else ()
        self.inputs: tuple[str, ...] = ("latents", "places", "text", "pooled", "timesteps", *guided)
        hidden = int(config.dim * config.mlp_ratio)
        doubles, singles = config.double_blocks, config.single_blocks
        self.embedding = Embedding(config)
        self.layers = nn.ModuleDict()
        for number in range(doubles + singles):
            self.layers[str(number)] = (
                DoubleBlock(config.dim, config.n_heads, hidden, qkv_bias=config.qkv_bias)
                if number < doubles
                else SingleBlock(config.dim, config.n_heads, hidden)
            )
        self.output = Output(config)

    def forward(
        self,
        latents: Tensor,
        places: Tensor,
        text: Tensor,
        pooled: Tensor,
        timesteps: Tensor,
        guidance: Tensor | None = None,
        *,
        batch: Batch | None = None,
        loss: Loss | None = None,
    ) -> Tensor | LossResult:
        """Return velocities, or a LossResult if a loss is given.

        Args:
            latents: [B, S, in_channels], noisy.
            places: [B, S, 3] integers: 0, row and column of each image token. Text tokens are at (0, 0, 0).
            text: [B, T, context_dim].
            pooled: [B, pooled_dim].
            timesteps: [B] between 0 (clean) and 1 (noise).
            guidance: [B], for a model with guidance as an input.
        """
        config = self.config
        nowhere = places.new_zeros(text.shape[0], text.shape[1], places.shape[2])
        angles = rotation(torch.cat((nowhere, places), dim=1), config.axes_dim, config.rope_theta)
        image, words, vec = self.embedding(latents, text, pooled, timesteps, guidance)
        blocks = list(self.layers.values())
        for block in blocks[: config.double_blocks]:
            image, words = block(image, words, vec, angles)
        hidden = torch.cat((words, image), dim=1)
        for block in blocks[config.double_blocks :]:
            hidden = block(hidden, vec, angles)
        return self.output(hidden[:, text.shape[1] :], vec, batch, loss)

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Initialize every parameter, each from its own generator.

        As in DiT (arXiv 2212.09748), modulations and output layers begin at zero, so that every block begins
        as the identity; matrices are Xavier-uniform, the embeddings of conditions normal.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("_norm.weight"):
                ones_(parameter)
            elif parameter.ndim == 1 or ".modulation." in name or name.startswith("output."):
                zeros_(parameter)
            elif name.startswith(CONDITIONS):
                normal_(parameter, 0.02, generator_for(name))
            else:
                xavier_(parameter, generator_for(name))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token in a row of seq_len text and image tokens: 6 per weight applied to a
        token, a share of those applied once per row, and 12 · blocks · dim · seq_len for attention without a
        mask.

        In a double block, a token passes through the weights of one stream. The text's input projection, a
        thousandth of the total, is ignored, since the model does not know how many of the tokens are text.
        """
        in_row = in_token = 0.0
        for name, parameter in self.named_parameters():
            if ".modulation." in name or name.startswith(CONDITIONS):
                in_row += parameter.numel()
            elif name.startswith("layers.") and (".image." in name or ".text." in name):
                in_token += parameter.numel() / 2
            elif not name.startswith("embedding.text."):
                in_token += parameter.numel()
        attention = 12.0 * len(self.layers) * self.config.dim * seq_len
        return 6.0 * (in_token + in_row / seq_len) + attention


def xavier_(parameter: Tensor, generator: torch.Generator) -> None:
    """Fill with uniform values of variance 2 / (rows + columns)."""
    uniform_(parameter, (6 / sum(parameter.shape)) ** 0.5, generator)


def build(config: Flux, *, seq_len: int) -> FluxModel:
    """Build the model on the current device, without initializing it."""
    return FluxModel(config)
