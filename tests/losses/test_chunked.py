"""The chunked losses against torch's cross-entropy on the full logits, and against finite differences."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, log_softmax

from tests.programs import INDUCTOR
from tests.rows import rows
from titancli.errors import RecipeError
from titancli.losses import chunked
from titancli.losses.chunked import (
    entropy,
    linear_log_probs,
    linear_log_probs_and_entropy,
    linear_token_loss,
)
from titancli.models.blocks.head import Output
from titancli.parallel.compile import check_inductor
from titancli.planning.meter import Meter
from titancli.protocols import LossDefaults
from titancli.protocols.batch import Batch
from titancli.protocols.result import LossResult

VOCABULARY, DIM = 50, 8


def problem(rows=13, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, DIM, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    targets[::4] = -100
    return hidden, weight, targets


def reference(hidden, weight, targets, coefficients):
    """Σ c·log p on the full logits, in fp64 where the inputs allow it to be told apart."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_probs = log_softmax(hidden @ weight.t(), dim=-1)
    picked = log_probs.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(targets < 0, 0.0)
    (picked * coefficients).sum().backward()
    return picked.detach(), hidden.grad, weight.grad


@pytest.fixture(params=[1, 3, 13, 1000], ids=lambda rows: f"{rows} rows a chunk")
def chunk(request, monkeypatch):
    monkeypatch.setitem(chunked.CHUNK_BYTES, "cpu", 4 * VOCABULARY * request.param)


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def close(result, expected, dtype):
    assert result.dtype in (dtype, torch.float32)
    error = (result.double() - expected.double()).norm() / expected.double().norm()
    assert error <= TOLERANCE[dtype], f"off by {error:.2e}"


def test_rows_of_which_there_are_none_have_a_gradient_of_zero():
    torch.use_deterministic_algorithms(True)  # what is not initialised is NaN
    try:
        for loss in (lambda h, w, t: linear_token_loss(h, w, t, torch.ones(0))[0], linear_log_probs):
            hidden, weight, targets = problem(rows=0)
            loss(hidden, weight, targets).sum().backward()
            assert torch.equal(weight.grad, torch.zeros_like(weight))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_token_loss_equals_the_full_logits(chunk, dtype):
    hidden, weight, targets = problem(dtype=dtype)
    coefficients = torch.rand(13) * (targets >= 0)
    total, log_probs = linear_token_loss(hidden, weight, targets, coefficients)
    (3.0 * total).backward()
    expected, grad_hidden, grad_weight = reference(hidden, weight, targets, -3.0 * coefficients)
    close(log_probs, expected, dtype)
    close(total.detach(), -(expected * coefficients).sum(), dtype)
    close(hidden.grad, grad_hidden, dtype)
    close(weight.grad, grad_weight, dtype)
    assert not log_probs.requires_grad


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_graph_that_is_kept_gives_its_gradients_again(dtype):
    """Pipeline schedules that split backward ask for the hidden states' and then for the weight's."""
    hidden, weight, targets = problem(dtype=dtype)
    total, _ = linear_token_loss(hidden, weight, targets, (targets >= 0).float())
    _, grad_hidden, grad_weight = reference(hidden, weight, targets, -1.0)
    (first,) = torch.autograd.grad(total, hidden, retain_graph=True)
    kept = first.clone()
    for scale in (1.0, 3.0):
        (found,) = torch.autograd.grad(total, weight, torch.tensor(scale), retain_graph=True)
        close(found, scale * grad_weight, dtype)
    close(first, grad_hidden, dtype)
    assert torch.equal(first, kept)
    torch.autograd.grad(total, weight)
    with pytest.raises(RuntimeError, match="used only once, without retain_graph"):
        torch.autograd.grad(total, weight)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_log_probs_equal_the_full_logits(chunk, dtype):
    hidden, weight, targets = problem(dtype=dtype)
    log_probs = linear_log_probs(hidden, weight, targets)
    coefficients = torch.randn(13, generator=torch.Generator().manual_seed(1))
    (log_probs * coefficients).sum().backward()
    expected, grad_hidden, grad_weight = reference(hidden, weight, targets, coefficients)
    close(log_probs.detach(), expected, dtype)
    close(hidden.grad, grad_hidden, dtype)
    close(weight.grad, grad_weight, dtype)


def test_gradients_equal_finite_differences():
    hidden, weight, targets = problem(rows=3)
    coefficients = torch.tensor([0.3, 1.0, 2.0]) * (targets >= 0)
    for function in (
        lambda h, w: linear_token_loss(h, w, targets, coefficients)[0],
        lambda h, w: (linear_log_probs(h, w, targets) * coefficients).sum(),
    ):
        gradients = torch.autograd.grad(function(hidden, weight), (hidden, weight))
        generator = torch.Generator().manual_seed(3)
        for along in range(5):
            steps = [torch.randn(g.shape, generator=generator) for g in gradients]
            with torch.no_grad():
                up, down = (
                    function(*(x + sign * 1e-2 * d for x, d in zip((hidden, weight), steps, strict=True)))
                    for sign in (1, -1)
                )
            slope = sum((g * d).sum() for g, d in zip(gradients, steps, strict=True))
            torch.testing.assert_close(
                (up - down) / 2e-2, slope, rtol=1e-2, atol=1e-2, msg=f"direction {along}"
            )


@pytest.mark.parametrize("weights", [torch.zeros(13), torch.ones(13), torch.full((13,), torch.nan)])
def test_rows_without_a_target_give_no_gradient(weights):
    hidden, weight, targets = problem()
    targets[:] = -100
    total, _ = linear_token_loss(hidden, weight, targets, weights)
    (total + linear_log_probs(hidden, weight, targets).sum()).backward()
    assert total == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_gradients_are_made_only_for_what_wants_them():
    hidden, weight, targets = problem()
    frozen = weight.detach()
    for total in (
        linear_token_loss(hidden, frozen, targets, torch.ones(13))[0],
        linear_log_probs(hidden, frozen, targets).sum(),
    ):
        hidden.grad = None
        total.backward()
        assert hidden.grad is not None


def test_an_evaluation_makes_no_gradients(monkeypatch):
    monkeypatch.setattr(chunked._Gradients, "add", lambda *_: pytest.fail("a gradient that nobody wants"))
    hidden, weight, targets = problem()
    with torch.no_grad():
        assert not linear_token_loss(hidden, weight, targets, torch.ones(13))[0].requires_grad


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("function", [linear_token_loss, linear_log_probs])
def test_one_chunk_is_in_memory_at_a_time(function, dtype, monkeypatch):
    """Nothing of a chunk is left when the next one begins."""

    def peak(rows):
        monkeypatch.setitem(chunked.CHUNK_BYTES, "cpu", 4 * VOCABULARY * rows)
        hidden, weight, targets = problem(rows=3000, dtype=dtype)
        weights = (torch.ones(3000),) if function is linear_token_loss else ()
        with Meter() as meter:
            found = function(hidden, weight, targets, *weights)
            (found[0] if weights else found.sum()).backward()
        return meter.peak

    chunks = (peak(1000) - peak(500)) / (4 * VOCABULARY * 500)
    # Where a test before has compiled something, CPython may hold the logits in bfloat16 for longer, half a
    # chunk. Another chunk would be 1 more, in either dtype.
    assert chunks < {torch.float32: 1.4, torch.bfloat16: 2.3}[dtype]


def test_large_logits_do_not_overflow():
    hidden, weight, targets = problem()
    hidden = (hidden.detach() * 1e4).requires_grad_()
    total, _ = linear_token_loss(hidden, weight, targets, (targets >= 0).float())
    total.backward()
    expected = cross_entropy((hidden @ weight.t()).detach(), targets, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(total.detach(), expected)
    assert hidden.grad.isfinite().all()


def test_the_head_takes_each_kind_of_loss():
    from titancli.losses.cross_entropy import CrossEntropy, CrossEntropyFull

    class Untold(CrossEntropy):
        """A loss that does not say that it is linear in the log-probs."""

        def token_weights(self, batch):
            return None

    head = Output(DIM, VOCABULARY)
    hidden, _, targets = problem(rows=12)
    hidden = hidden.detach().view(2, 6, DIM).requires_grad_()
    batch = Batch({"targets": targets.view(2, 6)})
    results = []
    for loss in (CrossEntropyFull(), CrossEntropy(), Untold()):
        head.zero_grad()
        hidden.grad = None
        result = head(hidden, batch, loss)
        result.sum.backward()
        results.append((result.sum.detach(), result.weight, hidden.grad.clone(), head.weight.grad.clone()))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def refusal() -> str:
    """Why inductor cannot compile for a CPU here; "" where it can."""
    try:
        check_inductor("inductor", torch.device("cpu"))
    except RecipeError as error:
        return str(error)
    return ""


COMPILED = pytest.param("inductor", marks=INDUCTOR)


@pytest.mark.parametrize("dtype", rows(TOLERANCE, slow=(torch.bfloat16,)))
@pytest.mark.parametrize("backend", ["aot_eager", COMPILED])
def test_compiled_arithmetic_equals_eager(backend, dtype, monkeypatch):
    if backend == "inductor" and refusal():
        pytest.skip(refusal())
    monkeypatch.setitem(chunked.CHUNK_BYTES, "cpu", 4 * VOCABULARY * 5)  # the last chunk is smaller
    results = []
    for compiler in (None, backend):
        hidden, weight, targets = problem(dtype=dtype)
        coefficients = torch.rand(13, generator=torch.Generator().manual_seed(1)) * (targets >= 0)
        total, _ = linear_token_loss(hidden, weight, targets, coefficients, backend=compiler)
        log_probs = linear_log_probs(hidden, weight, targets, backend=compiler)
        (total + (log_probs * coefficients).sum() * 2).backward()
        results.append((total.detach(), log_probs.detach(), hidden.grad, weight.grad))
    for result, expected in zip(results[1], results[0], strict=True):
        close(result, expected, dtype)


@INDUCTOR
def test_compiled_arithmetic_makes_no_fp32_logits(monkeypatch):
    """It reads the logits, twice for the softmax and once for the gradient, which it writes in their place. A
    second tensor of them would be two passes more."""
    if refusal():
        pytest.skip(refusal())
    # A CPU is spared exponentials that are used twice, at the price of a tensor; a GPU makes them again.
    monkeypatch.setattr(torch._inductor.ir, "is_cpu", lambda node: False)
    metrics, log = torch._inductor.metrics, torch._inductor.compile_fx.inductor_metrics_log
    level = log.level
    log.setLevel("INFO")  # else bytes are not counted
    try:
        metrics.reset()
        logits = torch.randn(64, 500).to(torch.bfloat16)
        compiled = torch.compile(chunked.chunk.token_loss, backend="inductor", fullgraph=True)
        # By torch's own patch: one that deletes settings at its end leaves none for later tests.
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            compiled(logits, torch.randint(0, 500, (64,)), torch.ones(64), None, True)
    finally:
        log.setLevel(level)
    # Before 2.12 what a kernel reads twice counts once.
    assert 1.9 * logits.nbytes < metrics.num_bytes_accessed < 4.5 * logits.nbytes


def test_where_a_device_can_the_weights_gradient_is_summed_in_fp32_by_the_products(chunk, monkeypatch):
    """By the operator that torch has for GPUs alone: here with its arithmetic on a CPU."""

    def addmm(total, a, b, out_dtype, *, beta=1, alpha=1, out):
        product = alpha * (a.to(out_dtype) @ b.to(out_dtype))
        return out.copy_(product if beta == 0 else product + beta * total)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("addmm.dtype_out", addmm, "CPU")
        found = []
        for is_able in (True, False):
            monkeypatch.setattr(chunked, "sums_in_float32", lambda *_, able=is_able: able)
            hidden, weight, targets = problem(dtype=torch.bfloat16)
            total, _ = linear_token_loss(hidden, weight, targets, torch.ones(13))
            sums = total.grad_fn.gradients.weight.clone()
            found.append((sums, *torch.autograd.grad(total, (hidden, weight))))
    finally:
        library._destroy()
    expected = reference(hidden, weight, targets, -1.0)
    errors = [(sums - expected[2]).norm() / expected[2].norm() for sums, *_ in found]
    assert (
        errors[0] < 4e-3 and errors[0] <= errors[1] * 1.05
    )  # the gradient of logits is in bf16 all the same
    assert torch.equal(found[0][1], found[1][1])
    close(found[0][2], expected[2], torch.bfloat16)


def test_a_cpu_does_not_sum_products_in_another_dtype():
    with pytest.raises(NotImplementedError):
        torch.addmm(
            torch.zeros(1, 1), *(torch.zeros(1, 1).bfloat16(),) * 2, torch.float32, out=torch.zeros(1, 1)
        )
    assert not chunked.sums_in_float32(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "backend", "dtype", "rows"),
    [
        ("cpu", None, torch.float32, 128),
        ("cpu", "inductor", torch.bfloat16, 128),
        ("cuda", None, torch.bfloat16, 1024),
        ("cuda", "inductor", torch.bfloat16, 4096),
        ("cuda", "inductor", torch.float32, 2048),
    ],
)
def test_the_rows_of_a_chunk(device, backend, dtype, rows):
    """Of Llama 3's vocabulary. More where compiled code makes no fp32 logits."""
    with FakeTensorMode():
        beside = torch.empty(1, 8, dtype=dtype, device=device)
    first, *_ = chunked._chunks(beside, 8192, 128_256, backend=backend)
    assert first == slice(0, rows)


def test_the_output_compiles_its_loss_with_the_backend_that_it_is_given(monkeypatch):
    from titancli.losses.cross_entropy import CrossEntropy

    asked = []
    monkeypatch.setattr(chunked.chunk, "compiled", lambda function, name: asked.append(name) or function)
    output = Output(DIM, VOCABULARY)
    output.loss_backend = "inductor"
    targets = torch.randint(0, VOCABULARY, (2, 5))
    output(torch.randn(2, 5, DIM), Batch({"tokens": targets, "targets": targets}), CrossEntropy())
    assert asked == ["inductor"]


def entropy_of(logits):
    log_p = log_softmax(logits.double(), dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def test_entropy_equals_the_full_logits_and_leaves_the_gradient_alone(chunk):
    hidden, weight, targets = problem()
    log_probs, found = linear_log_probs_and_entropy(hidden, weight, targets)
    expected = entropy_of(hidden.detach() @ weight.detach().t()).masked_fill(targets < 0, 0.0)
    close(found, expected, torch.float32)
    log_probs.sum().backward()
    picked, grad_hidden, grad_weight = reference(hidden, weight, targets, 1.0)
    close(log_probs.detach(), picked, torch.float32)
    close(hidden.grad, grad_hidden, torch.float32)
    close(weight.grad, grad_weight, torch.float32)
    logits = (hidden @ weight.t()).detach()
    before = logits.clone()
    close(entropy(logits, targets), expected, torch.float32)
    assert torch.equal(logits, before)


def test_entropy_carries_its_gradient(chunk):
    hidden, weight, targets = problem()
    log_probs, found = linear_log_probs_and_entropy(hidden, weight, targets)
    factors = torch.randn(2, *targets.shape, generator=torch.Generator().manual_seed(5))
    factors[:, 0] = torch.nan  # where there is no target nothing is read
    assert targets[0] < 0
    torch.autograd.backward((log_probs, found), tuple(factors))
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits, none = exact_hidden @ exact_weight.t(), targets < 0
    picked = log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    factors = factors.masked_fill(none, 0.0)
    (factors[0] * picked + factors[1] * entropy_of(logits)).sum().backward()
    close(hidden.grad, exact_hidden.grad, torch.float32)
    close(weight.grad, exact_weight.grad, torch.float32)


def test_a_bonus_for_entropy_alone_has_a_gradient():
    hidden, weight, targets = problem()
    linear_log_probs_and_entropy(hidden, weight, targets)[1].sum().backward()
    exact = hidden.detach().double().requires_grad_()
    entropy_of(exact @ weight.detach().double().t())[targets >= 0].sum().backward()
    close(hidden.grad, exact.grad, torch.float32)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("kind", ["logprobs", "model"])
def test_a_temperature_divides_the_logits(kind, cap):
    hidden, weight, targets = problem()
    output = Output(DIM, VOCABULARY, bias=True)
    output.weight, output.scale, output.cap = torch.nn.Parameter(weight.detach()), 0.5, cap
    loss = WantsEntropy(kind)
    loss.temperature = 1.7
    out = output(hidden[None], Batch({"targets": targets[None]}), loss)
    logits = 0.5 * (hidden @ weight.t() + output.bias)
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)).detach() / 1.7
    close(loss.seen[0], entropy_of(logits).masked_fill(targets < 0, 0.0), torch.float32)
    if kind == "logprobs":
        picked = log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        close(-out.sum.detach(), picked.masked_fill(targets < 0, 0.0).sum(), torch.float32)
    else:
        close(out.sum.detach(), logits.pow(2).sum(), torch.float32)


class WantsEntropy(LossDefaults):
    entropy = True

    def __init__(self, output, weights=None):
        self.output, self.seen = output, None
        if weights is not None:
            self.token_weights = lambda batch: weights

    def __call__(self, out, batch):
        self.seen = batch["entropy"]
        total = -out.sum() if self.output == "logprobs" else out.float().pow(2).sum()
        return LossResult(total, torch.ones(()))


@pytest.mark.parametrize("kind", ["logprobs", "weighted", "model"])
def test_a_loss_that_wants_entropy_finds_it_in_the_batch(kind):
    hidden, weight, targets = problem()
    output = Output(DIM, VOCABULARY)
    output.weight = torch.nn.Parameter(weight.detach())
    weights = torch.rand(1, 13).masked_fill(targets < 0, torch.nan) if kind == "weighted" else None
    loss = WantsEntropy("model" if kind == "model" else "logprobs", weights)
    batch = Batch({"targets": targets[None]})
    result = output(hidden[None], batch, loss)
    expected = entropy_of((hidden @ weight.t()).detach()).masked_fill(targets < 0, 0.0)
    close(loss.seen[0], expected, torch.float32)
    assert "entropy" not in batch
    if weights is not None:
        result.sum.backward()
        coefficients = -weights[0].nan_to_num(0.0)
        _, grad_hidden, grad_weight = reference(hidden, weight, targets, coefficients)
        close(hidden.grad, grad_hidden, torch.float32)
        close(output.weight.grad, grad_weight, torch.float32)
