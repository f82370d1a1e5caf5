"""The parameters of an engine, by name: those of the plain model, and the adapters beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titancli.distributed import process_group
from titancli.errors import TitanError
from titancli.models.blocks.state import named_state

if TYPE_CHECKING:
    from titancli.distributed.mesh import Mesh
    from titancli.parallel.pipeline import Placement
    from titancli.protocols import Converter


class Known(NamedTuple):
    """What every rank of a pipeline knows of a tensor that one of them has."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    holder: int
    """The rank of the pipeline that has it."""


class Parameters:
    """What of an engine has names."""

    parts: list[Any]
    converters: Sequence[Converter]
    mesh: Mesh
    device: torch.device
    placement: Placement | None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by the names of the plain model on one device."""
        return [named for part in self.parts for named in part.named_parameters()]

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those of them that the optimizer moves."""
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    @property
    def adapters(self) -> Any:
        """The converter whose parameters are no part of the plain model, if there is one."""
        return next((converter for converter in self.converters if hasattr(converter, "owns")), None)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """The model without its adapters; only to compute with."""
        if self.adapters is None:
            raise TitanError("as_base: this engine has no adapters, such as the converter lora makes")
        with self.adapters.disabled(self.parts):
            yield

    def saved_parameters(self) -> list[tuple[str, Tensor]]:
        """What a checkpoint holds of `plain_parameters`: all, or the adapters alone where there are some."""
        adapters = self.adapters
        return [named for named in self.plain_parameters() if adapters is None or adapters.owns(named[0])]

    def base_parameters(self) -> dict[str, Tensor]:
        """Those of `plain_parameters` that the plain model has."""
        adapters = self.adapters
        return {n: t for n, t in self.plain_parameters() if adapters is None or not adapters.owns(n)}

    def plain_parameters(self) -> list[tuple[str, Tensor]]:
        """The same and what else is state, detached and without the converters' tensor classes: what is
        saved, and loaded into."""
        found = []
        for name, live in (named for part in self.parts for named in named_state(part)):
            tensor = live.detach()
            for converter in reversed(self.converters):
                tensor = converter.plain(name, tensor)
            found.append((name, tensor))
        return found

    # ------------------------------------------------------------------------ over a pipeline's stages

    def _all_known(self, named: Iterable[tuple[str, Tensor]]) -> list[Known]:
        """What all ranks of the pipeline have, in the order of the stages. Collective.

        Args:
            named: of this rank's stages, in their order.
        """
        rank = self.mesh.pp_rank
        mine = [Known(name, tuple(tensor.shape), tensor.dtype, rank) for name, tensor in named]
        if self.placement is None:
            return mine
        stage_of: dict[str, int] = {}
        for stage, part in zip(self.placement.mine, self.parts, strict=True):
            stage_of |= dict.fromkeys(
                [name for name, _ in (*part.named_parameters(), *part.named_buffers())], stage
            )
        gathered: list[Any] = [None] * dist.get_world_size(self.mesh.pp_group)
        dist.all_gather_object(
            gathered, [(stage_of[known.name], known) for known in mine], self.mesh.pp_group
        )
        found = sorted((entry for entries in gathered for entry in entries), key=lambda entry: entry[0])
        return [known for _, known in found]

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of everything of the whole plain model that is saved. Collective."""
        return {known.name: known.shape for known in self._all_known(self.base_parameters().items())}

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the whole model, whole, one at a time. Collective.

        Away from rank 0 a tensor of another stage is on meta.
        """
        mine = dict(self.plain_parameters())
        home = getattr(self.parts[0], "parameter_device", self.device)
        group, rank = self.mesh.pp_group, self.mesh.pp_rank
        to_rank_0 = dist.get_rank() == 0 or (group is not None and 0 in dist.get_process_group_ranks(group))
        for known in self._all_known(mine.items()):
            whole = torch.empty(known.shape, dtype=known.dtype, device="meta")
            if known.holder == rank:
                tensor = mine[known.name]
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if rank > 0 and to_rank_0:
                    process_group.wait(dist.isend(whole.to(home).contiguous(), dst=0, group=group))
            elif dist.get_rank() == 0:
                whole = torch.empty(known.shape, dtype=known.dtype, device=home)
                process_group.wait(dist.irecv(whole, group=group, group_src=known.holder))
            yield known.name, whole
