"""The router of a mixture of experts: which experts each token visits, and their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from titancli.distributed.local import local

if TYPE_CHECKING:
    from titancli.models.sections import MoE as MoEConfig


class Routes(NamedTuple):
    """The routes of N tokens."""

    experts: Tensor
    """[N, top_k] int64."""
    scores: Tensor
    """[N, top_k] fp32."""
    counts: Tensor
    """[E] int64: tokens per expert, padding included."""
    probabilities: Tensor | None = None
    """[N, E] fp32, rows that add up to 1: input of the load-balancing loss; None without it."""
    logits: Tensor | None = None
    """[N, E] fp32: input of the z-loss; None without it."""


class Router(nn.Module):
    """Chooses each token's experts and their weights."""

    styles: ClassVar = {"gate": "replicate"}
    roles: ClassVar = {"gate": "router"}

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(dim, config.num_experts, bias=config.gate_bias)
        self.force_load_balance = False

    def forward(self, x: Tensor, expert_bias: Tensor | None, routes: Tensor | None = None) -> Routes:
        """Route tokens [N, dim].

        Args:
            expert_bias: [E]; affects the choice but not the scores.
            routes: [N, top_k] integers; the experts to visit, where they are not -1. Scores are the router's.
                Source: Rollout Routing Replay (arXiv 2510.11370).
        """
        config = self.config
        logits = self.gate(x).float()
        scores = logits.softmax(-1) if config.score_func == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach(), expert_bias)
        if routes is not None:
            experts = torch.where(routes < 0, experts, routes.long())
        chosen = scores.gather(1, experts)
        if config.route_norm:
            chosen = chosen / chosen.sum(-1, keepdim=True).clamp(min=1e-20)
        counts = visits(experts, config.num_experts)
        shares = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20) if config.aux_loss_coeff else None
        kept = logits if config.z_loss_coeff else None
        return Routes(experts, chosen * config.route_scale, counts, shares, kept)

    def _choose(self, scores: Tensor, expert_bias: Tensor | None) -> Tensor:
        config = self.config
        if self.force_load_balance:
            slots = torch.arange(len(scores) * config.top_k, device=scores.device)
            return (slots % config.num_experts).view(-1, config.top_k)
        if expert_bias is not None:
            scores = scores + expert_bias
        if config.num_expert_groups is not None and config.num_limited_groups is not None:
            grouped = scores.view(len(scores), config.num_expert_groups, -1)
            worth = grouped.topk(config.group_top_k, dim=-1).values.sum(-1)
            best = worth.topk(config.num_limited_groups, dim=-1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            scores = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
        return scores.topk(config.top_k, dim=-1).indices


def visits(experts: Tensor, num_experts: int, real: Tensor | None = None) -> Tensor:
    """Return the visits of each expert, [E] int64.

    Args:
        experts: [N, top_k] int64.
        real: [N] bool, the tokens that count; None: all.
    """
    flat = experts.flatten()
    ones = torch.ones_like(flat) if real is None else real.long()[:, None].expand_as(experts).flatten()
    # Not bincount: its shape is unknown before it runs.
    return flat.new_zeros(num_experts).scatter_add(0, flat, ones)


class Gate(nn.Linear):
    """The router's projection, always in fp32: rounded to bf16, two logits of several hundred are often equal
    or swapped, and a token would go to other experts.

    Source: Switch Transformer (arXiv 2101.03961, section 2.4). Its inputs may already be rounded: tokens and,
    under mixed precision, the weight.
    """

    takes_local_parameters = True

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, dim] to [N, E] fp32."""
        return _Product.apply(x, local(self.weight), None if self.bias is None else local(self.bias))


class _Product(torch.autograd.Function):
    """x · weightᵀ + bias, in fp32 or more. Keeps its inputs for backward: autograd would keep the casts,
    which for bf16 tokens take twice as much memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        wide = _at_least_fp32(x)
        return linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide = _at_least_fp32(x)
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            (grad @ weight.to(wide)).to(x.dtype) if for_x else None,
            (grad.t() @ x.to(wide)).to(weight.dtype) if for_weight else None,
            grad.sum(0).to(ctx.bias_dtype) if for_bias else None,
        )


def _at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
