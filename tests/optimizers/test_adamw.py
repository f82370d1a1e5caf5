"""AdamW against torch's, and its own step where torch has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titancli.engine.optimizer_state import outside_of_state
from titancli.optimizers import AdamW, adamw
from titancli.optimizers.adamw import MixedAdamW, build


def named_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        (name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name, shape in (("layers.0.w.weight", (4, 3)), ("norm.weight", (3,)))
    ]


def train(optimizer, parameters, steps=5):
    for step in range(steps):
        for _, p in parameters:
            p.grad = torch.sin(p.detach().float() * 3 + step).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for _, p in parameters]


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_every_implementation_equals_torch(implementation):
    ours, theirs = named_parameters(), named_parameters()
    config = AdamW(lr=1e-2, weight_decay=0.3, implementation=implementation)
    reference = torch.optim.AdamW(
        [p for _, p in theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3
    )
    optimizer = build(config, named_parameters=ours)
    for a, b in zip(train(optimizer, ours), train(reference, theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_our_step_equals_torch_in_float32():
    ours, theirs = named_parameters(), named_parameters()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3}
    optimizer = MixedAdamW([p for _, p in ours], **settings, state_dtype=torch.float32)
    reference = torch.optim.AdamW([p for _, p in theirs], **settings)
    for a, b in zip(train(optimizer, ours), train(reference, theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("parameter", "state"),
    [(torch.float32, "bfloat16"), (torch.bfloat16, "float32"), (torch.bfloat16, "bfloat16")],
)
def test_bfloat16_stays_close_to_float32(parameter, state):
    ours, theirs = named_parameters(parameter), named_parameters()
    optimizer = build(AdamW(lr=1e-2, state_dtype=state), named_parameters=ours)
    moments = {s["exp_avg"].dtype for s in (train(optimizer, ours), optimizer.state.values())[1]}
    assert moments == {getattr(torch, state)}
    reference = train(build(AdamW(lr=1e-2), named_parameters=theirs), theirs)
    for (_, a), b in zip(ours, reference, strict=True):
        assert a.dtype == parameter
        torch.testing.assert_close(a.detach().float(), b, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_the_compiled_step_equals_ours_and_is_not_compiled_again(monkeypatch, state):
    """On a GPU inductor makes a kernel of the graph; that the graph is right is seen on the CPU."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    step = torch.compile(adamw._update_, dynamic=False, fullgraph=True, backend=backend)
    monkeypatch.setattr(adamw, "_compiled_update", lambda: step)
    ours, theirs = named_parameters(), named_parameters()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3}
    settings["state_dtype"] = getattr(torch, state)
    eager = MixedAdamW([p for _, p in theirs], **settings, fused=True)
    assert not eager._in_one_kernel([p for _, p in theirs])  # not on a CPU
    compiled = MixedAdamW([p for _, p in ours], **settings, fused=True)
    monkeypatch.setattr(compiled, "_in_one_kernel", lambda tensors: True)
    began = outside_of_state(compiled, id)
    for a, b in zip(train(compiled, ours), train(eager, theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert len(graphs) == 2  # one for each size; none for another step, or for another skipped one
    assert outside_of_state(compiled, id) == began  # else a run would warn of it when it saves
    compiled.grad_scale, compiled.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    train(compiled, ours)
    assert len(graphs) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_our_step_divides_gradients_and_skips_as_torchs_fused_one(dtype, state):
    """By scalars on the device, as torch scales gradients: what they say is not read."""
    ours, theirs = named_parameters(dtype), named_parameters(dtype)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "state_dtype": getattr(torch, state)}
    divided, plain = (MixedAdamW([p for _, p in named], **settings) for named in (ours, theirs))
    for _, parameter in ours:
        parameter.grad = torch.full_like(parameter, 3.0)
    for _, parameter in theirs:
        parameter.grad = torch.full_like(parameter, 0.75)
    divided.grad_scale, divided.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    divided.step()
    plain.step()
    kept = [value.clone() for p in divided.param_groups[0]["params"] for value in divided.state[p].values()]
    before = [p.detach().clone() for _, p in ours]
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, theirs, strict=True))
    divided.found_inf = torch.tensor(1.0)
    for _, parameter in ours:
        parameter.grad = torch.full_like(parameter, torch.nan)
    divided.step()
    now = [value for p in divided.param_groups[0]["params"] for value in divided.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, ours, strict=True))


def test_exempt_parameters_do_not_decay():
    parameters = named_parameters()
    before = [p.detach().clone() for _, p in parameters]
    optimizer = build(AdamW(lr=0.1, weight_decay=0.5, no_decay=["*norm.weight"]), named_parameters=parameters)
    for _, p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(parameters[0][1].detach(), before[0] * 0.95)
    torch.testing.assert_close(parameters[1][1].detach(), before[1])


def test_a_pattern_without_a_match_is_noted(caplog):
    """As in other trainers, whose usual lists name biases also for families that have none."""
    optimizer = build(AdamW(no_decay=["*.bias", "*norm.weight"]), named_parameters=named_parameters())
    assert len(optimizer.param_groups) == 2
    [record] = caplog.records
    assert record.levelname == "WARNING" and "'*.bias' matches no parameter" in record.getMessage()
