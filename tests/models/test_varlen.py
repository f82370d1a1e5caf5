"""Attention within documents by the kernel of variable lengths, against a dense mask in fp64.

The kernel needs a GPU. Everything around it (bounds, windows, sinks, gradients, compilation) is tried on the
CPU over a stand-in that takes and returns what the kernel does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_flash import SCALE, dense
from titancli.models.blocks import attention, flash
from titancli.models.blocks.attention import AttentionCall, attend, kernel_of
from titancli.models.blocks.attention_window import WHOLE, Reach
from titancli.models.blocks.masks import Documents, document_mask, document_masks
from titancli.protocols.batch import Batch, Spans

HALF = torch.bfloat16
LENGTHS = {
    "one of a token": [[1, 199, 60, 40], [130, 1, 1, 168]],
    "one in a row": [[300], [300]],
    "ragged last": [[128, 128, 44], [299, 1]],
}
"""Tokens of the documents of each row."""
REACHES = {"whole": WHOLE, "window": Reach(window=70), "wide window": Reach(window=1000)}


def ids_of(lengths: list[list[int]]) -> Tensor:
    """Document ids in no order, that begin anew in each row."""
    rows = [
        torch.tensor([n * 5 % 7 for n in range(len(row))]).repeat_interleave(torch.tensor(row))
        for row in lengths
    ]
    return torch.stack(rows).int()


def seen(ids: Tensor) -> Tensor:
    """The ids as the engine passes them on: the host has seen them."""
    ids = ids.clone()
    ids.spans = Spans.of(ids)  # type: ignore[attr-defined]
    return ids


def drawn(ids: Tensor, device: str, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(*ids.shape, heads, 64) for heads in (4, 2, 2)]
    given = [torch.randn(shape, generator=draw).to(HALF) for shape in (*shapes, (4,))]
    return [x.to(device, dtype).requires_grad_() for x in given]


def compare(found: Tensor, expected: Tensor, given: list[list[Tensor]], tolerance: float) -> None:
    """Output, and gradients of `given`, two lists of the same tensors."""
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(HALF)
    both = []
    for out, inputs in zip((found, expected), given, strict=True):
        both.append((out, *torch.autograd.grad((out * weights.to(out)).sum(), inputs)))
    for mine, reference in zip(*both, strict=True):
        reference = reference.double().cpu()
        assert (mine.double().cpu() - reference).norm() <= tolerance * reference.norm()


# ----------------------------------------------------------------------------------------- on every machine


def blocked(q: Tensor, bounds: Tensor, left: int | None) -> Tensor:
    """Which keys each query sees, [tokens, tokens] bool."""
    place = torch.arange(len(q))
    document = torch.searchsorted(bounds.long(), place, right=True)
    there = (document[:, None] == document) & (place <= place[:, None])
    return there if left is None else there & (place >= place[:, None] - left)


def stand_in_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, of_keys: Tensor, longest: int, *rest: Any, **how: Any
) -> tuple[Tensor, ...]:
    """`aten._flash_attention_forward` with bounds, in plain operations."""
    (most, dropout, causal, debug), left = rest, how.get("window_size_left")
    assert (bounds.dtype, bounds[0], bounds[-1]) == (torch.int32, 0, len(q)) and bounds is of_keys
    assert int(bounds.diff().min()) >= 0 and int(bounds.diff().max()) <= longest == most
    assert (dropout, debug, causal) == (0.0, False, left is None)
    assert causal or how["window_size_right"] == 0
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * how["scale"]
    scores = scores.masked_fill(~blocked(q, bounds, left), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return (
        out.to(q.dtype),
        scores.logsumexp(-1).to(torch.promote_types(q.dtype, torch.float32)),
        bounds,
        bounds,
        bounds,
    )


def stand_in_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **how: Any
) -> Any:
    """`aten._flash_attention_backward` with bounds; weights are recomputed from `lse`, as the kernel does."""
    bounds, left, share = rest[0], how.get("window_size_left"), q.shape[1] // k.shape[1]
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
    grad, wide, q, out = (x.double() for x in (grad, k, q, out))
    wide, values = (x.repeat_interleave(share, 1).double() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, wide) * how["scale"]
    weights = (scores - lse.double()[..., None]).exp().masked_fill(~blocked(q, bounds, left), 0.0)
    shared = (grad * out).sum(-1).T[..., None]
    inner = weights * (torch.einsum("qhd,khd->hqk", grad, values) - shared) * how["scale"]
    for_q = torch.einsum("hqk,khd->qhd", inner, wide)
    for_k, for_v = torch.einsum("hqk,qhd->khd", inner, q), torch.einsum("hqk,qhd->khd", weights, grad)
    return for_q.to(k.dtype), *(x.unflatten(1, (-1, share)).sum(2).to(k.dtype) for x in (for_k, for_v))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(
        _flash_attention_forward=stand_in_forward, _flash_attention_backward=stand_in_backward
    )
    monkeypatch.setattr(flash, "_aten", own)
    monkeypatch.setattr(attention, "runs_flash", lambda *given: True)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_it_is_the_dense_attention(lengths: list[list[int]], reach: Reach, sinks: bool) -> None:
    """In fp64: only the order of sums differs."""
    ids = seen(ids_of(lengths))
    mask = document_masks(ids)(reach, HALF)
    assert isinstance(mask, Documents)
    given = drawn(ids, "cpu", torch.float64)
    q, k, v, logits = given
    found = attend(q, k, v, mask, reach=reach, scale=SCALE, grouped=True, sinks=logits if sinks else None)
    expected = dense(q, k, v, logits if sinks else None, document_mask(ids, reach))
    some = given if sinks else given[:3]
    compare(found, expected, [some, some], 1e-12)


def test_bounds_are_where_documents_begin() -> None:
    ids = seen(ids_of([[1, 199, 60, 40], [300]]))
    assert ids.spans == (4, 300)  # type: ignore[attr-defined]
    found = Documents.of(ids, WHOLE, HALF)
    assert found is not None and found.longest == 300
    assert found.bounds.dtype == torch.int32
    assert found.bounds.tolist() == [0, 1, 200, 260, 300, 600, 600, 600, 600]
    of = document_masks(ids)
    assert of(WHOLE, HALF) is of(WHOLE, HALF)


def test_sizes_of_batches_are_few() -> None:
    """As many bounds, and the same longest, for all that differ by less than two."""
    draw, sizes = torch.Generator().manual_seed(0), set()
    for _ in range(50):
        cuts = torch.randint(1, 1024, (int(torch.randint(9, 16, (), generator=draw)),), generator=draw)
        ids = (torch.arange(1024)[:, None] >= cuts.sort().values).sum(1)[None]
        if (found := Documents.of(seen(ids), WHOLE, HALF)) is not None:
            sizes.add((len(found.bounds), found.longest))
    assert len(sizes) <= 6


REFUSED: dict[str, tuple[Any, Reach, torch.dtype | None]] = {
    "chunks": ([[200, 100]], Reach(chunk=64), HALF),
    "fp32": ([[200, 100]], WHOLE, torch.float32),
    "unknown dtype": ([[200, 100]], WHOLE, None),
    "many documents beside a long one": ([[4000, *[30] * 33]], WHOLE, HALF),
    "very many documents": ([[10] * 100], WHOLE, HALF),
}


@pytest.mark.parametrize(("lengths", "reach", "dtype"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_is_not_for(lengths: Any, reach: Reach, dtype: torch.dtype | None) -> None:
    assert Documents.of(seen(ids_of(lengths)), reach, dtype) is None


def test_ids_that_the_host_has_not_seen() -> None:
    ids = ids_of([[200, 100]])
    assert Documents.of(ids, WHOLE, HALF) is None
    assert Documents.of(seen(ids)[:, :200], WHOLE, HALF) is None  # a part is other rows


def test_pieces_of_rows_have_masks_of_their_own() -> None:
    [mask] = document_masks(seen(ids_of([[200, 100]])), [range(150, 300)])(WHOLE, HALF)
    assert not isinstance(mask, Documents)


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        (AttentionCall("cuda", HALF, 128, 128, mask="documents"), "varlen"),
        (AttentionCall("cuda", HALF, 64, 64, mask="documents", sinks=True), "varlen"),
        (AttentionCall("cuda", HALF, 192, 128, mask="documents"), "varlen"),
        (AttentionCall("cuda", HALF, 128, 128, mask="documents", cap=True), "flex"),
        (AttentionCall("cuda", torch.float32, 128, 128, mask="documents"), "flex"),
        (AttentionCall("cuda", HALF, 64, 128, mask="documents"), "flex"),
        (AttentionCall("cuda", HALF, 512, 512, mask="documents"), "flex"),
    ],
)
def test_the_kernel_that_is_chosen(asked: AttentionCall, kernel: str) -> None:
    assert kernel_of(asked) == kernel


def test_layers_that_the_kernel_does_not_take_have_block_masks() -> None:
    """Here on a CPU, where flex attention takes them without gradients."""
    ids = seen(ids_of([[60, 70, 20]]))
    q, k, v = (x.detach() for x in drawn(ids, "cpu", torch.float32)[:3])
    for reach in (WHOLE, Reach(window=30)):
        mask = Documents.of(ids, reach, HALF)
        found = attend(q, k, v, mask, reach=reach, scale=SCALE, grouped=True)
        expected = attend(q, k, v, document_mask(ids, reach), scale=SCALE, grouped=True)
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("stand_in")
def test_compiled_code_is_whole_and_compiled_twice_at_most() -> None:
    """Once for the numbers of the first batch, and once for all."""
    compiled = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Documents | None) -> Tensor:
        return attend(q * 2, k, v, mask, scale=SCALE, grouped=True) + 1

    run = torch.compile(layer, backend=counting, fullgraph=True)
    torch._dynamo.reset()
    for lengths in ([[300]], [[100, 200]], [[1, 1, 98, 100, 100]], [[60] * 5], [[300]], [[38] * 7 + [34]]):
        ids = seen(ids_of(lengths))
        given = [x.detach() for x in drawn(ids, "cpu", torch.float32)[:3]]
        mask = document_masks(ids)(WHOLE, HALF)
        assert isinstance(mask, Documents)
        torch.testing.assert_close(run(*given, mask), layer(*given, mask))
    torch._dynamo.reset()
    assert compiled == 2


def test_a_batch_tells_its_documents_where_it_goes_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of([[1, 199, 60, 40], [300]])
    moved = torch.zeros(0)
    batch = Batch({"tokens": ids.long(), "document_ids": ids})
    assert not hasattr(batch.to("cpu")["document_ids"], "spans")
    assert not hasattr(batch.to("meta")["document_ids"], "spans")

    class There(Tensor):
        is_cuda = True  # type: ignore[assignment]

    there = moved.as_subclass(There)
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **kwargs: there)
    assert batch.to("cuda")["document_ids"].spans == Spans(4, 300)  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------- on a GPU

ON_A_GPU = {
    **{f"{one}, {other}": (LENGTHS[one], REACHES[other], False) for one in LENGTHS for other in REACHES},
    "compiled": (LENGTHS["one of a token"], REACHES["window"], True),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel of variable lengths needs a GPU")
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize(("lengths", "reach", "compiled"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_on_a_gpu_it_is_the_dense_attention(
    lengths: list[list[int]], reach: Reach, compiled: bool, sinks: bool
) -> None:
    """Output and gradients, without waiting for the device."""
    ids = Batch({"document_ids": ids_of(lengths)}).to("cuda")["document_ids"]
    given, exact = drawn(ids, "cuda", HALF), drawn(ids, "cuda", torch.float64)
    some = slice(4 if sinks else 3)

    def layer(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, mask: Any) -> Tensor:
        return attend(q, k, v, mask, reach=reach, scale=SCALE, grouped=True, sinks=logits if sinks else None)

    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = document_masks(ids)(reach, HALF)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(mask, Documents)
    found = (torch.compile(layer, fullgraph=True) if compiled else layer)(*given, mask)
    q, k, v, logits = exact
    expected = dense(q, k, v, logits if sinks else None, document_mask(ids, reach))
    compare(found, expected, [given[some], exact[some]], 2e-2)
