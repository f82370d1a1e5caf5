"""Attention within documents on a GPU: the kernel of variable lengths beside flex attention.

    python benchmarks/documents.py [--length 8192] [--heads 32 8 128]     # under a minute on one GPU
    python benchmarks/documents.py --device cpu                           # its lines, on a short row

Milliseconds of forward and backward of one layer in bf16, the median of `--repeats`, without making masks:
"varlen" and "flex" whether titan would choose them or not, "whole row" causal attention over the whole row by
the kernel that torch prefers. "chosen" is what titan takes. Documents are of equal length, or as in text:
lengths drawn from a log-normal distribution. Printed as JSON Lines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from titancli.models.blocks import masks
from titancli.models.blocks.attention import attend
from titancli.models.blocks.attention_window import WHOLE
from titancli.models.blocks.flex import document_block_mask
from titancli.models.blocks.masks import Documents
from titancli.protocols.batch import Spans

EQUAL = (64, 256, 1024, 4096)
"""Tokens of documents of equal length."""
DRAWN = (400, 1500)
"""Medians of lengths that are drawn; their logarithms have a standard deviation of 1.2."""


def layouts(length: int) -> dict[str, torch.Tensor]:
    """Return document ids of a row, by what they are, [1, length] int32."""
    found = {f"{tokens} each": torch.arange(length) // tokens for tokens in EQUAL if tokens < length}
    draw = torch.Generator().manual_seed(0)
    for median in DRAWN:
        lengths = (torch.randn(length, generator=draw) * 1.2).exp().mul(median).int().clamp(8, length)
        found[f"drawn, median {median}"] = torch.arange(length).repeat_interleave(lengths)[:length]
    return {name: ids[None].int() for name, ids in found.items()}


def milliseconds(run: Callable[[], torch.Tensor], given: list[torch.Tensor], repeats: int) -> float:
    """Return the median time of a forward and backward pass."""
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = run()
        torch.autograd.grad(out, given, torch.ones_like(out))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(torch.tensor(times[2:]).median())


def measured(ids: torch.Tensor, heads: list[int], device: str, repeats: int) -> dict[str, Any]:
    query_heads, kv_heads, width = heads
    spans = Spans.of(ids)
    ids = ids.to(device)
    ids.spans = spans  # type: ignore[attr-defined]
    shapes = [(*ids.shape, count, width) for count in (query_heads, kv_heads, kv_heads)]
    given = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    chosen = Documents.of(ids, WHOLE, torch.bfloat16)
    masks.MOST_STARTED = masks.MOST_DOCUMENTS = 10**9
    forced = Documents.of(ids, WHOLE, torch.bfloat16)
    of = {"varlen": forced, "flex": document_block_mask(ids, WHOLE), "whole row": None}
    found: dict[str, Any] = {"documents": spans.documents, "longest": spans.longest}
    for name, mask in of.items():
        if device == "cuda":
            found[name] = round(
                milliseconds(lambda m=mask: attend(*given, m, grouped=True), given, repeats), 3
            )
        elif name == "flex":
            attend(*(x.detach() for x in given), mask, grouped=True)
    return {**found, "chosen": "flex" if chosen is None else "varlen"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], help="of queries, of keys, width")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    asked = parser.parse_args()
    if asked.device == "cpu":
        asked.length, asked.heads = min(asked.length, 320), [4, 2, 16]
    limits = masks.MOST_STARTED, masks.MOST_DOCUMENTS
    for name, ids in layouts(asked.length).items():
        masks.MOST_STARTED, masks.MOST_DOCUMENTS = limits
        print(
            json.dumps({"row": name, **measured(ids, asked.heads, asked.device, asked.repeats)}), flush=True
        )


if __name__ == "__main__":
    main()
