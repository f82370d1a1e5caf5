"""Mixture of experts: a router (`titancli.models.blocks.router`), the experts it chooses from, and a bias
that balances its choices.

Source: the sparsely gated layer (arXiv 1701.06538), shared experts and limited groups (DeepSeek-V2, arXiv
2405.04434), balancing without a loss (arXiv 2408.15664). Single-device code: `titancli.parallel.expert` gives
`Experts` a dispatcher, which sends tokens to the ranks that hold their experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from titancli.distributed.collectives import Group
from titancli.distributed.local import local
from titancli.models.blocks.grouped import grouped_linear
from titancli.models.blocks.router import Router, Routes, visits
from titancli.protocols.dispatch import Dispatcher, Visit
from titancli.registry.component import load_target

if TYPE_CHECKING:
    from titancli.protocols import shape

__all__ = ["Experts", "MoE", "Rearrange", "Router", "Routes", "by_expert", "moe_layers", "recorded"]


class Experts(nn.Module):
    """SwiGLU experts with stacked matrices: `w2(silu(w1 x) * w3 x)`."""

    is_transposed = False
    """Whether matrices are stored as [in, out]."""
    dispatcher: Dispatcher | None = None
    """Set by a plan that spreads the experts over ranks: sends tokens to them."""

    @property
    def styles(self) -> dict[str, str]:
        """Tensor-parallel styles: all parameters are sharded over mesh.ep."""
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
        """Return the shapes of one expert's parameters, by the names under which `compute` gets those of
        several."""
        return {"w1": (hidden_dim, dim), "w2": (dim, hidden_dim), "w3": (hidden_dim, dim)}

    def forward(self, visit: Visit) -> Tensor:
        """Return the weighted sum of each token's experts, [N, dim]."""
        if self.dispatcher is None:
            return by_expert(visit, self.over_experts)
        return self.dispatcher(visit, self.over_experts)

    def over_experts(self, x: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts that are here to their visits.

        Args:
            x: [N, dim], all visits of the first expert, then all of the second, …
            counts: [E] integers, visits of each.

        Returns:
            [N, dim], in the same order.
        """
        # By attribute: a plan may compute with another dtype than the stored one.
        return self.compute(x, counts, {name: local(getattr(self, name)) for name in self._parameters})

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Implement `over_experts` with the weights of the experts by name."""
        ends = counts.cumsum(0).int()
        gate = self.product(x, "w1", weights, ends)
        up = self.product(x, "w3", weights, ends)
        return self.product(silu(gate) * up, "w2", weights, ends)

    def product(self, x: Tensor, name: str, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        """Multiply each expert's tokens by its matrix of a stack; a converter may add to the product.

        Args:
            x: [N, in], as in `over_experts`.
            name: name of the stack, [E, out, in], or [E, in, out] if `is_transposed`.
            weights: as in `compute`.
            ends: [E] int32, the end of each expert's tokens.

        Returns:
            [N, out].
        """
        matrix = weights[name]
        return grouped_linear(x, matrix.transpose(1, 2) if self.is_transposed else matrix, ends)


class JoinedExperts(Experts):
    """SwiGLU experts with gate and up projection in one matrix, gate first."""

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
        # A buffer: it is updated without gradients, and optimizers must not decay it.
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if balanced else None)
        self.holds_bias = config.freeze_expert_bias
        """Whether the bias is frozen."""
        self._tensor_group: Group | None = None
        self.counted: Tensor | None = None
        """Tokens per expert since `forget_counts`; None: none."""
        self.load: Tensor | None = None
        """[E], `share_of` all tokens of the current call; None: of this forward pass only."""
        self.per_token: Tensor | None = None
        """Factor that turns sums over tokens into means over all tokens of the call, if the loss is
        divided by its own weight; None: sums stay sums."""
        self.counting: Tensor | None = None
        """[E] int64: accumulates the tokens of each forward pass while tokens are being counted."""

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Take this rank's part of the rows of given routes and padding: its tokens are a part already."""
        self._tensor_group = group

    def forward(self, x: Tensor, given: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """Map [B, S, dim] to [B, S, dim].

        Args:
            given: routes to replay, [B, S, top_k] integers; see `Router.forward`.
            padding: [B, S] bool; these tokens visit experts, but count neither for balancing nor in the
                losses of the router. None: there are none.
        """
        tokens = x.flatten(0, -2)
        given, padding = (one if one is None else self._my_part(one) for one in (given, padding))
        routes = self.router(tokens, self.expert_bias, None if given is None else given.flatten(0, -2))
        real = None if padding is None else ~padding.flatten()
        counts = routes.counts if real is None else visits(routes.experts, len(routes.counts), real)
        if self.counting is not None:
            self.counting += counts
        if routes.probabilities is not None or routes.logits is not None:
            parts = (routes.scores, routes.probabilities, routes.logits, counts, real)
            routes = routes._replace(scores=_RouterLosses.apply(*parts, self))
        self._count(routes.scores, counts)
        out = self._routed(tokens, routes).view_as(x)
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        return out + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)

    def _my_part(self, rows: Tensor) -> Tensor:
        group = self._tensor_group
        return rows if group is None else rows.chunk(group.size, 1)[group.rank]

    def _routed(self, tokens: Tensor, routes: Routes) -> Tensor:
        before, dealt = self.config.score_before_experts, self.experts.force_load_balance
        return self.experts(Visit(tokens, routes.experts, routes.scores, routes.counts, before, dealt))

    def force_load_balance(self) -> None:
        """Assign experts in turn instead of choosing, so that all get equally many tokens and counts are
        known in advance: for measuring and dry runs, not for training."""
        self.router.force_load_balance = self.experts.force_load_balance = True

    def parts(self) -> list[tuple[nn.Module, str]]:
        """Return the most expensive methods, without the code between them, which reorders tokens and may
        send them to other ranks."""
        found: list[tuple[nn.Module, str]] = [(self.router, "forward"), (self.experts, "compute")]
        return found if self.shared_experts is None else [*found, (self.shared_experts, "forward")]

    # ---------------------------------------------------------------------------------------- balancing

    def _count(self, scores: Tensor, counts: Tensor) -> None:
        """Count tokens when their gradient arrives: once even if forward is recomputed, and never in an
        evaluation."""
        if scores.requires_grad:
            scores.register_hook(lambda _: self._add(counts))

    def _add(self, counts: Tensor) -> None:
        self.counted = counts.clone() if self.counted is None else self.counted.add_(counts)

    def token_counts(self) -> Tensor:
        """Return the tokens per expert trained on here since `forget_counts`, [E] int64."""
        if self.counted is None:
            return torch.zeros(self.config.num_experts, dtype=torch.int64, device=self.device)
        return self.counted

    @property
    def active_share(self) -> float:
        """Fraction of the routed experts' parameters that are active for one token."""
        return self.config.top_k / self.config.num_experts

    @property
    def device(self) -> torch.device:
        """Device on which tokens are counted."""
        return (next(self.experts.parameters()) if self.expert_bias is None else self.expert_bias).device

    def share_of(self, counts: Tensor) -> Tensor:
        """Return the share of tokens per expert, [E] fp32, which add up to top_k."""
        return counts.float() * (self.config.top_k / counts.sum().clamp(min=1))

    def mean_of(self, gradient: Tensor) -> Tensor:
        """Turn the gradient of a sum over tokens into that of their mean, if `per_token` is set."""
        return gradient if self.per_token is None else gradient * self.per_token

    def forget_counts(self) -> None:
        """Reset the token counts."""
        self.counted = None

    def clear_bias(self) -> None:
        """Reset the balancing bias."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    @torch.no_grad()
    def balance(self, counts: Tensor) -> None:
        """Make overloaded experts less likely, and underloaded ones more.

        Args:
            counts: [E], tokens per expert in the step, on all ranks together.
        """
        if self.expert_bias is not None and self.config.load_balance_coeff and not self.holds_bias:
            counts = counts.float()
            self.expert_bias += self.config.load_balance_coeff * (counts.mean() - counts).sign()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the bias in fp32: its updates are too small for lower precision."""
        super()._apply(fn, recurse)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()
        return self


class _RouterLosses(torch.autograd.Function):
    """Passes scores through, and in backward adds the gradients of two losses: the load-balancing loss, via
    the probabilities, coeff · E · Σ f_e p_e over all tokens, where f_e is the share of them that visit an
    expert; and the z-loss, via the logits, coeff · Σ logsumexp². Padding is none of the tokens.

    Both are sums over tokens, as every loss here: they do not depend on which ranks and micro-batches tokens
    are on, nor on recomputation. The shares, and the factor that turns sums into means, are read in backward,
    when they are known.
    Source: Switch Transformer (arXiv 2101.03961, equation 4); ST-MoE (arXiv 2202.08906, equation 5).
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        probabilities: Tensor | None,
        logits: Tensor | None,
        counts: Tensor,
        real: Tensor | None,
        layer: MoE,
    ) -> Tensor:
        ctx.save_for_backward(logits, counts, real)
        ctx.layer, ctx.shape = layer, None if probabilities is None else probabilities.shape
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, counts, real = ctx.saved_tensors
        layer, config = ctx.layer, ctx.layer.config
        for_probabilities, for_logits = None, None
        if ctx.shape is not None:
            load = layer.share_of(counts) if layer.load is None else layer.load
            for_probabilities = layer.mean_of(config.aux_loss_coeff * config.num_experts * load)
            for_probabilities = for_probabilities.expand(ctx.shape)
            if real is not None:
                for_probabilities = for_probabilities * real[:, None]
        if logits is not None:
            slope = layer.mean_of(2 * config.z_loss_coeff * logits.logsumexp(-1, keepdim=True))
            if real is not None:
                slope = slope * real[:, None]
            for_logits = slope * logits.softmax(-1)
        return grad, for_probabilities, for_logits, None, None, None


class Rearrange(torch.autograd.Function):
    """Reorders rows, each repeated `copies` times: [N, dim] to [N · copies, dim].

    Row i of the result is row `order[i] // copies`; `place` is the inverse of `order`. Forward and backward
    are plain look-ups, so sums have the same order on every rank and in every run.
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


def by_expert(visit: Visit, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Implement `Experts.forward` for all experts, by `compute(x, counts)` of visits in their order."""
    tokens, experts, weights, counts, weigh_first, _ = visit
    order = experts.flatten().argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    weights = weights.to(tokens.dtype)
    x = Rearrange.apply(tokens, order, place, experts.shape[1])
    if weigh_first:
        x = x * weights.flatten()[order][:, None]
    out = Rearrange.apply(compute(x, counts), place, order, 1).view(*experts.shape, tokens.shape[1])
    if weigh_first:
        return out.sum(1)
    # No view of the product, as which FSDP2 would warn of what its hooks are on.
    return torch.ops.aten._unsafe_view(torch.bmm(weights[:, None], out), tokens.shape)


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """Return a model's mixture-of-experts layers by name."""
    modules = [model]
    for module in modules:  # called at each step: without any layer, a walk without names is faster
        if isinstance(module, MoE):
            break
        modules += [child for child in module._modules.values() if child is not None]
    else:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


@contextmanager
def recorded(model: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Record the experts that tokens visit in the block.

    Yields:
        A function that returns those of the forward pass since its last call, [N, layers, top_k] on the CPU:
        uint8, or int16 for more than 256 experts.
    """
    found: list[Tensor] = []

    def record(router: Router, given: Any, routes: Routes) -> None:
        found.append(routes.experts.to(torch.uint8 if router.config.num_experts <= 256 else torch.int16))

    def taken() -> Tensor:
        experts = torch.stack(found, 1).cpu()
        found.clear()
        return experts

    with ExitStack() as stack:
        for layer in moe_layers(model).values():
            stack.callback(layer.router.register_forward_hook(record).remove)
        yield taken
