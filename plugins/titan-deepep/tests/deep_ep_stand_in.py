"""A stand-in for the package `deep_ep`: its documented calls, computed by plain collectives on CPUs.

It takes what `Buffer` of DeepEP takes (arguments, dtypes and shapes as in `deep_ep/buffers/legacy.py` of
version 2.1.0 and `deep_ep/buffer.py` of version 1.2.1, which are equal in these), returns what that returns,
and refuses all else. It shows that titan's calls are those, and that what is built of them is right; it shows
nothing about DeepEP's kernels.
"""

from __future__ import annotations

import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CALLS: list[str] = []


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks > 8 and num_ranks % 8 == 0
        return hidden_bytes * num_ranks


class Buffer:
    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.group_size, self.rank = group, group.size(), group.rank()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        CALLS.append("Buffer")

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16)
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == topk_idx_t
        share = num_experts // self.group_size
        visited = torch.nn.functional.one_hot(topk_idx, num_experts).sum(1)
        in_rank = visited.view(len(topk_idx), self.group_size, share).sum(2) > 0
        return in_rank.sum(0).int(), None, visited.sum(0).int(), in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
    ) -> tuple[Any, ...]:
        self._check(x)
        CALLS.append("dispatch")
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            sent, received, places, _ = handle
            return self._exchange(x[places], sent, received), None, None, None, None, None
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and is_token_in_rank is not None
        assert num_tokens_per_rdma_rank is None
        assert is_token_in_rank.dtype == torch.bool and topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous() and topk_weights.shape == topk_idx.shape
        sent = num_tokens_per_rank.tolist()
        everyone = [torch.zeros_like(num_tokens_per_rank) for _ in range(self.group_size)]
        dist.all_gather(everyone, num_tokens_per_rank, self.group)
        received = [int(row[self.rank]) for row in everyone]
        places = torch.cat([is_token_in_rank[:, rank].nonzero()[:, 0] for rank in range(self.group_size)])
        share = len(num_tokens_per_expert) // self.group_size
        chosen = self._exchange(topk_idx[places], sent, received) - self.rank * share
        elsewhere = (chosen < 0) | (chosen >= share)
        weights = self._exchange(topk_weights[places], sent, received)
        chosen, weights = chosen.masked_fill(elsewhere, -1), weights.masked_fill(elsewhere, 0.0)
        counts = [int((chosen == expert).sum()) for expert in range(share)]
        out = self._exchange(x[places], sent, received)
        return out, chosen, weights, counts, (sent, received, places, len(x)), None

    def combine(
        self, x: Tensor, handle: tuple[Any, ...], topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        self._check(x)
        CALLS.append("combine")
        sent, received, places, tokens = handle
        assert len(x) == sum(received)
        out = torch.zeros(tokens, x.shape[1])
        out.index_add_(0, places, self._exchange(x, received, sent).float())
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
            assert len(topk_weights) == len(x)
            weights = torch.zeros(tokens, topk_weights.shape[1])
            weights.index_add_(0, places, self._exchange(topk_weights, received, sent))
        return out.to(x.dtype), weights, None

    def _check(self, x: Tensor) -> None:
        assert x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16
        assert x.shape[1] * x.element_size() % 16 == 0
        assert x.shape[1] * x.element_size() * self.group_size <= self.num_nvl_bytes

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out


topk_idx_t = torch.int64


def module() -> Any:
    made: Any = types.ModuleType("deep_ep")
    made.__spec__ = ModuleSpec("deep_ep", None)
    made.Buffer, made.Config, made.topk_idx_t = Buffer, Config, topk_idx_t
    return made
