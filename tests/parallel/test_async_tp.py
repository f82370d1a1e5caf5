"""Async tensor parallel needs GPUs; that inductor would find what it puts its kernels for needs none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from titancli.models import Llama3
from titancli.models.blocks.decoder import build
from titancli.parallel.tensor import on_local_parameters, tensor_parallel
from titancli.torch_version import older_than

pytestmark = pytest.mark.ranks


def patterns() -> dict[str, tuple[int, int]]:
    """Collectives in the graphs of a compiled block, and those of them that inductor's pass finds."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import micro_pipeline_tp as fusing
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = build(Llama3(dim=64, n_layers=1, n_heads=4, hidden_dim=192, vocab_size=128), seq_len=32)
    tensor_parallel(model, mesh)
    model.to_empty(device="cpu")
    found: dict[str, tuple[int, int]] = {}

    def compiler(name: str) -> Any:
        def look(graph: fx.GraphModule, inputs: Any) -> Any:
            for what, find in (
                ("all_gather", fusing.find_all_gather_patterns),
                ("reduce_scatter", fusing.find_reduce_scatter_patterns),
            ):
                there = sum(f"c10d_functional.{what}" in str(node.target) for node in graph.graph.nodes)
                found[f"{what} in {name}"] = (there, len(find(graph.graph)))
            return graph.forward

        return look

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        decompositions=select_decomp_table(),
    )
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
        on_local_parameters(block, mesh)
    model(torch.randint(0, 128, (2, 32))).sum().backward()
    return found


def test_inductor_finds_every_gather_and_every_sum_of_a_block(ranks: Any) -> None:
    for found in ranks(2, patterns):
        assert found == dict.fromkeys(
            [
                f"{what} in {where}"
                for where in ("forward", "backward")
                for what in ("all_gather", "reduce_scatter")
            ],
            (2, 2),
        )


def enabled() -> tuple[bool, bool]:
    from torch._inductor import config
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
    from torch.distributed.device_mesh import init_device_mesh

    from titancli.parallel import async_tp

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        async_tp.enable(mesh)
        return config._micro_pipeline_tp, is_symm_mem_enabled_for_group(mesh.get_group().group_name)
    finally:
        config._micro_pipeline_tp = False


def test_it_is_enabled_for_the_ranks_of_tensor_parallel(ranks: Any) -> None:
    """Since torch 2.15 the group needs nothing, and torch says whether the accelerator's allocator can."""
    assert ranks(2, enabled) == [(True, older_than("2.15"))] * 2
