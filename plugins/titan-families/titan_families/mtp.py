"""Config fields of families with multi-token prediction. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from titancli.models.config_json import Key
from titancli.models.sections import Sizes
from titancli.protocols.shape import Decoder, MTPBlock
from titancli.registry.component import component_info, section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

# transformers keeps the number in config.json, but drops the layers when it saves.
MTP_KEY = Key("n_mtp_layers", "num_nextn_predict_layers", read=lambda there, ours: None)


@section
class MTP(Sizes):
    """A decoder whose releases have layers after the last, which predict further tokens."""

    n_mtp_layers: Annotated[int, Ge(0)] = 0
    """Number of multi-token prediction layers after the last (DeepSeek-V3, arXiv 2412.19437), each of
    which predicts one token further ahead; the releases have 1. 0: a run drops those of its `weights`
    (`titan convert-checkpoint` keeps them). Generation does not use them."""
    mtp_loss_weight: Annotated[float, Ge(0)] = 0.3
    """Factor of their mean loss, which is added to the gradients and reported as `mtp_loss`, not as part
    of `loss`. DeepSeek-V3 was trained with 0.3, and with 0.1 at the end."""

    without_effect: ClassVar[tuple[str, ...]] = (*Sizes.without_effect, "n_mtp_layers", "mtp_loss_weight")

    def shape(self) -> Decoder:
        shape = super().shape()
        one = MTPBlock.of(self.layer(self.n_layers))
        return replace(shape, blocks=(*shape.blocks, *[one] * self.n_mtp_layers))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if not self.n_mtp_layers:
            return
        if recipe.mesh.pp != 1:
            yield (
                "n_mtp_layers",
                f"multi-token prediction needs the embedding and the output on one rank, but mesh.pp is "
                f"{recipe.mesh.pp}",
            )
        loss = recipe.loss
        if loss.learns_from_pairs or loss.learns_from_samples:
            yield (
                "n_mtp_layers",
                f"the loss {component_info(recipe.loss).name} cannot be trained on tokens further ahead: set "
                f"n_mtp_layers = 0",
            )
