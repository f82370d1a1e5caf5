"""The door of attention against softmax written out, whatever a token sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models.specs import attention as spec
from titancli.distributed.collectives import Group
from titancli.models.blocks import attention
from titancli.models.blocks.attention import Attention, HeadsNorm, attend
from titancli.models.blocks.attention_window import WHOLE, Reach, document_positions
from titancli.models.blocks.cache import KVCache
from titancli.models.blocks.masks import document_mask

REACHES = {
    "whole": WHOLE,
    "window": Reach(window=5),
    "window of one": Reach(window=1),
    "chunks": Reach(chunk=8),
    "both": Reach(window=6, chunk=8),
}


def written_out(
    q, k, v, seen: Tensor, scale: float, sinks: Tensor | None, cap: float | None = None
) -> Tensor:
    """[B, S, heads, value_dim] in fp64, by a matrix of all queries and keys."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = scale * q @ k.transpose(2, 3)
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, column), -1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


def who_sees_whom(documents: Tensor, reach: Reach) -> Tensor:
    """[B, 1, S, S] bool, pair by pair."""
    rows, length = documents.shape
    seen = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row, ids in enumerate(documents.tolist()):
        for query in range(length):
            begin = ids.index(ids[query])
            for key in range(begin, query + 1):
                near = reach.window is None or query - key < reach.window
                together = (
                    reach.chunk is None or (query - begin) // reach.chunk == (key - begin) // reach.chunk
                )
                seen[row, 0, query, key] = near and together
    return seen


@pytest.mark.parametrize("length", [7, 24, 29])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("kind", ["plain", "sinks", "narrow values", "capped", "capped, sinks"])
def test_attention_and_its_gradients_are_those_of_softmax_written_out(kind, reach, documents, length):
    draw = torch.Generator().manual_seed(length)
    ids = torch.zeros(2, length, dtype=torch.int64)
    if documents:
        ids = torch.randint(0, 3, (2, length), generator=draw).sort().values
    width = 8 if kind == "narrow values" else 16
    shapes = [(2, length, 4, 16), (2, length, 2, 16), (2, length, 2, width), (4,)]
    given = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    q, k, v, sinks = given
    weights = torch.randn(2, length, 4, width, generator=draw)
    scale, cap = 0.3, 0.7 if "capped" in kind else None
    given_sinks = sinks if "sinks" in kind else None
    expected = written_out(q, k, v, who_sees_whom(ids, reach), scale, given_sinks, cap)
    wanted = torch.autograd.grad((expected * weights).sum(), given, allow_unused=True)
    mask = document_mask(ids, reach) if documents else None
    found = attend(q, k, v, mask, reach=reach, scale=scale, grouped=True, sinks=given_sinks, cap=cap)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((found * weights).sum(), given, allow_unused=True)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            # a window of one gives queries no gradient at all
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm().clamp(min=1)


def test_positions_begin_anew_with_each_document():
    ids = torch.tensor([[4, 4, 4, 1, 2, 2], [0, 0, 0, 0, 0, 0]])
    assert document_positions(ids).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_no_row_by_row_matrix_is_made_where_a_token_sees_few():
    """Chunks and windows of a long row are many short ones: memory grows with the length, not its square."""
    length = 1 << 15
    q = torch.randn(1, length, 1, 8)
    for reach in (Reach(window=32), Reach(chunk=32)):
        out = attend(q, q, q, None, reach=reach)  # 2 GiB of numbers, were it a matrix
        last = attend(q[:, -64:], q[:, -64:], q[:, -64:], None, reach=reach)
        torch.testing.assert_close(out[:, -32:], last[:, -32:])


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_cache_gives_what_the_whole_row_gives(reach, sinks, page):
    """Of rows that begin in different calls, with several tokens after others, in pages of any size."""
    torch.manual_seed(0)
    module = Attention(spec(32, 4, 2, 8, window=reach.window, chunk=reach.chunk, sinks=sinks))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 20, 32)
    cos, sin = torch.ones(1, 40, 1, 4), torch.zeros(1, 40, 1, 4)
    cache = KVCache({"0": module}, page)
    rows, done, found = [cache.begin(), cache.begin()], [0, 0], ([], [])
    with torch.no_grad():
        whole = module(x, cos[:, :20], sin[:, :20], None)
        for counts in [(9, 0), (1, 7), (1, 1), (5, 1), (1, 4), (1, 1), (1, 1), (1, 5)]:
            asked = [n for n in (0, 1) if counts[n]]
            call = cache.extend([rows[n] for n in asked], [counts[n] for n in asked], x.device)
            parts = [x[n, done[n] : done[n] + counts[n]] for n in asked]
            length = sum(map(len, parts))
            out = module(torch.cat(parts)[None], cos[:, :length], sin[:, :length], None, call.of("0"))
            for n, part in zip(asked, out[0].split([len(p) for p in parts]), strict=True):
                done[n] += len(part)
                found[n].append(part)
    for row in (0, 1):
        torch.testing.assert_close(torch.cat(found[row]), whole[row], rtol=1e-5, atol=1e-5)


def test_a_norm_over_all_heads_is_the_same_where_ranks_have_some_each(monkeypatch):
    """With gradients, in float64: the reduction of all ranks' squares is all that is between them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    whole = HeadsNorm(24, eps=1e-3, dtype=torch.float64)
    torch.nn.init.normal_(whole.weight, generator=draw)
    pieces = x.chunk(2, 2)
    squares = [piece.flatten(-2).square().sum(-1, keepdim=True) for piece in pieces]
    monkeypatch.setattr(attention, "gather", lambda mine, dim, group: torch.cat(squares, dim))
    parts = []
    for rank, (piece, weight) in enumerate(zip(pieces, whole.weight.chunk(2), strict=True)):
        part = HeadsNorm(12, eps=1e-3, dtype=torch.float64)
        part.tensor_parallel(Group("none", 2, rank), "column")
        del part.weight
        part.weight = weight
        parts.append(part(piece))
    found, expected = torch.cat(parts, 2), whole(x)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    one, other = (torch.autograd.grad(out.pow(3).sum(), (x, whole.weight)) for out in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
