"""A model with a cache says what it says without one."""

from __future__ import annotations

import pytest
import torch

from tests.generate.models import VARIANTS, feed, small, tokens
from titancli.models.blocks.cache import KVCache, LayerCache, PageTable

CLOSE = dict(atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_logits_equal_uncached_ones(variant: str) -> None:
    model, text = small(variant), tokens(3, 24)
    whole = model(text)
    cache = model.new_cache()
    rows = [cache.begin() for _ in text]
    # a prompt, some tokens at once after it, then one at a time
    cuts = [7, 12, *range(13, 25)]
    for start, end in zip([0, *cuts], cuts, strict=False):
        logits = feed(model, cache, rows, list(text[:, start:end]))
        assert logits.shape == (3, 128)
        torch.testing.assert_close(logits, whole[:, end - 1], **CLOSE)


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@torch.no_grad()
def test_rows_begin_and_end_while_others_go_on(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of rows that have ended are those of rows that begin."""
    monkeypatch.setattr("titancli.models.blocks.cache.PAGE", page)
    model, text = small(), tokens(6, 40)
    whole = model(text)
    cache, at = model.new_cache(), {}
    for step in range(40):
        if step % 5 == 0 and len(at) < 6 and step // 5 < 6:
            at[step // 5] = (cache.begin(), 0)
        if step == 22:
            cache.close(at.pop(1)[0])
            cache.close(at.pop(0)[0])
        counts = {n: 1 if done else n + 1 for n, (_, done) in at.items()}
        pieces = [text[n, at[n][1] : at[n][1] + count] for n, count in counts.items()]
        logits = feed(model, cache, [at[n][0] for n in counts], pieces)
        at = {n: (row, done + counts[n]) for n, (row, done) in at.items()}
        wanted = torch.stack([whole[n, done - 1] for n, (_, done) in at.items()])
        torch.testing.assert_close(logits, wanted, **CLOSE)
    assert {row for row, _ in at.values()} == {0, 2, 3, 4}, "the first of the free numbers"


@torch.no_grad()
def test_rows_that_began_as_one_share_its_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titancli.models.blocks.cache.PAGE", 4)
    model, text = small(), tokens(3, 16)
    text[:, :10] = text[0, :10]
    whole = model(text)
    cache = model.new_cache()
    first = cache.begin()
    feed(model, cache, [first], [text[0, :10]])
    assert cache.table.in_use == 3
    rows = [first, *cache.fork(first, 2)]
    assert cache.table.in_use == 2 + 3, "two whole ones for all, and of the third each its own"
    for at in range(10, 16):
        torch.testing.assert_close(
            feed(model, cache, rows, list(text[:, at : at + 1])), whole[:, at], **CLOSE
        )
    for row in rows:
        assert cache.table.in_use > 0
        cache.close(row)
    assert cache.table.in_use == 0


def test_pages_are_taken_as_rows_need_them_and_used_again() -> None:
    table = PageTable(4)
    first, second = table.begin(), table.begin()
    assert [*table.grow(first, 9)] == [*range(9)] and table.total == 3
    assert [*table.grow(second, 1)] == [0] and table.total == 4
    assert table.grow(first, 3) == range(9, 12) and table.total == 4
    table.close(first)
    assert table.begin() == first and table.in_use == 1
    table.grow(first, 12)
    assert table.total == 4
    new, copied = table.fork(first)
    assert copied is None and table.in_use == 4, "all of its pages are whole"
    table.close(first)
    assert table.in_use == 4
    table.close(new)
    assert table.in_use == 1


def test_memory_has_the_dtype_of_what_comes_and_is_that_of_its_tokens() -> None:
    class Layer:
        reach = ()

    cache = KVCache({"0": Layer()})
    layer = cache.layers["0"]
    assert isinstance(layer, LayerCache)
    keys = torch.zeros(1, 40, 1, 4, dtype=torch.bfloat16)
    call = cache.extend([cache.begin()], [40], torch.device("cpu"))
    layer.attend(call, keys, keys, keys, (), lambda q, k, v, mask, causal: v)
    (memory, _) = layer._memory
    assert (memory.dtype, memory.shape) == (torch.bfloat16, (3, 16, 1, 4))
