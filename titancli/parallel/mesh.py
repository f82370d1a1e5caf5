"""The device mesh: which ranks hold the same data, and which the same parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titancli.recipe.schema import Degrees


class Mesh:
    """Degrees and the process groups made of them.

    Needs an initialised process group of `degrees.world` ranks.
    """

    def __init__(self, degrees: Degrees, device: torch.device) -> None:
        self.degrees = degrees
        self._data = init_device_mesh(
            device.type, (degrees.dp_replicate, degrees.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )

    @property
    def fsdp(self) -> DeviceMesh:
        """1-D (shard), or 2-D (replicate, shard) for HSDP, and for DDP (shard degree 1)."""
        return self._data if self.degrees.dp_replicate > 1 else self._data["dp_shard"]

    @property
    def dp_rank(self) -> int:
        """This rank's place among those whose batches differ."""
        return dist.get_rank()

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks whose batches differ: all of them, as long as the other degrees are 1."""
        return dist.group.WORLD
