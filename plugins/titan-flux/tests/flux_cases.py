"""What the ranks run: a tiny flux on a layout, with the dataset's own rows; and diffusers' names."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from tests.engine.cases import wholes
from titan_flux import Flux
from titan_flux.data import places_of
from titancli import Engine, load_recipe
from titancli.engine.rng import generator_for
from titancli.models.blocks.init import normal_
from titancli.registry.component import build

ROWS = 8
TINY = Flux(
    dim=32,
    n_heads=2,
    double_blocks=2,
    single_blocks=2,
    axes_dim=(4, 6, 6),
    in_channels=16,
    context_dim=12,
    pooled_dim=10,
    guidance_embed=True,
)
SETTINGS = [
    "optimizer.eps=1e-4",
    "training.max_norm=0.5",
    "lr_scheduler.warmup_steps=0",
    f"training.global_batch_size={ROWS}",
    "mesh.dp_shard=1",
]


def trained(overrides: list[str], steps: int = 3) -> dict[str, Tensor]:
    """Weights after some steps, and every loss and norm on the way."""
    recipe = load_recipe("titan-flux:flux_debug", [*SETTINGS, *overrides]).recipe
    engine = Engine.build(recipe)
    # As initialised most gradients are zero: every block is the identity.
    for name, parameter in engine.named_parameters():
        if "norm" not in name:
            normal_(parameter, 0.1, generator_for(1, engine.device)(name))
    data = build(
        recipe.dataset,
        tokenizer=None,
        seq_len=recipe.training.seq_len,
        rows=recipe.training.local_batch_size,
        dp_rank=engine.mesh.dp_rank,
        dp_size=engine.mesh.degrees.dp,
        seed=recipe.training.seed,
    )
    rows = iter(data)
    result: dict[str, Tensor] = {}
    for step in range(steps):
        batches = list(islice(rows, engine.settings.accumulation))
        metrics = engine.forward_backward(batches) | engine.optim_step()
        result[f"loss {step}"] = metrics["loss"].clone()
        result[f"norm {step}"] = metrics["grad_norm"].clone()
    result["tokens"] = torch.tensor(float(engine.tokens_seen))
    return result | wholes(engine.named_parameters())


def from_diffusers(theirs: dict[str, Tensor], config: Flux) -> dict[str, Tensor]:
    """Our parameters out of those of diffusers' FluxTransformer2DModel."""
    found: dict[str, Tensor] = {}

    def take(ours: str, *names: str) -> None:
        for part in ("weight", "bias"):
            if f"{names[0]}.{part}" in theirs:
                found[f"{ours}.{part}"] = torch.cat([theirs[f"{name}.{part}"] for name in names])

    take("embedding.image", "x_embedder")
    take("embedding.text", "context_embedder")
    for ours, name in {"time": "timestep", "pooled": "text", "guidance": "guidance"}.items():
        for place, number in {"inner": 1, "outer": 2}.items():
            if f"time_text_embed.{name}_embedder.linear_1.weight" in theirs:
                take(f"embedding.{ours}.{place}", f"time_text_embed.{name}_embedder.linear_{number}")
    for i in range(config.double_blocks):
        base = f"transformer_blocks.{i}"
        for ours, norm, q, suffix, out, mlp in (
            ("image", "norm1", "to_{}", "norm_{}", "to_out.0", "ff"),
            ("text", "norm1_context", "add_{}_proj", "norm_added_{}", "to_add_out", "ff_context"),
        ):
            stream = f"layers.{i}.{ours}"
            take(f"{stream}.modulation", f"{base}.{norm}.linear")
            take(f"{stream}.qkv", *(f"{base}.attn.{q.format(x)}" for x in "qkv"))
            for x in "qk":
                take(f"{stream}.heads.{x}_norm", f"{base}.attn.{suffix.format(x)}")
            take(f"{stream}.proj", f"{base}.attn.{out}")
            take(f"{stream}.mlp_in", f"{base}.{mlp}.net.0.proj")
            take(f"{stream}.mlp_out", f"{base}.{mlp}.net.2")
    for i in range(config.single_blocks):
        base, block = f"single_transformer_blocks.{i}", f"layers.{config.double_blocks + i}"
        take(f"{block}.modulation", f"{base}.norm.linear")
        take(f"{block}.inner", *(f"{base}.attn.to_{x}" for x in "qkv"), f"{base}.proj_mlp")
        for x in "qk":
            take(f"{block}.heads.{x}_norm", f"{base}.attn.norm_{x}")
        take(f"{block}.outer", f"{base}.proj_out")
    take("output.modulation", "norm_out.linear")
    for part in ("weight", "bias"):  # theirs gives the scale first
        scale, shift = found[f"output.modulation.{part}"].chunk(2)
        found[f"output.modulation.{part}"] = torch.cat((shift, scale))
    take("output.linear", "proj_out")
    return found


def sizes(config: Flux) -> dict[str, Any]:
    """Return the same model's arguments in diffusers."""
    return dict(
        in_channels=config.in_channels,
        num_layers=config.double_blocks,
        num_single_layers=config.single_blocks,
        attention_head_dim=config.dim // config.n_heads,
        num_attention_heads=config.n_heads,
        joint_attention_dim=config.context_dim,
        pooled_projection_dim=config.pooled_dim,
        guidance_embeds=config.guidance_embed,
        axes_dims_rope=config.axes_dim,
    )


def inputs(config: Flux, height: int = 3, width: int = 4, words: int = 5) -> dict[str, Any]:
    """Two rows of anything."""
    draw = torch.Generator().manual_seed(0)
    places = places_of(height, width)
    return {
        "latents": torch.randn(2, len(places), config.in_channels, generator=draw),
        "places": places.expand(2, -1, -1),
        "text": torch.randn(2, words, config.context_dim, generator=draw),
        "pooled": torch.randn(2, config.pooled_dim, generator=draw),
        "timesteps": torch.tensor([0.03, 0.8]),
        **({"guidance": torch.tensor([1.0, 3.5])} if config.guidance_embed else {}),
    }


@torch.no_grad()
def of_diffusers(model: FluxTransformer2DModel, given: dict[str, Any]) -> Tensor:
    """Velocities of the same inputs."""
    return model(
        hidden_states=given["latents"],
        encoder_hidden_states=given["text"],
        pooled_projections=given["pooled"],
        timestep=given["timesteps"],
        img_ids=given["places"][0],
        txt_ids=torch.zeros(given["text"].shape[1], 3),
        guidance=given.get("guidance"),
    ).sample


@torch.no_grad()
def both(checkpoint: dict[str, Tensor], folder: Path) -> tuple[Tensor, Tensor]:
    """Velocities of a checkpoint of the debug flavor, and of an export as diffusers loads it."""
    theirs = FluxTransformer2DModel.from_pretrained(folder).eval()
    config = load_recipe("titan-flux:flux_debug").recipe.model
    ours = build(config, seq_len=0)
    ours.load_state_dict({name.removeprefix("model."): value for name, value in checkpoint.items()})
    given = inputs(config)
    return ours(**given), of_diffusers(theirs, given)
