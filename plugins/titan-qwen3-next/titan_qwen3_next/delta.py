"""Gated DeltaNet: linear attention whose memory is a matrix per head, corrected token by token.

Source: arXiv 2412.06464, as in Qwen3-Next: queries, keys and values first pass a short causal convolution,
and the heads' outputs are normalized and gated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from titan_qwen3_next.delta_rule import gated_delta_rule
from titancli.distributed.local import local
from titancli.errors import TitanError
from titancli.models.blocks.attention_window import IN_ORDER
from titancli.models.blocks.init import fill, ones_, uniform_

if TYPE_CHECKING:
    from titan_qwen3_next import DeltaNet
    from titancli.models.blocks.cache import LayerStep

ALL = slice(None)


class GatedDeltaNet(nn.Module):
    """A replacement for attention. A *group* is a head of queries and keys with the value heads that share
    it; parameters of a group are adjacent, so that tensor parallelism shards by groups.

    `mask` is [B, S] bool over whole rows, marking the first token of each document; None: one document per
    row.
    """

    keeps_cache = True
    takes_local_parameters = True
    styles: ClassVar = {
        **dict.fromkeys(("conv", "A_log", "dt_bias", "wqkvz", "wba"), "column"),
        "wo": "row",
    }
    reach = IN_ORDER
    angles = None

    def __init__(self, spec: DeltaNet) -> None:
        super().__init__()
        dim, values = spec.dim, spec.heads
        self.key_dim, self.value_dim = spec.key_dim, spec.value_dim
        self.shared_by = values // spec.key_heads
        # Per group: query, key, values and their gates; and β and decay of each value head.
        self.wqkvz = nn.Linear(dim, spec.mixed + values * spec.value_dim, bias=False)
        self.wba = nn.Linear(dim, 2 * values, bias=False)
        self.conv = nn.Parameter(torch.empty(spec.mixed, spec.kernel))
        self.A_log = nn.Parameter(torch.empty(values))
        self.dt_bias = nn.Parameter(torch.empty(values))
        self.out_norm = nn.RMSNorm(spec.value_dim, eps=spec.norm_eps)
        self.wo = nn.Linear(values * spec.value_dim, dim, bias=False)

    def init_own(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Initialize the parameters that are not matrices: decay rates of 0.01 to 16 times a step of
        softplus(1), and torch's default for the convolution."""
        decay, bound = generator_for("A_log"), self.conv.shape[1] ** -0.5
        fill(self.A_log, lambda whole: whole.uniform_(0.01, 16, generator=decay).log_())
        ones_(self.dt_bias)
        uniform_(self.conv, bound, generator_for("conv"))

    def forward(
        self, x: Tensor, cos: None, sin: None, mask: Tensor | None, cache: LayerStep | None = None
    ) -> Tensor:
        """Map [B, S, dim] to [B, S, dim]; cos and sin are None, since recurrence encodes order."""
        rows, length, _ = x.shape
        values = self.shared_by * self.value_dim
        widths = (2 * self.key_dim + values, values)
        made = self.wqkvz(x)
        if made.shape[-1] % sum(widths):
            raise TitanError(
                "mesh.tp does not divide the query heads of gated DeltaNet (linear_num_key_heads)",
                hint="use a mesh.tp that does",
            )
        mixed, gate = made.view(rows, length, -1, sum(widths)).split(widths, -1)
        beta, step = self.wba(x).view(rows, length, -1, 2 * self.shared_by).chunk(2, -1)
        bias, rate = (local(p).view(-1, self.shared_by) for p in (self.dt_bias, self.A_log))
        wide = torch.promote_types(step.dtype, torch.float32)
        log_decay = -rate.to(wide).exp() * softplus(step.to(wide) + bias)
        per_head = (mixed, torch.cat((log_decay, beta.to(wide).sigmoid()), -1))
        out = self.core_recurrence(per_head, mask) if cache is None else cache.recur(per_head, self._continue)
        out = self.out_norm(out) * silu(gate.view_as(out).to(wide))
        return self.wo(out.to(x.dtype).reshape(rows, length, -1))

    def core_recurrence(self, per_head: Sequence[Tensor], mask: Tensor | None, heads: slice = ALL) -> Tensor:
        """Run the recurrence over whole rows of some groups; a plan may replace this method by one that
        gathers rows and calls the original with them (`titancli.parallel.context`).

        Args:
            per_head: [B, S, groups, …] each.
            mask: [B, S] bool.
            heads: which of this rank's groups these are.

        Returns:
            [B, S, groups, value heads of a group, value_dim].
        """
        return self._pass(per_head, mask, None, None, heads)[0]

    def _continue(
        self, per_head: Sequence[Tensor], states: Sequence[Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Continue rows from their states: the inputs that the convolution still needs, and the memory."""
        mixed, kept = per_head[0], self.conv.shape[1] - 1
        before, memory = states or (mixed.new_zeros(len(mixed), kept, *mixed.shape[2:]), None)
        out, memory = self._pass(per_head, None, before, memory)
        row = torch.cat((before, mixed), 1)
        return out, (row[:, row.shape[1] - kept :], memory)

    def _pass(
        self,
        per_head: Sequence[Tensor],
        mask: Tensor | None,
        before: Tensor | None,
        state: Tensor | None,
        heads: slice = ALL,
    ) -> tuple[Tensor, Tensor]:
        mixed, gates = per_head
        widths = (self.key_dim, self.key_dim, self.shared_by * self.value_dim)
        weight = local(self.conv).view(-1, sum(widths), self.conv.shape[1])[heads]
        q, k, v = silu(short_convolution(mixed, weight, mask, before)).split(widths, -1)
        log_decay, beta = gates.chunk(2, -1)
        v = v.unflatten(-1, (self.shared_by, self.value_dim))
        return gated_delta_rule(q, k, v, log_decay, beta, mask, state)


def short_convolution(x: Tensor, weight: Tensor, begins: Tensor | None, before: Tensor | None) -> Tensor:
    """Apply each channel's own causal convolution, not across documents; summed in fp32 or more.

    Args:
        x: [B, S, …].
        weight: […, kernel], the last element for the token itself.
        begins: [B, S] bool, the first token of each document; None: no document begins.
        before: [B, kernel - 1, …], the inputs before the row; None: zeros.

    Returns:
        [B, S, …] in x's dtype.
    """
    length, kernel = x.shape[1], weight.shape[-1]
    front = (0, 0) * (x.ndim - 2) + (kernel - 1, 0)
    row = pad(x, front) if before is None else torch.cat((before, x), 1)
    weight = weight.to(torch.promote_types(x.dtype, torch.float32))
    out = x * weight[..., -1]
    document = None if begins is None else pad(begins.int().cumsum(1), (kernel - 1, 0))
    for back in range(1, kernel):
        at = kernel - 1 - back
        part = row[:, at : at + length] * weight[..., at]
        if document is not None:
            same = document[:, kernel - 1 :] == document[:, at : at + length]
            part = part * same[(...,) + (None,) * (x.ndim - 2)]
        out = out + part
    return out.to(x.dtype)
