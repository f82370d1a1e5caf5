"""A dispatcher of its own, as a plugin would have it: every rank gets every visit by an all-gather, computes
those of its experts, and a reduce-scatter brings the results back."""

from __future__ import annotations

from typing import Any

from titancli import component, hookimpl


@component("dispatcher", "gathering", target="gathering:Dispatcher")
class Gathering:
    """All-gather and reduce-scatter."""

    fails_at: int | None = None
    """A call that raises, counted from 0."""


@component("dispatcher", "gathering_here", target="tests.parallel.gathering:Dispatcher")
class GatheringHere(Gathering):
    """The same, as a module of the tests."""


class Dispatcher:
    def __init__(self, config: Gathering, *, group: Any, device: Any, dtype: Any) -> None:
        from titancli.distributed.collectives import Group

        self.group, self.fails_at, self.calls = Group.of(group), config.fails_at, 0

    def __call__(self, visit: Any, compute: Any) -> Any:
        import torch

        from titancli.distributed.collectives import gather, reduce_scatter

        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise ValueError("no way")
        tokens, experts, weights, counts, weigh_first, _ = visit
        weights, top_k = weights.to(tokens.dtype), experts.shape[1]
        x = tokens[:, None].expand(-1, top_k, -1)
        x = gather((x * weights[..., None] if weigh_first else x).reshape(-1, tokens.shape[1]), 0, self.group)
        share = len(counts) // self.group.size
        mine = gather(experts, 0, self.group).flatten() - share * self.group.rank
        here = torch.where((mine >= 0) & (mine < share), mine, share)
        order = here.argsort(stable=True)[: int((here < share).sum())]
        own = torch.zeros(share + 1, dtype=torch.int64, device=x.device)
        own.scatter_add_(0, here, torch.ones_like(here))
        made = compute(x.index_select(0, order), own[:share])
        out = torch.zeros_like(x).index_copy(0, order, made)
        out = reduce_scatter(out, 0, self.group).view(len(tokens), top_k, -1)
        return out.sum(1) if weigh_first else torch.bmm(weights[:, None], out)[:, 0].clone()


@hookimpl
def titan_components() -> list[type]:
    return [Gathering]
