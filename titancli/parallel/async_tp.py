"""Async tensor parallel: matrix products that begin before the sequence is gathered, and add up as they go.

Inductor finds the gathers and reduce-scatters beside the products of a compiled block, and puts kernels in
their place that work piece by piece over symmetric memory. Source: torch's `micro_pipeline_tp`, after Wang et
al., "Overlap Communication with Dependent Computation" (ASPLOS 2023).
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from titancli.torch_version import older_than


def enable(mesh: DeviceMesh) -> None:
    """For everything that this process compiles from now on; `mesh` is that of tensor parallel."""
    from torch._inductor import config

    config._micro_pipeline_tp = True
    if older_than("2.15"):  # which asks the allocator instead
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(mesh.get_group().group_name)
