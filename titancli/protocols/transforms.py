"""The transforms of a model before training: converters, then the parallelize plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from titancli.distributed.mesh import Mesh
    from titancli.layout.degrees import Degrees
    from titancli.protocols.model import Model
    from titancli.recipe.schema import ActivationCheckpoint, Compile


class ConverterDefaults(Protocol):
    """Members of a converter that adds its own parameters; None for any other converter."""

    owns: Callable[[str], bool] | None = None
    """Return whether a parameter with this name was added: only these are saved, all others belong to the
    base."""
    facts: Mapping[str, Any] | None = None
    """Plain data about them that is stored in checkpoints."""
    initialise: Callable[..., None] | None = None
    """`initialise(model, generator_for)` initializes them."""
    base_loaded: Callable[..., None] | None = None
    """`base_loaded(model)` initializes what follows from the base's weights, once they are loaded."""
    merged: Callable[..., Iterator[tuple[str, Tensor]]] | None = None
    """`merged(named_tensors)`: yields the plain model's tensors, with the added parameters merged in."""
    base: Callable[..., Any] | None = None
    """`base(tensors, recipe)`: a base as the model computes with it, of a reader of its weights
    (`titancli.checkpoint.Tensors`), if these are others."""
    disabled: Callable[..., Any] | None = None
    """`disabled(parts)`: a context in which the model computes as its base."""


class Converter(ConverterDefaults, Protocol):
    """Changes a model, on one device, before it is sharded.

    A converter that adds its own parameters (adapters) also has the members of `ConverterDefaults`. A module
    that gets parameters declares how they are sharded: `ModuleDefaults.tensor_plan`.
    """

    def convert(self, model: Model) -> None:
        """Change the model in place, on meta, before it is sharded. Parameter names must not change."""

    def after_step(self, model: Model) -> None:
        """Update derived values whenever the weights have changed: after each optimizer step, and after a
        load."""

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter without the converter's own tensor class, in the same memory: checkpoints
        are loaded into it as well as saved from it. `tensor` is a DTensor if the parameter is sharded."""
        ...


class ConverterBuilder(Protocol):
    def __call__(self, config: Any, *, mesh: Degrees, compile: bool) -> Converter:
        """Build the converter. A builder with an argument `planned` is given the device of a plan of memory
        and time (`titancli.observe.peaks.Device`), or None: for a plan, the products of converted modules
        run on meta and stand for that device's, with operands in the dtypes that it multiplies."""
        ...


class Precision(Protocol):
    """The dtypes of parameters, computation and reduction."""

    param: torch.dtype
    reduce: torch.dtype


class ParallelizeBuilder(Protocol):
    def __call__(
        self,
        config: Any,
        *,
        mesh: Mesh,
        device: torch.device,
        precision: Precision,
        activation_checkpoint: ActivationCheckpoint,
        compile: Compile,
    ) -> Callable[[Model], Model]: ...
