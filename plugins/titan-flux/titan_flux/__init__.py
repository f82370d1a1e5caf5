"""FLUX.1: a model, two datasets, a loss. This file has the configs and imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MinLen, MultipleOf

from titancli import Command, component, hookimpl
from titancli.registry.component import section

if TYPE_CHECKING:
    from titancli import Recipe


@component("model", "flux", target="titan_flux.model:build", hf="titan_flux.hf:FluxHF")
class Flux:
    """FLUX.1: a rectified-flow transformer that predicts the velocity from noise to image.

    Source: the release of Black Forest Labs, https://github.com/black-forest-labs/flux; the architecture
    follows arXiv 2403.03206, with single-stream blocks as in arXiv 2302.05442. The defaults are those of
    FLUX.1 [schnell].
    """

    mesh_degrees: ClassVar[tuple[str, ...]] = ("dp_replicate", "dp_shard")
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "flux-dev": dict(guidance_embed=True),
        "flux-schnell": dict(guidance_embed=False),
        "flux-debug": dict(
            dim=64,
            n_heads=4,
            double_blocks=2,
            single_blocks=2,
            axes_dim=[4, 6, 6],
            in_channels=16,
            context_dim=32,
            pooled_dim=16,
            guidance_embed=True,
        ),
    }

    dim: Annotated[int, Gt(0)] = 3072
    """Width of both streams."""
    n_heads: Annotated[int, Gt(0)] = 24
    """Number of attention heads."""
    double_blocks: Annotated[int, Ge(0)] = 19
    """Number of double-stream blocks: text and image have separate weights and share attention."""
    single_blocks: Annotated[int, Ge(0)] = 38
    """Number of single-stream blocks after them."""
    mlp_ratio: Annotated[float, Gt(0)] = 4.0
    """Hidden dimension of a feed-forward block, as a multiple of dim."""
    axes_dim: tuple[int, int, int] = (16, 56, 56)
    """Dimensions of a head that RoPE assigns to each axis of a token's position: none, row, column."""
    rope_theta: Annotated[float, Gt(0)] = 10_000.0
    """Base of the rotary frequencies."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""
    in_channels: Annotated[int, Gt(0)] = 64
    """Channels of an image token: 2 x 2 positions of a latent with 16 channels."""
    context_dim: Annotated[int, Gt(0)] = 4096
    """Width of the text embeddings (T5)."""
    pooled_dim: Annotated[int, Gt(0)] = 768
    """Width of the pooled text embedding (CLIP)."""
    guidance_embed: bool = False
    """Whether the guidance strength is an input of the model, as in the guidance-distilled variant."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        width = sum(self.axes_dim)
        if width * self.n_heads != self.dim:
            yield "axes_dim", f"n_heads {self.n_heads} times sum(axes_dim) {width} must equal dim {self.dim}"
        if any(axis <= 0 or axis % 2 for axis in self.axes_dim):
            yield (
                "axes_dim",
                (f"rotary embedding rotates pairs: {list(self.axes_dim)} must be even and greater than 0"),
            )
        if not self.double_blocks + self.single_blocks:
            yield "double_blocks", "a model needs at least one block"


@section
class Noised:
    """Fields of both datasets of latents: how noise is added to each sample."""

    needs_tokenizer: ClassVar[bool] = False

    timesteps: Literal["logit_normal", "uniform"] = "logit_normal"
    """Distribution of timesteps between 0 (clean) and 1 (noise); the sigmoid of a normal variable favors the
    middle (arXiv 2403.03206)."""
    shift: Annotated[float, Gt(0)] = 1.0
    """Map timesteps t to shift·t / (1 + (shift - 1)·t). Values above 1 shift them towards noise; larger
    images need more."""
    text_dropout: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability that a sample's text is replaced by the empty text, for classifier-free guidance."""
    guidance: Annotated[float, Ge(0)] | None = None
    """Guidance strength for a model with `guidance_embed`; 1.0 or 3.5 are usual for fine-tuning FLUX.1
    [dev]."""
    shuffle: bool = True
    """Shuffle samples by (training.seed, epoch); false: keep their order."""
    repeat: bool = True
    """Start over at the end of the data, as often as needed; false: end the run there."""


@component("dataset", "latents", target="titan_flux.data:build_latents")
class Latents(Noised):
    """Images and texts encoded in advance, in safetensors shards; no encoder is run.

    A shard holds three tensors of N samples, in float32, bfloat16 or float16: `latents` [N, C, H, W] (H and
    W even), `text` [N, T, context_dim], and `pooled` [N, pooled_dim].
    """

    paths: Annotated[list[Path], MinLen(1)]
    """Shards, folders (all non-hidden files in them) and globs (`"shards/**/*.safetensors"`)."""
    empty: Path | None = None
    """Shard with one sample, whose text is used as the empty text, for `text_dropout`."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.text_dropout > 0 and self.empty is None:
            yield "text_dropout", 'the empty text is needed: set empty = "empty.safetensors"'
        if self.text_dropout == 0 and self.empty is not None:
            yield "empty", "it is not used, because text_dropout is 0"


@component("dataset", "random_latents", target="titan_flux.data:build_random")
class RandomLatents(Noised):
    """Random latents, to try a recipe or measure its speed; the empty text is all zeros."""

    count: Annotated[int, Gt(0)] = 64
    """Number of distinct samples."""
    channels: Annotated[int, Gt(0)] = 16
    """Number of channels of a latent."""
    height: Annotated[int, Gt(0), MultipleOf(2)] = 128
    """Height of a latent; one position covers 8 x 8 pixels of the image."""
    width: Annotated[int, Gt(0), MultipleOf(2)] = 128
    """Width of a latent."""
    text_length: Annotated[int, Gt(0)] = 512
    """Text length, in tokens."""
    context_dim: Annotated[int, Gt(0)] = 4096
    """Width of the text embeddings."""
    pooled_dim: Annotated[int, Gt(0)] = 768
    """Width of the pooled text embedding."""


@component("loss", "flow_matching", target="titan_flux.loss:FlowMatching")
class FlowMatching:
    """Mean squared error of the velocity, from noise to image along a straight line (rectified flow).

    Source: arXiv 2209.03003 and 2210.02747.
    """


@hookimpl
def titan_components() -> list[type]:
    return [Flux, Latents, RandomLatents, FlowMatching]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command("flux-encode", "Encode images and texts to shards of latents.", "titan_flux.encode:command")
    ]


@hookimpl
def titan_recipes() -> Path:
    return Path(__file__).parent / "recipes"


@hookimpl
def titan_checks(recipe: Recipe) -> list[tuple[str, str]]:
    """Return further requirements of a recipe that trains flux."""
    return list(_faults(recipe)) if isinstance(recipe.model, Flux) else []


def _faults(recipe: Recipe) -> Iterator[tuple[str, str]]:
    dataset = recipe.dataset
    if type(recipe.loss).__module__.startswith("titancli."):
        yield "loss", 'flux returns velocities, not log-probabilities: set loss = "flow_matching"'
    if dataset is None or dataset.needs_tokenizer:
        yield "dataset", 'flux needs latents, but this dataset returns text: set type = "latents"'
    elif isinstance(dataset, Noised):
        if recipe.model.guidance_embed and dataset.guidance is None:
            yield "dataset", "this model needs a guidance strength: set guidance = 1.0"
        if dataset.guidance is not None and not recipe.model.guidance_embed:
            yield "dataset.guidance", "this model has no guidance input: remove it, or use flux-dev"


__all__ = ["FlowMatching", "Flux", "Latents", "RandomLatents"]
