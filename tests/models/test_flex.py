"""Masks of documents in blocks, and attention under them, against the dense way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from titancli.models.blocks import flex
from titancli.models.blocks.attention import attend
from titancli.models.blocks.attention_window import BLOCK, WHOLE, Piece, Reach
from titancli.models.blocks.flex import document_block_mask
from titancli.models.blocks.masks import document_mask, document_masks

REACHES = {
    "whole": WHOLE,
    "window": Reach(window=70),
    "chunks": Reach(chunk=150),
    "both": Reach(window=70, chunk=150),
}
WIDTH, SCALE = 16, 0.3


def documents(rows: int, length: int, device: str = "cpu") -> torch.Tensor:
    """Some long enough for whole blocks, and ids in no order."""
    generator = torch.Generator().manual_seed(length)
    starts = torch.rand(rows, length, generator=generator) < 3 / length
    return ((starts.cumsum(1) * 5) % 7).int().to(device)


@pytest.mark.parametrize("length", [40, 2 * BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_blocks_are_those_that_torch_finds_in_the_dense_mask(reach, length):
    ids = documents(3, length)
    dense = document_mask(ids, reach)
    found = document_block_mask(ids, reach)

    def looked_up(row, head, query, key):
        return dense[row, 0, query, key]

    wanted = create_block_mask(looked_up, 3, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    assert found.seq_lengths == (length, length)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    for kind in ("kv", "full_kv", "q", "full_q"):
        numbers = getattr(found, f"{kind}_num_blocks")
        assert torch.equal(numbers, getattr(wanted, f"{kind}_num_blocks")), kind
        listed = torch.arange(numbers.shape[-1]) < numbers[..., None]
        mine, theirs = (getattr(mask, f"{kind}_indices") for mask in (found, wanted))
        assert torch.equal(mine[listed], theirs[listed]), kind
    row, query, key = torch.meshgrid(*(torch.arange(n) for n in (3, length, length)), indexing="ij")
    assert torch.equal(found.mask_mod(row, 0, query, key), dense[:, 0])


@pytest.mark.parametrize("queries", [range(200), range(300, 515), range(256, 512)], ids=str)
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_the_blocks_of_a_part_of_the_queries_are_a_part_of_the_dense_mask(reach, queries, monkeypatch):
    """As context parallel needs them; and a bool mask of a part is cut out of the whole."""
    ids = documents(3, 643)
    piece = Piece.of(queries, reach)
    whole = document_mask(ids, reach)
    part = whole[:, :, queries.start : queries.stop, piece.keys.start : piece.keys.stop]
    assert not whole[:, :, queries.start : queries.stop, : piece.keys.start].any()
    assert torch.equal(document_mask(ids, reach, piece), part)
    found = document_block_mask(ids, reach, piece)
    sizes = (len(queries), len(piece.keys))

    def looked_up(row, head, query, key):
        return part[row, 0, query, key]

    wanted = create_block_mask(looked_up, 3, None, *sizes, device="cpu", BLOCK_SIZE=BLOCK)
    assert found.seq_lengths == sizes
    for kind in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(getattr(found, f"{kind}_num_blocks"), getattr(wanted, f"{kind}_num_blocks")), kind
    row, query, key = torch.meshgrid(*(torch.arange(n) for n in (3, *sizes)), indexing="ij")
    assert torch.equal(found.mask_mod(row, 0, query, key), part[:, 0])
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, sizes[0], 4, WIDTH), (3, sizes[1], 2, WIDTH), (3, sizes[1], 2, WIDTH)]
    given = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    by_plain_arithmetic(monkeypatch)
    compare(*((attend(*given, mask, scale=SCALE, grouped=True), given) for mask in (found, part)), 1e-5)


def by_plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own for it, operation by operation, and with gradients, which a CPU is else refused."""
    for name, value in {
        "_validate_device": lambda *given: None,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }.items():
        monkeypatch.setattr(f"torch.nn.attention.flex_attention.{name}", value)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return made


def test_no_rank_of_context_parallel_makes_masks_of_whole_rows():
    length, ranks = 4096, 4
    ids, each = documents(1, length), length // ranks // 2
    for rank in range(ranks):
        pieces = [range(n * each, (n + 1) * each) for n in (rank, 2 * ranks - 1 - rank)]
        with Largest() as dense:
            masks = document_masks(ids, pieces)(WHOLE)
        assert sum(mask.numel() for mask in masks) == sum(each * piece.stop for piece in pieces)
        assert dense.bytes <= each * length
        with Largest() as blocks:
            for piece in pieces:
                document_block_mask(ids, WHOLE, Piece.of(piece, WHOLE))
        assert blocks.bytes <= 16 * length


def attention(mask, length: int, kind: str, device: str, dtype: torch.dtype = torch.float32):
    """The attention of all that is drawn alike, and what it was drawn from."""
    draw = torch.Generator().manual_seed(length)
    value_width = 8 if kind == "narrow values" else WIDTH
    shapes = [(2, length, 4, WIDTH), (2, length, 2, WIDTH), (2, length, 2, value_width), (4,)]
    given = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    for tensor in given:
        tensor.requires_grad_()
    q, k, v, sinks = given
    return attend(q, k, v, mask, scale=SCALE, grouped=True, sinks=sinks if kind == "sinks" else None), given


def compare(found, expected, tolerance: float) -> None:
    """Attention and the gradients of what it was drawn from, each a pair as `attention` gives it."""
    weights = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(0)).to(found[0].device)
    given = []
    for out, drawn in (found, expected):
        gradients = torch.autograd.grad((out.float() * weights).sum(), drawn, allow_unused=True)
        given.append((out, *gradients))
    for one, other in zip(*given, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.float() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("kind", ["plain", "sinks", "narrow values"])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_attention_in_blocks_is_that_under_a_dense_mask(reach, kind, monkeypatch):
    """By torch's plain arithmetic for it, which knows gradients though a CPU is refused them."""
    by_plain_arithmetic(monkeypatch)
    length = BLOCK + 31
    ids = documents(2, length)
    found = attention(document_block_mask(ids, reach), length, kind, "cpu")
    compare(found, attention(document_mask(ids, reach), length, kind, "cpu"), 1e-5)


@pytest.mark.parametrize("sinks", [None, torch.zeros(2)], ids=["plain", "sinks"])
def test_heads_are_filled_up_to_the_width_that_a_gpus_kernel_takes(sinks, monkeypatch):
    """torch refuses narrower ones when it compiles for a GPU."""
    asked = []

    def kernel(q, k, v, return_aux=None, **options):
        asked.extend(x.shape[-1] for x in (q, k, v))
        return v if return_aux is None else (v, SimpleNamespace(lse=v[..., 0]))

    monkeypatch.setattr(flex, "flex_attention", kernel)
    mask = document_block_mask(documents(1, 40), WHOLE)
    q, v = torch.ones(1, 40, 2, 12), torch.ones(1, 40, 2, 8)
    out = flex.attend_in_blocks(q, q, v, mask, scale=SCALE, grouped=False, sinks=sinks)
    assert asked == [16, 16, 16] and out.shape == v.shape


def test_a_cpu_has_dense_masks():
    of = document_masks(documents(2, 40))
    assert of(WHOLE).dtype == torch.bool and of(WHOLE) is of(WHOLE)
    assert document_masks(None)(WHOLE) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention runs backward on a GPU only")
@pytest.mark.parametrize("length", [40, 5 * BLOCK + 3])
@pytest.mark.parametrize("kind", ["plain", "sinks", "narrow values"])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_on_a_gpu_attention_and_its_gradients_are_those_under_a_dense_mask(reach, kind, length):
    ids = documents(2, length, "cuda")
    mask = document_masks(ids)(reach)
    assert isinstance(mask, BlockMask)
    found = attention(mask, length, kind, "cuda", torch.bfloat16)
    compare(found, attention(document_mask(ids, reach), length, kind, "cuda"), 2e-2)
