"""The configs of what changes a model before it is sharded. Torch-free; the code is beside this file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt, MinLen

from titancli.registry.component import component, component_info

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("converter", "lora", target="titancli.converters.lora:build")
class LoRA:
    """LoRA: low-rank adapters of linear layers (arXiv 2106.09685). Only the adapters are trained and saved.

    The base (`weights`) is frozen. Checkpoints do not contain it, but record its path and digest.
    """

    rank: Annotated[int, Gt(0)] = 8
    """Rank of the adapters."""
    alpha: Annotated[float, Gt(0)] = 16.0
    """Scaling: the output of B·A is multiplied by alpha / rank."""
    rslora: bool = False
    """rsLoRA (arXiv 2312.03732): multiply by alpha / √rank."""
    dora: bool = False
    """DoRA (arXiv 2402.09353): also train the norm of each row of the adapted weights. Not of experts and
    embeddings."""
    targets: Annotated[list[str], MinLen(1)] | None = None
    """Linear layers, `tok_embeddings` or `output` to adapt: a full name (`layers.0.attention.wq`), the end of
    one (`wq`, `attention.wo`), or a pattern (`layers.0.*`); None: those of all blocks
    except routers. Routed experts are adapted only where a target names them (`experts.*`, `experts.w2`),
    each with matrices of its own."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the description of the adapters in a checkpoint, which a load compares."""
        return {"form": "lora", **{name: getattr(self, name) for name in ("rank", "alpha", "rslora", "dora")}}

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.weights is None:
            yield "", "adapters need a base: set `weights`"
        if not recipe.checkpoint.initial_load_model_only:
            yield (
                "",
                "only weights can be loaded into the base: remove checkpoint.initial_load_model_only, or "
                "resume the run",
            )
        if recipe.checkpoint.last_save_model_only:
            yield "", "checkpoints already hold only the adapters: remove checkpoint.last_save_model_only"
        if [component_info(config).name for config in recipe.converters].count("lora") > 1:
            yield "", "there is a second lora converter: use a single one with the targets of both"


COMPONENTS: list[type] = [LoRA]
