"""FLUX.1: a model, two datasets, a loss. This file has the configs and imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MinLen, MultipleOf

from titancli import component, hookimpl
from titancli.registry.component import section

if TYPE_CHECKING:
    from titancli import Recipe


@component("model", "flux", target="titan_flux.model:build", hf="titan_flux.hf:FluxHF")
class Flux:
    """FLUX.1: a transformer that says how a noisy image moves towards a clean one.

    Source: the release of Black Forest Labs, https://github.com/black-forest-labs/flux; the architecture
    follows arXiv 2403.03206, with blocks of one stream as in arXiv 2302.05442. The defaults are those of
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
    """Heads of attention."""
    double_blocks: Annotated[int, Ge(0)] = 19
    """Blocks in which text and image have weights of their own and meet in attention."""
    single_blocks: Annotated[int, Ge(0)] = 38
    """Blocks after these, of one stream of both."""
    mlp_ratio: Annotated[float, Gt(0)] = 4.0
    """Width inside a feed-forward block, in multiples of dim."""
    axes_dim: tuple[int, int, int] = (16, 56, 56)
    """How many numbers of a head turn with each part of a token's place: nothing, its row, its column."""
    rope_theta: Annotated[float, Gt(0)] = 10_000.0
    """Base of the rotary frequencies."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""
    in_channels: Annotated[int, Gt(0)] = 64
    """Numbers of an image token: 2 x 2 places of a latent of 16 channels."""
    context_dim: Annotated[int, Gt(0)] = 4096
    """Width of the text's encodings (T5)."""
    pooled_dim: Annotated[int, Gt(0)] = 768
    """Width of the one vector that stands for the text (CLIP)."""
    guidance_embed: bool = False
    """Whether the model is told how strong guidance is, as the guidance-distilled one is."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        width = sum(self.axes_dim)
        if width * self.n_heads != self.dim:
            yield "axes_dim", f"n_heads {self.n_heads} of sum(axes_dim) {width} do not make dim {self.dim}"
        if any(axis <= 0 or axis % 2 for axis in self.axes_dim):
            yield "axes_dim", f"rotary embedding turns pairs: {list(self.axes_dim)} must be even, and above 0"
        if not self.double_blocks + self.single_blocks:
            yield "double_blocks", "a model needs at least one block"


@section
class Noised:
    """What a dataset of latents does with each, fields that both have."""

    needs_tokenizer: ClassVar[bool] = False

    timesteps: Literal["logit_normal", "uniform"] = "logit_normal"
    """How times between 0 (clean) and 1 (noise) are drawn; the sigmoid of a normal number favours the middle
    (arXiv 2403.03206)."""
    shift: Annotated[float, Gt(0)] = 1.0
    """Moves times t to shift·t / (1 + (shift - 1)·t), towards noise above 1: more for larger images."""
    text_dropout: Annotated[float, Ge(0), Le(1)] = 0.0
    """How often a sample's text is replaced by the empty one, for classifier-free guidance."""
    guidance: Annotated[float, Ge(0)] | None = None
    """What a model with `guidance_embed` is told; fine-tuning of FLUX.1 [dev] takes 1.0 or 3.5."""
    shuffle: bool = True
    """Samples come in an order that follows from (training.seed, epoch); false: in the order listed."""
    repeat: bool = True
    """Begin again at the end, as often as needed; false: the data's end ends the run."""


@component("dataset", "latents", target="titan_flux.data:build_latents")
class Latents(Noised):
    """Images and texts that were encoded beforehand, in safetensors shards; no encoder is run.

    A shard holds three tensors of N samples, in float32, bfloat16 or float16: `latents` [N, C, H, W] (H and
    W even), `text` [N, T, context_dim], and `pooled` [N, pooled_dim].
    """

    paths: Annotated[list[Path], MinLen(1)]
    """Shards, folders (every file in them, hidden ones excepted) and globs (`"shards/**/*.safetensors"`)."""
    empty: Path | None = None
    """A shard of one sample, of which the text alone is read: the empty one, for `text_dropout`."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.text_dropout > 0 and self.empty is None:
            yield "text_dropout", 'the empty text is needed: write empty = "empty.safetensors"'
        if self.text_dropout == 0 and self.empty is not None:
            yield "empty", "nothing is replaced by it: text_dropout is 0"


@component("dataset", "random_latents", target="titan_flux.data:build_random")
class RandomLatents(Noised):
    """Latents made up of random numbers, to try a recipe or measure its speed; the empty text is zeros."""

    count: Annotated[int, Gt(0)] = 64
    """Different samples."""
    channels: Annotated[int, Gt(0)] = 16
    """Of a latent."""
    height: Annotated[int, Gt(0), MultipleOf(2)] = 128
    """Of a latent; a pixel of it is 8 x 8 of the image's."""
    width: Annotated[int, Gt(0), MultipleOf(2)] = 128
    """Of a latent."""
    text_length: Annotated[int, Gt(0)] = 512
    """Tokens of the text."""
    context_dim: Annotated[int, Gt(0)] = 4096
    """Width of the text's encodings."""
    pooled_dim: Annotated[int, Gt(0)] = 768
    """Width of the text's one vector."""


@component("loss", "flow_matching", target="titan_flux.loss:FlowMatching")
class FlowMatching:
    """Mean squared error of the velocity, from noise to image along a straight line (rectified flow).

    Source: arXiv 2209.03003 and 2210.02747.
    """


@hookimpl
def titan_components() -> list[type]:
    return [Flux, Latents, RandomLatents, FlowMatching]


@hookimpl
def titan_recipes() -> Path:
    return Path(__file__).parent / "recipes"


@hookimpl
def titan_checks(recipe: Recipe) -> list[tuple[str, str]]:
    """What else a recipe that trains flux needs."""
    return list(_faults(recipe)) if isinstance(recipe.model, Flux) else []


def _faults(recipe: Recipe) -> Iterator[tuple[str, str]]:
    dataset = recipe.dataset
    if type(recipe.loss).__module__.startswith("titancli."):
        yield "loss", 'flux gives velocities and no log-probabilities: write loss = "flow_matching"'
    if getattr(dataset, "needs_tokenizer", True):
        yield "dataset", 'flux takes latents, and this dataset gives text: write type = "latents"'
    elif isinstance(dataset, Noised):
        if recipe.model.guidance_embed and dataset.guidance is None:
            yield "dataset", "this flux is told how strong guidance is: write guidance = 1.0"
        if dataset.guidance is not None and not recipe.model.guidance_embed:
            yield "dataset.guidance", "this flux is told of no guidance: leave it out, or take flux-dev"


__all__ = ["FlowMatching", "Flux", "Latents", "RandomLatents"]
