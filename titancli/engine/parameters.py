"""The parameters of an engine, by name: those of the plain model, and the adapters beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from titancli.errors import TitanError
from titancli.models.blocks.state import named_state

if TYPE_CHECKING:
    from titancli.protocols import Converter


class Parameters:
    """What of an engine has names."""

    parts: list[Any]
    converters: Sequence[Converter]

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
