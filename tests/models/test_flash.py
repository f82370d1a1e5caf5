"""Flash attention with its log-sum-exp, sinks and windows; and which kernel is chosen for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from titancli.models.blocks import attention
from titancli.models.blocks.attention import AttentionCall, attend, kernel_of
from titancli.models.blocks.attention_window import WHOLE, Reach
from titancli.models.blocks.flash import (
    Queries,
    attention_forward,
    flash,
    flash_attention,
    flash_backward,
    runs_flash,
)

SCALE = 0.3


def drawn(
    length: int = 12, keys: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """q, k, v and sinks, of two heads of keys for four."""
    draw = torch.Generator().manual_seed(length)
    shapes = [(2, length, 4, 8), (2, keys or length, 2, 8), (2, keys or length, 2, 8), (4,)]
    return [torch.randn(s, generator=draw).to(device, dtype).requires_grad_() for s in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seen: Tensor) -> Tensor:
    """Softmax written out, in fp64; a query that sees nothing gives nothing."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (SCALE * q @ k.transpose(2, 3)).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize("masked", [False, True])
def test_a_sink_by_the_log_sum_exp_equals_one_more_logit(masked: bool) -> None:
    """Output, and gradients of q, k, v and of the sink itself, to rounding in fp32."""
    given = drawn(64)
    q, k, v, sinks = given
    seen = torch.ones(64, 64, dtype=torch.bool).tril()
    if masked:  # some queries see one key
        seen &= torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) < 0.3
        seen |= torch.eye(64, dtype=torch.bool)
    mask = seen[None, None] if masked else None
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(2))
    found = flash_attention(q, k, v, scale=SCALE, causal=not masked, mask=mask, sinks=sinks)
    expected = dense(q, k, v, sinks, seen)
    gradients = [torch.autograd.grad((out * weights).sum(), given) for out in (found, expected)]
    for mine, reference in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        # A sink's is a sum over all queries.
        assert (mine.double() - reference).norm() <= (1e-6 if mine.ndim == 1 else 5e-7) * reference.norm()


@pytest.mark.parametrize("masked", [False, True])
def test_its_gradients_are_those_of_finite_differences(masked: bool) -> None:
    given = drawn(5, dtype=torch.float64)
    mask = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.6 if masked else None

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return flash_attention(q, k, v, scale=SCALE, causal=not masked, mask=mask, sinks=sinks)

    assert torch.autograd.gradcheck(function, given)


def test_a_query_that_sees_nothing_gives_all_to_the_sink() -> None:
    given = drawn(4)
    q, k, v, sinks = given
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 2, :] = False
    found = flash_attention(q, k, v, scale=SCALE, causal=False, mask=mask, sinks=sinks)
    assert not found[:, 2].any()
    for gradient in torch.autograd.grad(found.sum(), given):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_a_sink_of_any_size_is_finite(sink: float) -> None:
    q, k, v, _ = drawn(6)
    sinks = torch.full((4,), sink, requires_grad=True)
    found = flash_attention(q, k, v, scale=SCALE, causal=True, sinks=sinks)
    plain = flash_attention(q, k, v, scale=SCALE, causal=True)
    assert torch.equal(found, plain if sink < 0 else torch.zeros_like(plain))
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), (q, k, v, sinks)))


def test_the_operators_keep_to_what_torch_asks_of_operators() -> None:
    for sinks, mask in ((None, None), (drawn()[3], torch.ones(1, 1, 12, 12, dtype=torch.bool))):
        q, k, v, _ = drawn()
        given = (q, k, v, sinks, mask, mask is None, None, SCALE)
        some = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(attention_forward, given, test_utils=some)


def test_its_operations_are_counted() -> None:
    q, k, v, sinks = drawn()
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v, scale=SCALE, causal=True, sinks=sinks).sum().backward()
    pairs = 2 * 4 * 12 * 12
    assert counter.get_total_flops() == (4 + 10) * pairs * 8


# --------------------------------------------------------------------------------- which kernel for what

HALF, FULL = torch.bfloat16, torch.float32
CHOSEN: dict[str, tuple[AttentionCall, str]] = {
    "causal": (AttentionCall("cuda", HALF, 128, 128), "sdpa"),
    "causal, fp32": (AttentionCall("cuda", FULL, 128, 128), "sdpa"),
    "narrow values (DeepSeek)": (AttentionCall("cuda", HALF, 192, 128), "sdpa"),
    "window": (AttentionCall("cuda", HALF, 64, 64, window=True), "flash"),
    "window, fp32": (AttentionCall("cuda", FULL, 64, 64, window=True), "windows"),
    "chunks (Llama 4)": (AttentionCall("cuda", HALF, 128, 128, chunk=True), "chunks"),
    "chunks in a window": (AttentionCall("cuda", HALF, 128, 128, chunk=True, window=True), "masked"),
    "sinks (gpt-oss)": (AttentionCall("cuda", HALF, 64, 64, sinks=True), "flash"),
    "sinks and window (gpt-oss)": (AttentionCall("cuda", HALF, 64, 64, sinks=True, window=True), "flash"),
    "sinks, fp32": (AttentionCall("cuda", FULL, 64, 64, sinks=True), "flex"),
    "sinks and window, fp32": (AttentionCall("cuda", FULL, 64, 64, sinks=True, window=True), "flex"),
    "documents": (AttentionCall("cuda", HALF, 128, 128, mask="blocks"), "flex"),
    "documents and sinks": (AttentionCall("cuda", HALF, 64, 64, mask="blocks", sinks=True), "flex"),
    "cp": (AttentionCall("cuda", HALF, 128, 128, square=False), "flash"),
    "cp, fp32": (AttentionCall("cuda", FULL, 128, 128, square=False), "masked"),
    "cp, narrow values (DeepSeek)": (AttentionCall("cuda", HALF, 192, 128, square=False), "flash"),
    "cp, wide values": (AttentionCall("cuda", HALF, 64, 128, square=False), "masked"),
    "cp, window": (AttentionCall("cuda", HALF, 64, 64, square=False, window=True), "flash"),
    "cp, sinks and window": (
        AttentionCall("cuda", HALF, 64, 64, square=False, window=True, sinks=True),
        "flash",
    ),
    "cp, chunks": (AttentionCall("cuda", HALF, 128, 128, square=False, chunk=True), "masked"),
    "sampling": (AttentionCall("cuda", HALF, 128, 128, mask="dense"), "sdpa"),
    "sampling a token": (AttentionCall("cuda", HALF, 128, 128, causal=False), "sdpa"),
    "sampling with sinks": (AttentionCall("cuda", HALF, 64, 64, mask="dense", sinks=True), "written out"),
    "CPU": (AttentionCall("cpu", FULL, 64, 64), "sdpa"),
    "CPU, documents": (AttentionCall("cpu", FULL, 64, 64, mask="dense"), "sdpa"),
    "CPU, window": (AttentionCall("cpu", HALF, 64, 64, window=True), "windows"),
    "CPU, chunks": (AttentionCall("cpu", FULL, 64, 64, chunk=True), "chunks"),
    "CPU, sinks": (AttentionCall("cpu", FULL, 64, 64, sinks=True), "flash"),
    "CPU, sinks and documents": (AttentionCall("cpu", FULL, 64, 64, mask="dense", sinks=True), "flash"),
    "CPU, sinks and window": (AttentionCall("cpu", FULL, 64, 64, window=True, sinks=True), "windows"),
    "CPU, cp": (AttentionCall("cpu", FULL, 64, 64, square=False), "masked"),
    "CPU, sampling with sinks": (AttentionCall("cpu", FULL, 64, 64, causal=False, sinks=True), "flash"),
}


@pytest.mark.parametrize(("asked", "kernel"), CHOSEN.values(), ids=CHOSEN)
def test_the_kernel_that_is_chosen(asked: AttentionCall, kernel: str) -> None:
    assert kernel_of(asked) == kernel


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "expected"),
    [
        ("cuda", HALF, (128, 128), True),
        ("cuda", torch.float16, (256, 256), True),
        ("cuda", FULL, (128, 128), False),
        ("cuda", HALF, (192, 128), True),
        ("cuda", HALF, (128, 192), False),
        ("cuda", HALF, (100, 100), False),
        ("cuda", HALF, (512, 512), False),
        ("cpu", HALF, (128, 128), False),
    ],
)
def test_where_flash_attention_runs(
    device: str, dtype: torch.dtype, dims: tuple[int, int], expected: bool
) -> None:
    assert runs_flash(device, dtype, *dims) is expected


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("seen", ["all", "documents", "last token"])
def test_written_out_is_what_it_stands_for(seen: str, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one way of a GPU that a CPU never takes."""
    q, k, v, logits = drawn(1 if seen == "last token" else 6, 6)
    see = torch.ones(6, 6, dtype=torch.bool).tril()[-q.shape[1] :][None, None]
    if seen == "documents":
        see = see & torch.tensor([[0, 0, 1, 1, 1, 2]]).eq(torch.tensor([[0, 0, 1, 1, 1, 2]]).t())
    monkeypatch.setattr(attention, "kernel_of", lambda asked: "written out")
    given = logits if sinks else None
    mask = None if seen == "last token" else see
    found = attend(q, k, v, mask, causal=False, scale=SCALE, grouped=True, sinks=given)
    torch.testing.assert_close(found.double(), dense(q, k, v, given, see), rtol=1e-5, atol=1e-6)


def test_narrow_values_are_filled_up_for_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients are those of the values as they are."""
    given = [*drawn(12)[:2], torch.randn(2, 12, 2, 5, requires_grad=True)]
    weights, found = torch.randn(2, 12, 4, 5), []
    for kernel in ("flash", "written out"):
        monkeypatch.setattr(attention, "kernel_of", lambda asked, kernel=kernel: kernel)
        see = torch.ones(12, 12, dtype=torch.bool).tril()[None, None] if kernel == "written out" else None
        out = attend(*given, see, scale=SCALE, grouped=True)
        found.append((out, *torch.autograd.grad((out * weights).sum(), given)))
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reach", [WHOLE, Reach(window=3), Reach(chunk=4)], ids=["whole", "window", "chunks"])
@pytest.mark.parametrize("sinks", [False, True])
def test_queries_that_are_the_last_of_the_keys(reach: Reach, sinks: bool) -> None:
    given = drawn(5, 11)
    q, k, v, logits = given
    logits_given = logits if sinks else None
    found = attend(q, k, v, None, reach=reach, scale=SCALE, grouped=True, sinks=logits_given)
    expected = dense(q, k, v, logits_given, reach.mask(range(6, 11), range(11), q.device))
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(2))
    some = given if sinks else given[:3]
    gradients = [torch.autograd.grad((out * weights).sum(), some) for out in (found, expected)]
    for mine, reference in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (mine.double() - reference).norm() <= 1e-6 * reference.norm()


class Called(TorchDispatchMode):
    """Operators, and the keyword arguments that each was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] = kwargs or {}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("square", [True, False])
def test_the_gpus_operators_take_what_they_are_given(window: int | None, square: bool) -> None:
    """Torch's own shapes for them, on tensors that are a GPU's in name."""
    with FakeTensorMode(), Called() as called:
        q = torch.empty(2, 4, 8, 64, dtype=HALF, device="cuda")
        k = torch.empty(2, 2, 8 if square else 24, 64, dtype=HALF, device="cuda")
        out, lse = flash(q, k, k, causal=True, window=window, scale=SCALE)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
        grads = flash_backward(Queries(out, q, out, lse), k, k, causal=True, window=window, scale=SCALE)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    name = "_scaled_dot_product_flash_attention" if window is None else "_flash_attention_forward"
    asked = called.found[name]
    assert asked["scale"] == SCALE
    if window is not None:
        assert (asked["window_size_left"], asked["window_size_right"]) == (window - 1, 0)


@pytest.mark.parametrize(
    "name", ["causal", "window", "sinks (gpt-oss)", "sinks and window (gpt-oss)", "cp, window"]
)
def test_on_a_gpu_it_leaves_as_the_operator_that_is_chosen(name: str) -> None:
    """And no mask is made. (Backward of such tensors needs a torch that is built for GPUs.)"""
    asked, kernel = CHOSEN[name]
    with FakeTensorMode(), torch.no_grad(), Called() as called:
        heads = asked.head_dim
        q = torch.empty(1, 16, 4, heads, dtype=asked.dtype, device="cuda")
        k = torch.empty(1, 16 if asked.square else 32, 2, heads, dtype=asked.dtype, device="cuda")
        sinks = torch.empty(4, device="cuda") if asked.sinks else None
        reach = Reach(window=8) if asked.window else WHOLE
        assert attend(q, k, k, None, reach=reach, grouped=True, sinks=sinks).shape == q.shape
    assert ("attention_forward" in called.found) == (kernel == "flash")
    assert kernel != "flash" or not {"where", "masked_fill", "masked_fill_"} & {*called.found}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("keys", [300, 700])
@pytest.mark.parametrize("window", [None, 70])
def test_on_a_gpu_it_is_the_dense_attention(window: int | None, keys: int, sinks: bool) -> None:
    given = drawn(300, keys, HALF, "cuda")
    q, k, v, logits = given
    reach = WHOLE if window is None else Reach(window=window)
    found = attend(q, k, v, None, reach=reach, scale=SCALE, grouped=True, sinks=logits if sinks else None)
    seen = reach.mask(range(keys - 300, keys), range(keys), q.device)
    expected = dense(q, k, v, logits if sinks else None, seen)
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).cuda()
    some = given if sinks else given[:3]
    gradients = [torch.autograd.grad((out * weights).sum(), some) for out in (found, expected)]
    for mine, reference in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (mine.double() - reference.double()).norm() <= 0.02 * reference.double().norm()
