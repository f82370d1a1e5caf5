"""The device mesh: which ranks hold the same data, and which the same parameters.

The same ranks are seen in up to three ways, each a mesh of its own, in the order of
`pp × dp_replicate × dp_shard × cp × tp`, the last one varying fastest:

- dense: (pp, dp_replicate, fsdp = dp_shard · cp, tp), what parameters are cut over;
- data: (pp, dp, cp, tp), whose rows and whose part of a row a rank has;
- sparse: (pp, dp_replicate, fsdp, ep), what experts are cut over; ep takes its ranks from fsdp · tp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titancli.distributed.private import GroupOfNobody, mesh_of_nobody
from titancli.layout.degrees import Degrees


class Mesh:
    """Degrees and the process groups made of them.

    Needs an initialised process group of `degrees.world` ranks; making it is collective.
    """

    def __init__(self, degrees: Degrees, device: torch.device) -> None:
        self.degrees = d = degrees
        sharded = d.dp_shard * d.cp
        names = ("pp", "dp_replicate", "fsdp", "tp")
        self._dense = init_device_mesh(
            device.type, (d.pp, d.dp_replicate, sharded, d.tp), mesh_dim_names=names
        )
        self._sparse = self._dense
        if d.ep * d.tp > 1:
            shape = (d.pp, d.dp_replicate, sharded * d.tp // d.ep, d.ep)
            self._sparse = init_device_mesh(
                device.type, shape, mesh_dim_names=("pp", "dp_replicate", "fsdp", "ep")
            )
        self._data: DeviceMesh | None = None
        if d.pp * d.cp * d.tp > 1:
            names = ("pp", "dp", "cp", "tp")
            self._data = init_device_mesh(device.type, (d.pp, d.dp, d.cp, d.tp), mesh_dim_names=names)

    # --------------------------------------------------------------------------------- parameters

    @property
    def fsdp(self) -> DeviceMesh:
        """Return the mesh of dense parameters: 1-D (fsdp), or 2-D (dp_replicate, fsdp) for HSDP, and for
        DDP."""
        return self._replicated(self._dense)

    @property
    def tp(self) -> DeviceMesh | None:
        """1-D; None where nothing is cut by tensor parallelism."""
        return self._dense["tp"] if self.degrees.tp > 1 else None

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Return the mesh of experts: 1-D (fsdp), or 2-D (dp_replicate, fsdp), over the ranks that ep
        leaves."""
        return self._replicated(self._sparse)

    @property
    def ep(self) -> DeviceMesh | None:
        """1-D; None where every rank has all experts."""
        return self._sparse["ep"] if self.degrees.ep > 1 else None

    def _replicated(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh["dp_replicate", "fsdp"] if self.degrees.dp_replicate > 1 else mesh["fsdp"]

    # --------------------------------------------------------------------------------------- data

    @property
    def dp_rank(self) -> int:
        """This rank's place among those whose batches differ."""
        return self._place("dp")

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks whose batches differ; None for the default group, of all ranks."""
        return self._group("dp")

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The ranks that have parts of the same rows; None where rows are not cut."""
        return self._group("cp") if self.degrees.cp > 1 else None

    @property
    def pp_rank(self) -> int:
        """Return this rank's index in the pipeline."""
        return self._place("pp")

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the other stages; None where there is one."""
        return self._group("pp") if self.degrees.pp > 1 else None

    @property
    def token_groups(self) -> list[dist.ProcessGroup | None]:
        """Over all of these together every token is counted once: those of other rows, and of other parts of
        a row, with sequence parallel too."""
        names = ["dp"] + [name for name in ("cp", "tp") if getattr(self.degrees, name) > 1]
        return [self._group(name) for name in names]

    def _place(self, name: str) -> int:
        if self._data is None:
            return dist.get_rank() if name == "dp" else 0
        return self._data.get_local_rank(name)

    def _group(self, name: str) -> dist.ProcessGroup | None:
        return None if self._data is None else self._data.get_group(name)


class MeshOfNobody(Mesh):
    """A mesh of ranks that do not exist, with which a plan cuts a model for the first of them; the number
    of ranks that share parameters is 1."""

    def __init__(self, degrees: Degrees) -> None:
        self.degrees = degrees
        self._data = None

    @property
    def fsdp(self) -> DeviceMesh:
        return mesh_of_nobody("fsdp", 1)

    @property
    def tp(self) -> DeviceMesh | None:
        return mesh_of_nobody("tp", self.degrees.tp) if self.degrees.tp > 1 else None

    @property
    def expert_fsdp(self) -> DeviceMesh:
        return mesh_of_nobody("fsdp", 1)

    @property
    def ep(self) -> DeviceMesh | None:
        return mesh_of_nobody("ep", self.degrees.ep) if self.degrees.ep > 1 else None

    def _place(self, name: str) -> int:
        return 0

    def _group(self, name: str) -> Any:
        return GroupOfNobody(name, getattr(self.degrees, name))
