"""Configs of the optimizers and learning rate schedules. Torch-free; the code is in the files beside this
one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from titancli.registry.component import component, section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


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

    def unmatched(self, names: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each pattern of `no_decay` that matches none of these parameters."""
        for pattern in self.no_decay:
            if not any(fnmatchcase(name, pattern) for name in names):
                like = f"{names[0]} and {names[-1]}" if names else "none"
                yield f"optimizer.no_decay: {pattern!r} matches no parameter; there are {like}"

    def state_bytes(self, stored: int) -> float:
        """Return the bytes of optimizer state per parameter element, for `titan plan`."""
        return 2.0 * {"float32": 4, "bfloat16": 2}[self.state_dtype]


@section
class ScheduleConfig:
    """The keys of schedules that have a length of their own."""

    total_steps: Annotated[int, Gt(0)] | None = None
    """Length of the schedule in steps; None: training.steps."""


@component("schedule", "wsd", target="titancli.optimizers.schedule:build")
class WarmupStableDecay(ScheduleConfig):
    """Warm-up, stable phase, decay (arXiv 2404.06395). After the decay the learning rate stays constant."""

    warmup_steps: Annotated[int, Ge(0)] = 200
    """Linear warm-up steps; capped at the length of the schedule."""
    decay_ratio: Annotated[float, Ge(0), Le(1)] | None = None
    """Fraction of the steps used for decay, starting after warm-up at the earliest; None: all steps after
    warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Annotated[float, Ge(0), Le(1)] = 0.0
    """Final learning rate as a fraction of the peak."""
    start_step: Annotated[int, Ge(0)] = 0
    """Steps that were done before the schedule begins, in a run that is continued with another one; see
    `titan recipe extend`."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if 0 < recipe.schedule_steps <= self.start_step:
            yield "start_step", f"the schedule ends after step {recipe.schedule_steps}, before it begins"

    def phases(self, steps: int) -> tuple[int, int]:
        """Return the numbers of warm-up and decay steps in a schedule that ends after `steps` steps.

        Warm-up is capped at its steps, and decay at what warm-up leaves, as in torchtitan.
        """
        steps = max(0, steps - self.start_step)
        warmup = min(self.warmup_steps, steps)
        share = steps if self.decay_ratio is None else round(steps * self.decay_ratio)
        return warmup, min(share, steps - warmup)

    def remarks(self, steps: int) -> Iterator[str]:
        """Yield a sentence for each phase that is shorter than configured."""
        of = "training.steps" if self.total_steps is None else "lr_scheduler.total_steps"
        warmup, decay = self.phases(steps)
        steps = max(0, steps - self.start_step)
        if warmup < self.warmup_steps:
            yield (
                f"the warm-up is shortened from {self.warmup_steps} steps to {warmup}, all of {of}: "
                "the learning rate rises until the last step"
            )
        if self.decay_ratio is not None and decay < (asked := round(steps * self.decay_ratio)):
            yield (
                f"the decay is shortened from {asked} steps to {decay}: "
                f"{of} = {steps}, and the warm-up takes {warmup} of them"
            )


COMPONENTS: list[type] = [AdamW, WarmupStableDecay]
