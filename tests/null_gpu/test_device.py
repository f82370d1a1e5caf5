"""The null device itself: what the other rows take for granted."""

from __future__ import annotations

import pytest
import torch

from tests.null_gpu.device import contexts, names, total, waits


def test_a_tensor_comes_back_as_it_went() -> None:
    sent = torch.arange(2**19, dtype=torch.float64)  # more than is copied at once
    for device in ("cuda:0", "cuda:1"):
        assert torch.equal(sent.to(device).cpu(), sent)
    assert torch.equal(sent.to("cuda:0").clone().cpu(), sent)


def test_products_are_launches_of_one_kernel_each() -> None:
    a = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    before = total("launches")
    a @ a
    assert total("launches") == before + 1
    assert names("launches")["cublasGemmEx"] > 0


@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_adamw_steps(way: str) -> None:
    linear = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(linear.parameters(), **{way: True})  # type: ignore[arg-type]
    for _ in range(2):
        linear(torch.zeros(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    assert len(optimizer.state) == 2


def test_waits_are_counted_and_placed() -> None:
    with waits() as found:
        torch.zeros(3, device="cuda").tolist()
    assert found and all("test_device" not in wait for wait in found)  # titan has not waited
    with waits() as found:
        torch.zeros(3, device="cuda").add_(1)
    assert not found


def test_a_grouped_product_waits_in_float32_alone() -> None:
    """What is said of experts in `training.mixed_precision_param`."""
    ends = torch.zeros(4, device="cuda", dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = (torch.zeros(size, device="cuda", dtype=dtype) for size in ((64, 64), (4, 64, 64)))
        with waits() as found:
            torch.nn.functional.grouped_mm(x, weight, offs=ends)
        assert bool(found) == (dtype == torch.float32), found


def test_a_pinned_copy_is_over_when_it_was_waited_for() -> None:
    sent = torch.full((5,), 7.0)
    there, back = sent.cuda(), torch.zeros(5).pin_memory()
    back.copy_(there, non_blocking=True)
    assert not back.any()
    torch.cuda.current_stream().synchronize()
    assert torch.equal(back, sent)


def test_memory_ends() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(80 * 2**30, dtype=torch.uint8, device="cuda")


def test_what_waits_is_refused_while_a_graph_is_captured() -> None:
    a, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph):
        a.sum().item()


def test_a_graph_is_one_launch() -> None:
    a, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.add_(1).mul_(2)
    before = total("launches")
    graph.replay()
    assert total("launches") == before + 1


def test_contexts_are_told() -> None:
    torch.zeros(1, device="cuda:1")
    assert {0, 1} >= contexts() >= {1}
