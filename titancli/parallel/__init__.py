"""The config of how a model is sharded over devices. Torch-free; each technique is a file beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

from titancli.protocols.shape import Attention
from titancli.registry.component import component, component_info
from titancli.registry.fields import Component, Slot

if TYPE_CHECKING:
    from titancli.recipe.schema import Compile, Recipe


@component("dispatcher", "all_to_all", target="titancli.parallel.expert:AllToAll")
class AllToAll:
    """All-to-all collectives of torch.distributed, on every device: one row for each expert of a token."""


@component("parallelize", "decoder", target="titancli.parallel.decoder:build")
class Decoder:
    """Decoder parallelism: FSDP2, tensor, context and expert parallel, activation checkpointing, compile."""

    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after forward (least memory) or keep them for backward (least traffic).
    "default" frees all but the last group, which backward needs first; with pipeline parallelism it keeps
    all. A single rank gathers nothing."""
    context_parallel: Literal["allgather", "ulysses", "ring"] = "allgather"
    """How attention covers the whole sequence under mesh.cp: all-gather keys and values, exchange heads for
    sequence by all-to-all, or pass keys and values around a ring (only on a GPU in bfloat16)."""
    expert_dispatch: Annotated[Component, Slot("dispatcher")] = field(default_factory=AllToAll)
    """How tokens reach the experts of other ranks under mesh.ep."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory, and copy each block to the GPU while it
    computes. Needs GPUs."""
    async_tp: bool = False
    """Under mesh.tp, overlap matrix products with the all-gather and reduce-scatter of the sequence. Needs
    GPUs with peer-to-peer memory access, and compile.enable with inductor."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.async_tp and not _inductor(recipe.compile):
            needed = 'compile.enable = true, compile.backend = "inductor", "model" in compile.components'
            yield "async_tp", f"async_tp needs {needed}"
        if self.context_parallel == "ring" and recipe.mesh.cp > 1:
            for message in _not_around_a_ring(recipe):
                yield "context_parallel", f'{message}; use "allgather" or "ulysses"'

    def needs_gpu(self) -> Iterator[tuple[str, str]]:
        """Fields that cannot be had without a GPU, with the reason."""
        if self.cpu_offload:
            yield "cpu_offload", "cpu_offload moves parameters between the CPU and a GPU"
        if self.async_tp:
            yield "async_tp", "async_tp lets GPUs read each other's memory"


def _not_around_a_ring(recipe: Recipe) -> Iterator[str]:
    if recipe.dataset is not None and recipe.dataset.document_mask:
        yield "the ring cannot keep attention within documents: dataset.document_mask is true"
    shape = recipe.model.shape()
    blocks = shape.blocks if shape is not None else ()
    layers = [block.attention for block in blocks if isinstance(block.attention, Attention)]
    if any(layer.head_dim != layer.value_dim for layer in layers):
        name = component_info(recipe.model).name
        yield f"the ring needs keys and values of the same width, which the model {name} does not have"
    more = {"sinks": "sinks", "window": "sliding windows", "chunk": "chunks", "cap": "soft caps"}
    found = [what for field, what in more.items() if any(getattr(layer, field) for layer in layers)]
    if found:
        yield f"the ring computes plain attention, but that of the model has {', '.join(found)}"


def _inductor(section: Compile) -> bool:
    return section.model and section.backend == "inductor"


COMPONENTS: list[type] = [AllToAll, Decoder]
