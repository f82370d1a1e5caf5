"""The Hugging Face form of the model, as in diffusers: names, separate projections, and config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from titan_flux import Flux
from titancli import TitanError
from titancli.errors import EnvironmentProblem
from titancli.protocols import HFFormDefaults

AROUND = {
    "embedding.image": "x_embedder",
    "embedding.text": "context_embedder",
    "embedding.time.inner": "time_text_embed.timestep_embedder.linear_1",
    "embedding.time.outer": "time_text_embed.timestep_embedder.linear_2",
    "embedding.pooled.inner": "time_text_embed.text_embedder.linear_1",
    "embedding.pooled.outer": "time_text_embed.text_embedder.linear_2",
    "embedding.guidance.inner": "time_text_embed.guidance_embedder.linear_1",
    "embedding.guidance.outer": "time_text_embed.guidance_embedder.linear_2",
    "output.modulation": "norm_out.linear",
    "output.linear": "proj_out",
}
DOUBLE = {
    "image.modulation": "norm1.linear",
    "image.qkv": "attn.to_q attn.to_k attn.to_v",
    "image.heads.q_norm": "attn.norm_q",
    "image.heads.k_norm": "attn.norm_k",
    "image.proj": "attn.to_out.0",
    "image.mlp_in": "ff.net.0.proj",
    "image.mlp_out": "ff.net.2",
    "text.modulation": "norm1_context.linear",
    "text.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "text.heads.q_norm": "attn.norm_added_q",
    "text.heads.k_norm": "attn.norm_added_k",
    "text.proj": "attn.to_add_out",
    "text.mlp_in": "ff_context.net.0.proj",
    "text.mlp_out": "ff_context.net.2",
}
SINGLE = {
    "modulation": "norm.linear",
    "inner": "attn.to_q attn.to_k attn.to_v proj_mlp",
    "heads.q_norm": "attn.norm_q",
    "heads.k_norm": "attn.norm_k",
    "outer": "proj_out",
}
SCALE_FIRST = "output.modulation."
"""Prefix of the only parameters where diffusers has the scale before the shift."""
FIELDS = {
    "in_channels": "in_channels",
    "num_layers": "double_blocks",
    "num_single_layers": "single_blocks",
    "num_attention_heads": "n_heads",
    "joint_attention_dim": "context_dim",
    "pooled_projection_dim": "pooled_dim",
    "guidance_embeds": "guidance_embed",
}
FIXED = {"mlp_ratio": 4.0, "rope_theta": 10_000.0, "qkv_bias": True}
"""Values for which diffusers' class has no field."""


class FluxHF(HFFormDefaults):
    """diffusers' FluxTransformer2DModel, as in the folder `transformer` of the published FLUX.1."""

    library = "diffusers"
    model_type = "FluxTransformer2DModel"

    def __init__(self, config: Flux) -> None:
        self.config = config

    def sources(self, name: str) -> list[str]:
        module, _, part = name.rpartition(".")
        if module in AROUND:
            return [f"{AROUND[module]}.{part}"]
        _, number, place = module.split(".", 2)
        doubles = self.config.double_blocks
        if int(number) < doubles:
            base, names = f"transformer_blocks.{number}", DOUBLE[place]
        else:
            base, names = f"single_transformer_blocks.{int(number) - doubles}", SINGLE[place]
        return [f"{base}.{theirs}.{part}" for theirs in names.split()]

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        names, dim = self.sources(name), self.config.dim
        if name.startswith(SCALE_FIRST):
            tensor = _halves_swapped(tensor)
        # Queries, keys, values and, in a single block, the feed-forward's input projection.
        sizes = [dim, dim, dim, len(tensor) - 3 * dim][: len(names)] if len(names) > 1 else [len(tensor)]
        return zip(names, tensor.split(sizes), strict=True)

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        tensor = torch.cat(tensors)
        return _halves_swapped(tensor) if name.startswith(SCALE_FIRST) else tensor

    def ignored(self, hf_name: str) -> bool:
        return False

    def config_json(self) -> dict[str, Any]:
        """Return diffusers' config.json.

        Raises:
            TitanError: diffusers does not support the model; names the fields.
        """
        other = [name for name, value in FIXED.items() if getattr(self.config, name) != value]
        if other:
            required = " and ".join(f"{name} {FIXED[name]}" for name in other)
            raise TitanError(
                f"diffusers' {self.model_type} requires {required}, which this model does not have"
            )
        return {
            "_class_name": self.model_type,
            "patch_size": 1,
            "out_channels": None,
            "attention_head_dim": self.config.dim // self.config.n_heads,
            "axes_dims_rope": list(self.config.axes_dim),
            **{theirs: getattr(self.config, ours) for theirs, ours in FIELDS.items()},
        }

    @staticmethod
    def from_config_json(config_json: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of `[model]` for diffusers' config.json.

        Raises:
            EnvironmentProblem: the patch size is not 1, or input and output channels differ.
        """
        out = config_json.get("out_channels") or config_json["in_channels"]
        if config_json.get("patch_size", 1) != 1 or out != config_json["in_channels"]:
            raise EnvironmentProblem(
                "config.json: flux has patch_size 1, and as many out_channels as in_channels"
            )
        return {
            "dim": config_json["attention_head_dim"] * config_json["num_attention_heads"],
            "axes_dim": list(config_json.get("axes_dims_rope", (16, 56, 56))),
            **{ours: config_json[theirs] for theirs, ours in FIELDS.items()},
        }


def _halves_swapped(tensor: Tensor) -> Tensor:
    first, second = tensor.chunk(2)
    return torch.cat((second, first))
