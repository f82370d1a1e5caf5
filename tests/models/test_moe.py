"""The mixture of experts against a loop over tokens and experts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import grouped_mm, silu
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from titancli.models.blocks import grouped
from titancli.models.blocks.grouped import add_bias, grouped_linear
from titancli.models.blocks.moe import Experts, MoE, moe_layers
from titancli.models.blocks.router import Gate, Router
from titancli.models.sections import MoE as MoEConfig
from titancli.protocols.shape import Experts as Spec

DIM, HIDDEN, EXPERTS = 16, 24, 8
ROUTINGS = {
    "softmax, renormalised": dict(score_func="softmax", route_norm=True, score_before_experts=False, top_k=3),
    "softmax": dict(score_func="softmax", score_before_experts=False, top_k=2),
    "sigmoid before the expert": dict(score_func="sigmoid", score_before_experts=True, top_k=1),
    "sigmoid, scaled, shared": dict(
        score_func="sigmoid", route_norm=True, route_scale=2.5, score_before_experts=False, top_k=3,
        num_shared_experts=2,
    ),
    "groups": dict(score_func="sigmoid", top_k=3, num_expert_groups=4, num_limited_groups=2),
    "groups by their best": dict(
        score_func="softmax", top_k=3, num_expert_groups=4, num_limited_groups=2, group_top_k=1
    ),
    "gate bias": dict(score_func="softmax", route_norm=True, gate_bias=True, top_k=4),
    "balanced": dict(score_func="sigmoid", top_k=2, load_balance_coeff=1e-3),
    "all experts": dict(score_func="softmax", top_k=EXPERTS),
}  # fmt: skip


def layer(seed: int = 0, **routing) -> MoE:
    moe = MoE(Spec(dim=DIM, routing=MoEConfig(num_experts=EXPERTS, hidden_dim=HIDDEN, **routing)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        if moe.expert_bias is not None:
            moe.expert_bias.normal_(0, 0.3, generator=generator)
    return moe


def tokens(rows: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, length, DIM, generator=torch.Generator().manual_seed(seed))


def expert(moe: MoE, number: int, x: torch.Tensor) -> torch.Tensor:
    weights = moe.experts
    return weights.w2[number] @ (silu(weights.w1[number] @ x) * (weights.w3[number] @ x))


def one_token(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """What the layer is meant to do with a token [dim], in words as few as can be."""
    config = moe.config
    logits = moe.router.gate.weight @ x
    if moe.router.gate.bias is not None:
        logits = logits + moe.router.gate.bias
    scores = logits.softmax(0) if config.score_func == "softmax" else logits.sigmoid()
    wanted = (scores if moe.expert_bias is None else scores + moe.expert_bias).detach()
    open_to = range(EXPERTS)
    if config.num_expert_groups:
        size = EXPERTS // config.num_expert_groups
        groups = [range(g * size, (g + 1) * size) for g in range(config.num_expert_groups)]
        most = config.group_top_k
        groups.sort(key=lambda group: -sum(sorted((float(wanted[e]) for e in group), reverse=True)[:most]))
        open_to = [e for group in groups[: config.num_limited_groups] for e in group]
    chosen = sorted(open_to, key=lambda e: -float(wanted[e]))[: config.top_k]
    total = sum(scores[e] for e in chosen) if config.route_norm else 1.0
    out = torch.zeros(DIM)
    for e in chosen:
        score = scores[e] / total * config.route_scale
        out = out + (expert(moe, e, score * x) if config.score_before_experts else score * expert(moe, e, x))
    if moe.shared_experts is not None:
        out = out + moe.shared_experts(x)
    return out


def assert_close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (result - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_layer_equals_a_loop_over_its_tokens(name):
    moe, plain = layer(**ROUTINGS[name]), layer(**ROUTINGS[name])
    x, y = tokens().requires_grad_(), tokens().requires_grad_()
    out = moe(x)
    expected = torch.stack([torch.stack([one_token(plain, token) for token in row]) for row in y])
    assert_close(out, expected)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_close(x.grad, y.grad)
    for (parameter, ours), theirs in zip(moe.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, parameter
        assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("counts", [[3, 0, 2, 1], [0, 0, 0, 0], [0, 0, 0, 5], [4, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_experts_take_nothing_and_give_no_gradient(counts, dtype):
    x = torch.randn(sum(counts), DIM, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, HIDDEN, DIM, dtype=dtype, requires_grad=True)
    out = grouped_linear(x, weight, torch.tensor(counts).cumsum(0).int())
    assert out.shape == (sum(counts), HIDDEN)
    out.sum().backward()  # a gradient that is expanded, not laid out
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for number, (count, gradient) in enumerate(zip(counts, weight.grad, strict=True)):
        start = sum(counts[:number])
        rows = x.detach()[start : start + count]
        made = out.detach()[start : start + count].float()
        assert_close(made, rows.float() @ weight.detach()[number].float().T, tolerance)
        assert_close(gradient.float(), rows.float().sum(0).expand(HIDDEN, DIM), tolerance)


def test_groups_that_a_kernel_leaves_out_get_zeros(monkeypatch):
    """As on Blackwell, where torch writes nothing for a group without rows."""
    left, right = torch.randn(5, 4), torch.randn(5, 8)
    ends = torch.tensor([0, 2, 2, 5, 5], dtype=torch.int32)
    expected = grouped.grouped_outer(left, right, ends)

    def leaving_out(a, b, offs):
        found = grouped_mm(a, b, offs=offs)
        return found.masked_fill(torch.tensor([True, False, True, False, True])[:, None, None], torch.nan)

    monkeypatch.setattr(grouped, "grouped_mm", leaving_out)
    assert grouped.grouped_outer(left, right, ends).isnan().any()
    monkeypatch.setattr(grouped, "leaves_empty_groups", lambda device: True)
    assert torch.equal(grouped.grouped_outer(left, right, ends), expected)


@pytest.mark.parametrize(("capability", "leaves"), [((9, 0), False), ((10, 0), True), ((12, 0), True)])
def test_which_gpus_leave_groups_out(capability, leaves, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped.leaves_empty_groups.__wrapped__(torch.device("cuda")) == leaves
    assert not grouped.leaves_empty_groups(torch.device("cpu"))


@pytest.mark.parametrize("counts", [[3, 0, 2, 1], [0, 0, 0, 0], [0, 0, 0, 5], [4, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_group_gets_its_own_bias(counts, dtype):
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), HIDDEN, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(4, HIDDEN, generator=generator).to(dtype).requires_grad_()
    wanted = torch.randn(sum(counts), HIDDEN, generator=generator).to(dtype)
    out = add_bias(x, bias, torch.tensor(counts).cumsum(0).int())
    groups = torch.arange(4).repeat_interleave(torch.tensor(counts))
    assert torch.equal(out, x + bias[groups])
    (out * wanted).sum().backward()
    assert torch.equal(x.grad, wanted)
    summed = torch.zeros(4, HIDDEN).index_add(0, groups, wanted.float())
    assert_close(bias.grad.float(), summed, 1e-6 if dtype == torch.float32 else 1e-2)


def test_the_operators_keep_to_what_torch_asks_of_operators():
    x = torch.randn(6, DIM, requires_grad=True)
    weight = torch.randn(4, HIDDEN, DIM, requires_grad=True)
    torch.library.opcheck(grouped_linear, (x, weight, torch.tensor([2, 2, 5, 6], dtype=torch.int32)))


def test_a_layer_runs_on_meta_and_counts_its_operations():
    with torch.device("meta"):
        routing = MoEConfig(num_experts=EXPERTS, hidden_dim=HIDDEN, **ROUTINGS["softmax, renormalised"])
        moe = MoE(Spec(dim=DIM, routing=routing))
        x = torch.empty(2, 9, DIM, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        moe(x).sum().backward()
    visits = 18 * 3
    expected = 6 * visits * 3 * DIM * HIDDEN + 6 * 18 * DIM * EXPERTS
    # What remains is the weighing of the experts' results.
    assert expected <= counter.get_total_flops() <= expected + 6 * visits * DIM


def test_tokens_are_counted_once_and_only_where_they_are_trained_on():
    moe = layer(**ROUTINGS["balanced"])
    chosen = moe.router(tokens().flatten(0, 1), moe.expert_bias)
    expected = torch.tensor([(chosen.experts == e).sum() for e in range(EXPERTS)])
    assert torch.equal(chosen.counts, expected)
    with torch.no_grad():
        moe(tokens())
    assert not moe.token_counts().any()
    moe(tokens()).square().sum().backward()
    assert torch.equal(moe.token_counts(), expected)
    out = checkpoint(moe, tokens().requires_grad_(), use_reentrant=False)
    out.square().sum().backward()
    assert torch.equal(moe.token_counts(), 2 * expected)
    assert int(moe.token_counts().sum()) == 2 * 18 * 2
    moe.forget_counts()
    assert not moe.token_counts().any()


def test_balancing_moves_the_bias_against_what_was_chosen_too_often():
    moe = layer(**ROUTINGS["balanced"])
    moe.expert_bias.zero_()
    moe.balance(torch.tensor([10, 0, 5, 5, 5, 5, 5, 5]))
    torch.testing.assert_close(moe.expert_bias, torch.tensor([-1e-3, 1e-3, 0, 0, 0, 0, 0, 0]))


def test_balancing_evens_out_the_load():
    moe = layer(score_func="sigmoid", top_k=2, load_balance_coeff=1e-2)
    moe.expert_bias.zero_()
    x = tokens(8, 64) + 0.5

    def worst() -> float:
        counts = moe.router(x.flatten(0, 1), moe.expert_bias).counts
        return float(counts.max() / counts.float().mean())

    before = worst()
    for _ in range(100):
        moe.balance(moe.router(x.flatten(0, 1), moe.expert_bias).counts)
    assert before > 1.5, before
    assert worst() < 1.1, worst()


def test_the_bias_is_state_without_being_a_parameter_and_stays_fp32():
    moe = layer(**ROUTINGS["balanced"]).to(torch.bfloat16)
    assert "expert_bias" not in dict(moe.named_parameters())
    assert "expert_bias" in moe.state_dict()
    assert moe.expert_bias.dtype == torch.float32
    assert moe.experts.w1.dtype == torch.bfloat16
    assert "expert_bias" not in layer(**ROUTINGS["softmax"]).state_dict()


def test_forced_balance_deals_the_experts_out_in_turn():
    moe = layer(**ROUTINGS["groups"])
    moe.force_load_balance()
    counts = moe.router(tokens(2, 8).flatten(0, 1), moe.expert_bias).counts
    assert counts.tolist() == [6] * EXPERTS
    moe(tokens(2, 8)).sum().backward()
    assert moe.router.gate.weight.grad.abs().sum() > 0


def test_the_parts_of_a_layer_compile_and_rows_of_another_length_too():
    moe, compiled = layer(**ROUTINGS["sigmoid, scaled, shared"]), layer(**ROUTINGS["sigmoid, scaled, shared"])
    for part, name in compiled.parts():
        setattr(part, name, torch.compile(getattr(part, name), backend="aot_eager", fullgraph=True))
    for length in (9, 5, 7):
        x, y = tokens(2, length).requires_grad_(), tokens(2, length).requires_grad_()
        out, expected = compiled(x), moe(y)
        assert_close(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert_close(x.grad, y.grad)
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in moe.named_parameters()]
    assert torch.equal(compiled.token_counts(), moe.token_counts())


def test_the_layers_of_a_model_are_found_by_name():
    model = torch.nn.ModuleDict({"a": layer(top_k=1), "b": torch.nn.Linear(2, 2)})
    assert list(moe_layers(model)) == ["a"]
    assert isinstance(moe_layers(model)["a"].experts, Experts)


@pytest.mark.parametrize(
    ("wrong", "key", "said"),
    [
        (dict(hidden_dim=12), "hidden_dim", "multiple of 8"),
        (dict(top_k=9), "top_k", "top_k 9 is greater than num_experts 8"),
        (dict(num_expert_groups=4), "num_expert_groups", "must be set together"),
        (dict(num_expert_groups=3, num_limited_groups=1), "num_expert_groups", "cannot be divided into 3"),
        (
            dict(num_expert_groups=2, num_limited_groups=3),
            "num_limited_groups",
            "greater than the number of groups, 2",
        ),
        (
            dict(num_expert_groups=4, num_limited_groups=1, top_k=3),
            "num_limited_groups",
            "than top_k 3",
        ),
    ],
)
def test_fields_that_do_not_fit_are_told(wrong, key, said):
    found = list(MoEConfig(**{"num_experts": 8, "hidden_dim": 8, **wrong}).problems())
    assert [(key, True)] == [(where, said in message) for where, message in found]


def test_fields_that_fit_are_not():
    assert all(not list(MoEConfig(num_experts=8, hidden_dim=8, **r).problems()) for r in ROUTINGS.values())


def test_the_router_sends_tokens_in_bf16_where_fp32_sends_them() -> None:
    """Of the same rounded tokens and weights: rounded once more, logits would tie and change places."""
    generator = torch.Generator().manual_seed(0)
    router = Router(256, MoEConfig(num_experts=128, top_k=8, hidden_dim=8, score_func="softmax"))
    with torch.no_grad():
        router.gate.weight.normal_(0, 0.02, generator=generator)
    x = torch.randn(2000, 256, generator=generator).bfloat16()
    found = router.bfloat16()(x, None)
    expected = router.float()(x.float(), None)
    assert torch.equal(found.experts, expected.experts)
    assert torch.equal(found.scores, expected.scores)


@pytest.mark.parametrize("bias", [False, True])
def test_the_routers_product_has_the_gradients_of_a_linear_and_keeps_no_cast(bias: bool) -> None:
    gate = Gate(6, 4, bias=bias).double()
    x = torch.randn(5, 6, dtype=torch.double, requires_grad=True)
    inputs = (x, gate.weight, *([gate.bias] if bias else []))
    assert torch.autograd.gradcheck(lambda x, *parameters: gate(x), inputs)
    frozen = Gate(6, 4, bias=bias).requires_grad_(False)
    frozen(x.float()).sum().backward()  # adapters beside it, say
    assert frozen.weight.grad is None
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        assert gate.bfloat16()(x.bfloat16()).dtype == torch.float32
    assert torch.float32 not in kept


def test_the_z_loss_adds_the_gradient_of_its_definition_and_nothing_else() -> None:
    plain, with_loss = (
        layer(score_func="softmax", top_k=2),
        layer(score_func="softmax", top_k=2, z_loss_coeff=0.3),
    )
    x, expected_x = tokens().requires_grad_(), tokens().requires_grad_()
    out, expected = with_loss(x), plain(expected_x)
    assert torch.equal(out, expected)
    logits = expected_x.flatten(0, 1) @ plain.router.gate.weight.t()
    (expected.square().sum() + 0.3 * logits.exp().sum(1).log().square().sum()).backward()
    checkpoint(with_loss, x, use_reentrant=False).square().sum().backward()
    for found, reference in zip([x, *with_loss.parameters()], [expected_x, *plain.parameters()], strict=True):
        assert_close(found.grad, reference.grad)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_the_balancing_loss_adds_the_gradient_of_its_definition_and_nothing_else(score_func: str) -> None:
    plain = layer(score_func=score_func, top_k=2)
    with_loss = layer(score_func=score_func, top_k=2, aux_loss_coeff=0.3)
    x, expected_x = tokens().requires_grad_(), tokens().requires_grad_()
    out, expected = with_loss(x), plain(expected_x)
    assert torch.equal(out, expected)
    logits = expected_x.flatten(0, 1) @ plain.router.gate.weight.t()
    scores = logits.softmax(1) if score_func == "softmax" else logits.sigmoid()
    shares = torch.nn.functional.one_hot(scores.topk(2).indices, EXPERTS).sum(1).float().mean(0)
    loss = 0.3 * EXPERTS * (shares * scores / scores.sum(1, keepdim=True)).sum()
    (expected.square().sum() + loss).backward()
    checkpoint(with_loss, x, use_reentrant=False).square().sum().backward()
    for found, reference in zip([x, *with_loss.parameters()], [expected_x, *plain.parameters()], strict=True):
        assert_close(found.grad, reference.grad)


def test_the_balancing_loss_is_that_of_transformers() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    moe = layer(score_func="softmax", top_k=2, aux_loss_coeff=1.0)
    x = tokens()
    out = moe(x)
    (gradient,) = torch.autograd.grad(0 * out.sum(), moe.router.gate.weight)
    logits = moe.router.gate(x.flatten(0, 1))
    reference = load_balancing_loss_func((logits,), EXPERTS, 2) * len(logits)  # the mean over tokens
    assert_close(gradient, torch.autograd.grad(reference, moe.router.gate.weight)[0])
