"""The configs of the optimizers. Torch-free; the code and the schedule are in the files beside this one."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from titancli.registry.component import component


@component("optimizer", "adamw", target="titancli.optimizers.adamw:build")
class AdamW:
    """AdamW: Adam with decoupled weight decay (arXiv 1711.05101)."""

    lr: Annotated[float, Ge(0)] = 8e-4
    """Peak learning rate."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay rate of the first moment (the mean of the gradients)."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay rate of the second moment (the mean of their squares)."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    no_decay: list[str] = field(default_factory=list)
    """Name patterns of parameters without weight decay, e.g. `["*norm.weight", "tok_embeddings.weight"]`."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's implementations to use. If parameters or state are bfloat16, titan's own
    implementation with stochastic rounding is used instead."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the two moments."""
    rounds_stochastically: ClassVar[bool] = True

    def state_bytes(self, stored: int) -> float:
        """For `titan plan`: bytes of state of each number of a parameter that is stored in `stored` bytes."""
        return 2.0 * {"float32": 4, "bfloat16": 2}[self.state_dtype]


COMPONENTS: list[type] = [AdamW]
