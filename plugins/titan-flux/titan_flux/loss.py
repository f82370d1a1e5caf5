"""The squared error of velocities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titancli import LossResult, TitanError

if TYPE_CHECKING:
    from torch import Tensor

    from titancli import Batch


class FlowMatching:
    """Σ (v̂ − v)²; its weight is the number of elements, so that the average is a mean over all of them."""

    output = "model"

    def __init__(self, config: Any = None) -> None:
        """Create the loss; the config has no fields."""

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """Return the loss of a batch.

        Args:
            out: [B, S, C] velocities, any float dtype.
            batch: `velocity` [B, S, C] fp32, and `weights` [B] fp32: 0 for a row that does not count.

        Raises:
            TitanError: the batch has no velocities.
        """
        if "velocity" not in batch:
            raise TitanError(
                f"the loss flow_matching needs velocities, but the batch has {', '.join(batch)}",
                hint='use a dataset that provides them: type = "latents"',
            )
        weights = batch["weights"][:, None, None]
        squares = (out.float() - batch["velocity"]).square()
        elements = weights.sum() * out[0].numel()
        return LossResult(sum=(squares * weights).sum(), weight=elements)
