"""Mixture of experts: a router (`titancli.models.blocks.router`), the experts it chooses from, and a bias
that evens out its choices.

Source: the sparsely gated layer (arXiv 1701.06538), shared experts and limited groups (DeepSeek-V2, arXiv
2405.04434), balancing without a loss (arXiv 2408.15664). Single-device code: `Experts.over_experts` is where
`titancli.parallel.expert` sends tokens to the ranks that have their experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from titancli.models.blocks.grouped import grouped_linear
from titancli.models.blocks.router import Router, Routes
from titancli.registry.component import load_target

if TYPE_CHECKING:
    from titancli.protocols import shape

__all__ = ["Experts", "MoE", "Rearrange", "Router", "Routes", "moe_layers"]


class Experts(nn.Module):
    """SwiGLU experts, their matrices stacked: `w2(silu(w1 x) * w3 x)`."""

    is_transposed = False
    """Whether matrices are stored [in, out]."""

    @property
    def styles(self) -> dict[str, str]:
        """All are sharded over mesh.ep."""
        return dict.fromkeys(self._parameters, "expert")

    def __init__(self, spec: shape.Experts) -> None:
        super().__init__()
        routing = spec.routing
        self.num_experts = routing.num_experts
        self.force_load_balance = False
        for name, sizes in self.shapes(spec.dim, routing.hidden_dim).items():
            self.register_parameter(name, nn.Parameter(torch.empty(routing.num_experts, *sizes)))

    @staticmethod
    def shapes(dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        """The parameters of one expert, by the names under which `compute` gets those of several."""
        return {"w1": (hidden_dim, dim), "w2": (dim, hidden_dim), "w3": (hidden_dim, dim)}

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """What the experts make of tokens.

        Args:
            x: [N, dim], all tokens of the first expert, then all of the second, …
            counts: [E] integers, how many each expert has.

        Returns:
            [N, dim], in the same order.
        """
        return self.over_experts(x, counts)

    def over_experts(self, x: Tensor, counts: Tensor) -> Tensor:
        """`forward` itself; a plan puts a method in its place that sends tokens to other ranks' experts."""
        # As attributes: a plan may have them computed with in another dtype than they are stored in.
        return self.compute(x, counts, {name: getattr(self, name) for name in self._parameters})

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """`forward` with the weights of some of the experts, by their names here; `counts` is of those."""
        ends = counts.cumsum(0).int()
        gate = self.product(x, "w1", weights, ends)
        up = self.product(x, "w3", weights, ends)
        return self.product(silu(gate) * up, "w2", weights, ends)

    def product(self, x: Tensor, name: str, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        """Each expert's tokens times its own matrix of a stack; a converter may put more beside it.

        Args:
            x: [N, in], as in `forward`.
            name: of the stack, [E, out, in], or where `is_transposed` [E, in, out].
            weights: as in `compute`.
            ends: [E] int32, where each expert's tokens end.

        Returns:
            [N, out].
        """
        matrix = weights[name]
        return grouped_linear(x, matrix.transpose(1, 2) if self.is_transposed else matrix, ends)


class JoinedExperts(Experts):
    """SwiGLU experts whose first two matrices are one: the gate's rows first."""

    @staticmethod
    def shapes(dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        return {"w13": (2 * hidden_dim, dim), "w2": (dim, hidden_dim)}

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        ends = counts.cumsum(0).int()
        gate, up = self.product(x, "w13", weights, ends).chunk(2, -1)
        return self.product(silu(gate) * up, "w2", weights, ends)


class MoE(nn.Module):
    """A feed-forward layer of experts; see `titancli.protocols.shape.Experts`."""

    expert_bias: Tensor | None
    styles: ClassVar = {"shared_gate": "replicate"}
    roles: ClassVar = {"shared_gate": "router"}

    def __init__(self, spec: shape.Experts) -> None:
        super().__init__()
        config = self.config = spec.routing
        self.router = Router(spec.dim, config)
        self.experts = load_target(spec.stacks)(spec)
        self.shared_experts = None if spec.shared is None else spec.shared.build()
        self.shared_gate = nn.Linear(spec.dim, 1, bias=False) if spec.shared_gate else None
        balanced = bool(config.load_balance_coeff)
        # A buffer: it moves without gradients, and is no parameter that an optimizer might decay.
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if balanced else None)
        self.holds_bias = config.freeze_expert_bias
        """Whether the bias stays as it is, whatever the counts."""
        self._counts: Tensor | None = None
        self.load: Tensor | None = None
        """[E], `share_of` all tokens of the call that is under way; None: those of this forward are all."""
        self.per_token: Tensor | None = None
        """What a sum over tokens is multiplied by, so that where the loss is divided by its own weight it
        becomes a mean over all tokens of the call; None: it stays a sum."""
        self.counting: Tensor | None = None
        """[E] int64: what each forward adds its tokens to, where somebody counts."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, dim] -> [B, S, dim]."""
        tokens = x.flatten(0, -2)
        routes = self.router(tokens, self.expert_bias)
        if self.counting is not None:
            self.counting += routes.counts
        if routes.probabilities is not None or routes.logits is not None:
            given = (routes.scores, routes.probabilities, routes.logits, routes.counts)
            routes = routes._replace(scores=_RouterLosses.apply(*given, self))
        self._count(routes)
        out = self._routed(tokens, routes).view_as(x)
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        return out + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)

    def _routed(self, tokens: Tensor, routes: Routes) -> Tensor:
        top_k = self.config.top_k
        order = routes.experts.flatten().argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        scores = routes.scores.to(tokens.dtype)
        visitors = Rearrange.apply(tokens, order, place, top_k)
        if self.config.score_before_experts:
            visitors = visitors * scores.flatten()[order][:, None]
        out = self.experts(visitors, routes.counts)
        by_token = Rearrange.apply(out, place, order, 1).view(len(tokens), top_k, -1)
        if self.config.score_before_experts:
            return by_token.sum(1)
        return torch.bmm(scores[:, None], by_token)[:, 0]

    def force_load_balance(self) -> None:
        """Deal the experts out in turn instead of choosing, so that all get as many tokens and every number
        of them is known beforehand: for measuring and for dry runs, not for training."""
        self.router.force_load_balance = self.experts.force_load_balance = True

    def parts(self) -> list[tuple[nn.Module, str]]:
        """The methods that cost most, without what is between them: it orders tokens, and may send them
        away."""
        found: list[tuple[nn.Module, str]] = [(self.router, "forward"), (self.experts, "compute")]
        return found if self.shared_experts is None else [*found, (self.shared_experts, "forward")]

    # ---------------------------------------------------------------------------------------- balancing

    def _count(self, routes: Routes) -> None:
        """Count the tokens when their gradient comes back: once also where forward is run again for it, and
        never in an evaluation."""
        counts = routes.counts  # alone: a hook that held the scores would keep them, and their graph, alive
        if routes.scores.requires_grad:
            routes.scores.register_hook(lambda _: self._add(counts))

    def _add(self, counts: Tensor) -> None:
        self._counts = counts.clone() if self._counts is None else self._counts.add_(counts)

    def token_counts(self) -> Tensor:
        """[E] int64: tokens that each expert was trained on here since `forget_counts`."""
        if self._counts is None:
            return torch.zeros(self.config.num_experts, dtype=torch.int64, device=self.device)
        return self._counts

    @property
    def active_share(self) -> float:
        """The share of the routed experts' parameters that take part in one token."""
        return self.config.top_k / self.config.num_experts

    @property
    def device(self) -> torch.device:
        """Where tokens are counted."""
        return (next(self.experts.parameters()) if self.expert_bias is None else self.expert_bias).device

    def share_of(self, counts: Tensor) -> Tensor:
        """The share of tokens that visit each expert: [E] fp32, which add up to top_k."""
        return counts.float() * (self.config.top_k / counts.sum().clamp(min=1))

    def mean_of(self, gradient: Tensor) -> Tensor:
        """The gradient of a sum over tokens as that of their mean, where it is known what makes one of it."""
        return gradient if self.per_token is None else gradient * self.per_token

    def forget_counts(self) -> None:
        """Begin to count anew."""
        self._counts = None

    def clear_bias(self) -> None:
        """Begin to balance anew."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    @torch.no_grad()
    def balance(self, counts: Tensor) -> None:
        """Make experts that were chosen too often less likely, and the others more.

        Args:
            counts: [E], how many tokens each had in the step, on all ranks together.
        """
        if self.expert_bias is not None and self.config.load_balance_coeff and not self.holds_bias:
            counts = counts.float()
            self.expert_bias += self.config.load_balance_coeff * (counts.mean() - counts).sign()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The bias stays fp32: its steps are too small for less."""
        super()._apply(fn, recurse)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()
        return self


class _RouterLosses(torch.autograd.Function):
    """Scores as they are, which in backward give two losses their gradients: the load-balancing loss, by the
    probabilities, coeff · E · Σ f_e p_e over all tokens, f_e being the share of them that visit an expert;
    and the z-loss, by the logits, coeff · Σ logsumexp².

    Sums over tokens, as every loss here is: it does not matter which ranks and micro-batches the tokens are
    on, nor whether forward runs again. The shares, and what makes means of the sums, are looked up in
    backward, when they are known.
    Source: Switch Transformer (arXiv 2101.03961, equation 4); ST-MoE (arXiv 2202.08906, equation 5).
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        probabilities: Tensor | None,
        logits: Tensor | None,
        counts: Tensor,
        layer: MoE,
    ) -> Tensor:
        ctx.save_for_backward(logits, counts)
        ctx.layer, ctx.shape = layer, None if probabilities is None else probabilities.shape
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, counts = ctx.saved_tensors
        layer, config = ctx.layer, ctx.layer.config
        for_probabilities, for_logits = None, None
        if ctx.shape is not None:
            load = layer.share_of(counts) if layer.load is None else layer.load
            for_probabilities = layer.mean_of(config.aux_loss_coeff * config.num_experts * load)
            for_probabilities = for_probabilities.expand(ctx.shape)
        if logits is not None:
            slope = layer.mean_of(2 * config.z_loss_coeff * logits.logsumexp(-1, keepdim=True))
            for_logits = slope * logits.softmax(-1)
        return grad, for_probabilities, for_logits, None, None


class Rearrange(torch.autograd.Function):
    """Rows in another order, each `copies` times: [N, dim] -> [N · copies, dim].

    Row i of the result is row `order[i] // copies`; `place` is the inverse of `order`. Both ways are plain
    look-ups, so no two ranks or runs add up in another order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        back = grad.index_select(0, place)
        if ctx.copies > 1:
            back = back.view(-1, ctx.copies, back.shape[1]).sum(1)
        return back, None, None, None


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """A model's mixture-of-experts layers by name."""
    modules = [model]
    for module in modules:  # asked for at each step: where there are none, a walk without names is quicker
        if isinstance(module, MoE):
            break
        modules += [child for child in module._modules.values() if child is not None]
    else:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
