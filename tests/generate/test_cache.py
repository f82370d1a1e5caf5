"""A model with a cache says what it says without one."""

from __future__ import annotations

import pytest
import torch

from tests.generate.models import VARIANTS, small, tokens
from titancli.models.blocks.cache import KVCache, LayerCache
from titancli.models.blocks.reach import WHOLE

CLOSE = dict(atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_logits_equal_uncached_ones(variant: str) -> None:
    model, text = small(variant), tokens(3, 24)
    whole = model(text)
    cache = model.new_cache(24)
    # a prompt, some tokens at once after it, then one at a time
    cuts = [7, 12, *range(13, 25)]
    for start, end in zip([0, *cuts], cuts, strict=False):
        logits = model(text[:, start:end], cache=cache)
        assert logits.shape == (3, 1, 128)
        torch.testing.assert_close(logits[:, 0], whole[:, end - 1], **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_rows_of_unequal_length_do_not_see_their_padding(variant: str) -> None:
    model, text = small(variant), tokens(4, 20)
    whole = model(text)
    lengths = [3, 9, 1, 6]
    padding = torch.tensor([9 - length for length in lengths])
    prompts = torch.full((4, 9), 77)
    for row, length in enumerate(lengths):
        prompts[row, 9 - length :] = text[row, :length]
    cache = model.new_cache(16, padding)
    last = [length - 1 for length in lengths]
    torch.testing.assert_close(model(prompts, cache=cache)[:, 0], whole[range(4), last], **CLOSE)
    for step in range(1, 4):
        new = torch.stack([text[row, length - 1 + step] for row, length in enumerate(lengths)])[:, None]
        wanted = whole[range(4), [length - 1 + step for length in lengths]]
        torch.testing.assert_close(model(new, cache=cache)[:, 0], wanted, **CLOSE)


@pytest.mark.parametrize("padding", [None, [0, 2, 4]])
@torch.no_grad()
def test_selected_rows_go_on_as_themselves(padding: list[int] | None) -> None:
    model, text = small(), tokens(3, 12)
    caches = [model.new_cache(12, torch.tensor(padding) if padding else None) for _ in range(2)]
    for cache in caches:
        model(text[:, :8], cache=cache)
    rows = torch.tensor([2, 0, 0])
    caches[1].select(rows)
    for at in range(8, 12):
        all_rows = model(text[:, at : at + 1], cache=caches[0])
        selected = model(text[rows, at : at + 1], cache=caches[1])
        torch.testing.assert_close(selected, all_rows[rows], **CLOSE)


def test_a_cache_takes_the_dtype_of_what_comes_and_no_more_memory_than_it_needs() -> None:
    cache = LayerCache(10)
    keys = torch.zeros(2, 3, 1, 4, dtype=torch.bfloat16)
    found, _ = cache.append(keys, keys)
    assert (found.dtype, found.shape) == (torch.bfloat16, (2, 3, 1, 4))
    assert found.untyped_storage().nbytes() == 2 * 10 * 1 * 4 * 2


def test_a_mask_is_made_only_where_one_is_needed() -> None:
    cpu = torch.device("cpu")
    cache = KVCache({}, 8)
    assert cache.advance(4, cpu)[1](WHOLE) is None
    assert cache.advance(1, cpu)[1](WHOLE) is None
    positions, mask_of = cache.advance(2, cpu)
    assert positions.tolist() == [[5, 6]]
    mask = mask_of(WHOLE)
    assert mask is not None and mask[0, 0].tolist() == [[True] * 6 + [False], [True] * 7]
