"""The Hugging Face form of Qwen3-Next, where the parameters of gated DeltaNet are grouped differently."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from titancli.models.blocks.hf import DecoderHF

NAMES: dict[str, tuple[str, ...]] = {
    "attention.wqkvz.weight": ("in_proj_qkvz.weight",),
    "attention.wba.weight": ("in_proj_ba.weight",),
    "attention.conv": ("conv1d.weight",),
    "attention.A_log": ("A_log",),
    "attention.dt_bias": ("dt_bias",),
    "attention.out_norm.weight": ("norm.weight",),
    "attention.wo.weight": ("out_proj.weight",),
}
"""Names of gated DeltaNet's parameters within a block, and their names within `linear_attn`."""
APART: dict[str, tuple[str, ...]] = {
    **NAMES,
    "attention.wqkvz.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
    "attention.wba.weight": ("in_proj_b.weight", "in_proj_a.weight"),
}
"""The same for Qwen 3.5."""
EXPERTS: dict[str, tuple[str, ...]] = {
    "moe.experts.w13": ("gate_proj", "up_proj"),
    "moe.experts.w2": ("down_proj",),
}
STACKED = {"moe.experts.w13": "gate_up_proj", "moe.experts.w2": "down_proj"}
"""Experts in separate tensors or, as Qwen 3.5 was released, all in one."""


class GatedDeltaHF(DecoderHF):
    """Qwen 3.5 has separate projections in gated DeltaNet, each with all heads together; Qwen3-Next, and
    the model here, have one projection with the parts of a group of heads adjacent."""

    stacked = False
    """Whether the folder has all experts in one tensor; determined from the names, which are read first."""

    def known_as(self, hf_name: str) -> str:
        self.stacked |= hf_name.endswith(tuple(f".mlp.experts.{name}" for name in STACKED.values()))
        return super().known_as(hf_name)

    def sources(self, name: str) -> list[str]:
        table, rest = self._table(name)
        if table is None:
            return super().sources(name)
        prefix = ".".join(["model", *name.split(".")[:2]])
        if table is not EXPERTS:
            return [f"{prefix}.linear_attn.{theirs}" for theirs in table[rest]]
        if self.stacked:
            return [f"{prefix}.mlp.experts.{STACKED[rest]}"]
        numbers = range(self.config.moe.num_experts)
        return [f"{prefix}.mlp.experts.{e}.{matrix}.weight" for matrix in table[rest] for e in numbers]

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        table, rest = self._table(name)
        if table is None:
            return super().to_hf(name, tensor)
        if table is not EXPERTS:
            pieces = self._apart(rest, tensor)
        elif self.stacked:
            pieces = [tensor]
        else:
            pieces = [x for half in tensor.chunk(len(table[rest]), 1) for x in half.unbind()]
        return list(zip(self.sources(name), pieces, strict=True))

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        table, rest = self._table(name)
        if table is None:
            return super().from_hf(name, tensors)
        if table is not EXPERTS:
            return self._together(rest, tensors)
        if self.stacked:
            return tensors[0]
        each = self.config.moe.num_experts
        halves = [torch.stack(tensors[at : at + each]) for at in range(0, len(tensors), each)]
        return torch.cat(halves, 1)

    def _table(self, name: str) -> tuple[dict[str, tuple[str, ...]] | None, str]:
        """Return the table that this parameter is in, and its name within its block."""
        if not name.startswith("layers."):
            return None, name
        _, layer, rest = name.split(".", 2)
        if rest in EXPERTS:
            return EXPERTS, rest
        if rest not in NAMES or self.config.has_attention(int(layer)):
            return None, rest
        return NAMES if self.model_type == "qwen3_next" else APART, rest

    # ----------------------------------------------------------------------------------- groups of heads

    @property
    def _groups(self) -> int:
        return int(self.config.linear_num_key_heads)

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Rows of a group: query, key and values."""
        config = self.config
        values = config.linear_num_value_heads // self._groups * config.linear_value_head_dim
        return config.linear_key_head_dim, config.linear_key_head_dim, values

    def _apart(self, rest: str, tensor: Tensor) -> list[Tensor]:
        """Split a tensor grouped by heads into the files' tensors."""
        if rest == "attention.conv":
            return [self._by_kind(tensor)[:, None].contiguous()]
        if self.model_type == "qwen3_next" or len(APART[rest]) == 1:
            return [tensor]
        grouped = tensor.unflatten(0, (self._groups, -1))
        if rest == "attention.wba.weight":
            return [x.flatten(0, 1).contiguous() for x in grouped.chunk(2, 1)]
        mixed, gate = grouped.split((sum(self._widths), self._widths[-1]), 1)
        return [self._by_kind(mixed.flatten(0, 1)), gate.flatten(0, 1).contiguous()]

    def _together(self, rest: str, tensors: list[Tensor]) -> Tensor:
        """Join the files' tensors into one grouped by heads."""
        if rest == "attention.conv":
            return self._by_group(tensors[0].squeeze(1))
        if len(tensors) == 1:
            return tensors[0]
        first, second = tensors
        if rest == "attention.wqkvz.weight":
            first = self._by_group(first)
        both = [x.unflatten(0, (self._groups, -1)) for x in (first, second)]
        return torch.cat(both, 1).flatten(0, 1)

    def _by_kind(self, x: Tensor) -> Tensor:
        parts = x.unflatten(0, (self._groups, -1)).split(self._widths, 1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    def _by_group(self, x: Tensor) -> Tensor:
        parts = x.split([self._groups * width for width in self._widths])
        return torch.cat([part.unflatten(0, (self._groups, -1)) for part in parts], 1).flatten(0, 1)
