"""Tokens to the experts of other ranks and back, by the `Buffer` of the package `deep_ep`.

A token travels once to each rank that has experts for it, with the numbers and weights of these; the rank
adds up their outputs, and the way back adds up the sums of the ranks. The gradient of a dispatch is a combine
and that of a combine a dispatch, of the same handle. Of the package only what its documentation describes is
used: `get_dispatch_layout`, `dispatch`, `combine` and the size hints of its `Config`.
Source: DeepEP (https://github.com/deepseek-ai/DeepEP), "normal kernels" of docs/legacy.md.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_deepep import DeepEP as Config
from titan_deepep.package import KEY, deep_ep
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols import Visit

NODE = 8
"""Ranks that reach each other by NVLink; larger groups consist of whole nodes."""
CAPABILITY = (9, 0)


class DeepEP:
    """A dispatcher, see `titancli.protocols.Dispatcher`.

    Raises:
        RecipeError: the device or the dtype is none that DeepEP computes with, or the package is not there.
        EnvironmentProblem: the ranks of the group are spread over nodes in another way than DeepEP's.
    """

    def __init__(
        self, config: Config, *, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        if (fault := device_fault(device)) is not None:
            raise RecipeError(f"{KEY}: {fault}", hint='use "all_to_all"')
        if dtype != torch.bfloat16:
            raise RecipeError(f"{KEY}: it sends bfloat16, not {dtype}", hint='use "all_to_all"')
        self._package = deep_ep()
        require_whole_nodes(group)
        self._group, self._num_sms = group, config.num_sms
        self._buffer: Any = None

    def __call__(self, visit: Visit, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See `titancli.protocols.Dispatcher`."""
        tokens, experts, weights, counts, weigh_first, _ = visit
        journey = _Journey(self._for(tokens), len(counts))
        experts = experts.to(getattr(self._package, "topk_idx_t", torch.int64))
        x, factors, chosen = _Dispatch.apply(tokens, weights.float(), experts, journey)
        order, here = _by_expert(chosen, len(counts) // self._group.size(), sum(journey.received))
        rows = order // chosen.shape[1]
        factors = factors.flatten().index_select(0, order).to(x.dtype)[:, None]
        out = _Copies.apply(x, rows)
        out = compute(out * factors, here) if weigh_first else compute(out, here) * factors
        return _Combine.apply(_Sums.apply(out, rows, len(x)), journey)

    def _for(self, tokens: Tensor) -> Any:
        """Return the buffer, which is made for the first tokens, and anew for wider ones. Collective."""
        made, size, row = self._package.Buffer, self._group.size(), tokens.shape[1] * tokens.element_size()
        made.set_num_sms(self._num_sms)
        configs = made.get_dispatch_config(size), made.get_combine_config(size)
        near = max(config.get_nvl_buffer_size_hint(row, size) for config in configs)
        far = max(config.get_rdma_buffer_size_hint(row, size) for config in configs) if size > NODE else 0
        if self._buffer is None or self._buffer.num_nvl_bytes < near or self._buffer.num_rdma_bytes < far:
            self._buffer = made(self._group, near, far)
        return self._buffer


def device_fault(device: torch.device) -> str | None:
    """Return why DeepEP cannot compute on a device; None if it can."""
    if device.type != "cuda":
        return f"it needs GPUs, but this is a {device.type}"
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"it needs Hopper or newer, but this is a {torch.cuda.get_device_name(device)}"
    return None


def require_whole_nodes(group: dist.ProcessGroup) -> None:
    """Check that each node has up to 8 neighbouring ranks, of several nodes exactly 8. Collective.

    Raises:
        EnvironmentProblem: it has not.
    """
    size = group.size()
    nodes: list[Any] = [None] * size
    dist.all_gather_object(nodes, platform.node(), group)
    apart = [set(nodes[first : first + NODE]) for first in range(0, size, NODE)]
    if any(len(names) > 1 for names in apart) or len(set().union(*apart)) < len(apart):
        raise EnvironmentProblem(
            f"{KEY}: the {size} ranks of mesh.ep are on the nodes {', '.join(nodes)}, but DeepEP needs "
            f"groups within one node, or of whole nodes with {NODE} ranks each",
            hint=f'start {NODE} ranks on each node, make mesh.ep smaller, or use "all_to_all"',
        )


@dataclass
class _Journey:
    """One dispatch, and what its way back needs."""

    buffer: Any
    experts: int
    """Of all ranks."""
    handle: Any = None
    received: list[int] = field(default_factory=list)
    """Visits of each expert of this rank."""


class _Dispatch(torch.autograd.Function):
    """[N, dim] and weights [N, top_k] to the tokens that this rank receives, [R, dim], their weights, and
    which of its experts they visit, [R, top_k], -1 where that expert is on another rank."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, experts: Tensor, journey: _Journey
    ) -> tuple[Tensor, Tensor, Tensor]:
        buffer, experts = journey.buffer, experts.contiguous()
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, journey.experts)
        x, chosen, factors, journey.received, journey.handle, _ = buffer.dispatch(
            tokens.contiguous(),
            topk_idx=experts,
            topk_weights=weights.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.journey = journey
        ctx.mark_non_differentiable(chosen)
        return x, factors, chosen

    @staticmethod
    def backward(ctx: Any, x: Tensor, factors: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None]:
        journey = ctx.journey
        tokens, weights, _ = journey.buffer.combine(
            x.contiguous(), journey.handle, topk_weights=factors.contiguous()
        )
        return tokens, weights, None, None


class _Combine(torch.autograd.Function):
    """[R, dim] of received tokens to the sums over ranks of this rank's own tokens, [N, dim]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        out: Tensor = journey.buffer.combine(x.contiguous(), journey.handle)[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        journey = ctx.journey
        return journey.buffer.dispatch(grad.contiguous(), handle=journey.handle)[0], None


def _by_expert(chosen: Tensor, experts: int, visits: int) -> tuple[Tensor, Tensor]:
    """Return the places in `chosen`, flattened, of the visits by expert, and the visits of each expert."""
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)[len(flat) - visits :]
    counts = flat.new_zeros(experts + 1).scatter_add_(0, flat + 1, torch.ones_like(flat))
    return order, counts[1:]  # on the device: the first is for experts elsewhere


class _Copies(torch.autograd.Function):
    """Rows of x by number; their gradients are added up in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.length = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _sums(grad, rows, ctx.length), None


class _Sums(torch.autograd.Function):
    """The reverse: the rows of x that have the same number, added up in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(rows)
        return _sums(x, rows, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None


def _sums(x: Tensor, rows: Tensor, length: int) -> Tensor:
    sums = torch.zeros(length, x.shape[1], dtype=torch.float32, device=x.device)
    return sums.index_add_(0, rows, x.float()).to(x.dtype)
