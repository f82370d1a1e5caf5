"""A callback under which tokens go to the experts of two ranks in numbers that differ from call to call, with
none at all among them: on the null device a router's own are not there to be read."""

from __future__ import annotations

import struct
from typing import Any

import torch.distributed as dist

from tests.null_gpu.device import reads
from titancli import component, hookimpl


@component("callback", "uneven", target="uneven:Uneven")
class Config:
    """Numbers of tokens that two ranks exchange."""

    visitors: int
    """Those that a rank sends in a call: its tokens, times the experts of each."""


class Uneven:
    def __init__(self, config: Any, *, engine: Any, run: Any) -> None:
        every, self.calls = config.visitors, 0
        self.to_first = [(every, every), (0, 0), (every // 3, every // 5), (0, every), (every - 1, 1)]
        self.every, self.rank = every, dist.get_rank()
        self.reading = reads(self.answer)  # to the end of the process
        self.reading.__enter__()

    def answer(self, size: int) -> bytes | None:
        """Return what `titancli.parallel.expert` reads: how many go to each rank, and come from each."""
        if size != 4 * 8:
            return None
        to_first = self.to_first[self.calls % len(self.to_first)]
        self.calls += 1
        sent = [(first, self.every - first) for first in to_first]
        return struct.pack("4q", *sent[self.rank], *(one[self.rank] for one in sent))

    def step_applied(self, step: Any) -> dict[str, Any]:
        if not self.calls:
            raise RuntimeError("the numbers of tokens were not read")
        return {}


titan_components = hookimpl(lambda: [Config], specname="titan_components")
