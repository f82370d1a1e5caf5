"""Further optimizers, learning rates by name, averages of weights, and noise on embeddings. Configs only:
this file imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Lt, MinLen

from titancli import Component, Slot, component, hookimpl, section

if TYPE_CHECKING:
    from titancli import Recipe

ROUNDED = "its updates would be lost in rounding: use float32, or the optimizer adamw"


@section
class Float32:
    """Checks of an optimizer that rounds to nearest."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.training.dtype != "float32":
            yield "", f"training.dtype = {recipe.training.dtype!r}: {ROUNDED}"


@component("optimizer", "lion", target="titan_optimizers.elementwise:build_lion")
class Lion(Float32):
    """Lion: the sign of an interpolated momentum (arXiv 2302.06675). Half the state of AdamW."""

    lr: Annotated[float, Ge(0)] = 1e-4
    """Peak learning rate; a third to a tenth of AdamW's."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Weight of the momentum in the update."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Decay rate of the momentum."""
    weight_decay: Annotated[float, Ge(0)] = 1.0
    """Decoupled weight decay, multiplied by the learning rate; three to ten times AdamW's."""

    def state_bytes(self, stored: int) -> float:
        """Return the bytes of optimizer state per parameter element, for `titan plan`."""
        return 4.0


@component("optimizer", "adamw_8bit", target="titan_optimizers.eight_bit:build")
class AdamW8bit(Float32):
    """AdamW with moments of 8 bits, each block of a row with its own scale (arXiv 2110.02861).

    Blocks lie in rows, so that checkpoints are loaded on other layouts bit for bit. Vectors and matrices
    below 4,096 elements keep float32 moments.
    """

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

    def state_bytes(self, stored: int) -> float:
        """Return the bytes of optimizer state per parameter element, for `titan plan`."""
        return 2 * (1 + 4 / 256)


@component("optimizer", "adafactor", target="titan_optimizers.adafactor:build")
class Adafactor(Float32):
    """Adafactor: second moments of matrices from the means of their rows and columns (arXiv 1804.04235)."""

    lr: Annotated[float, Ge(0)] = 1e-2
    """Peak learning rate, relative to the root mean square of each parameter."""
    beta2_decay: Annotated[float, Lt(0)] = -0.8
    """Exponent of the step in the decay rate of the second moment, 1 − step^beta2_decay."""
    eps: Annotated[float, Gt(0)] = 1e-3
    """Least root mean square of a parameter that the learning rate is relative to."""
    clip: Annotated[float, Ge(1)] = 1.0
    """Maximum root mean square of an update."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""

    def state_bytes(self, stored: int) -> float:
        """Return the bytes of optimizer state per parameter element, for `titan plan`."""
        return 0.01  # two vectors for a matrix


@component("optimizer", "schedule_free", target="titan_optimizers.schedule_free:build")
class ScheduleFree(Float32):
    """Schedule-free AdamW: an average of the iterates in place of a decaying rate (arXiv 2405.15682).

    The average is what is evaluated, saved and exported. Warm-up is that of `[lr_scheduler]`.
    """

    lr: Annotated[float, Ge(0)] = 2.5e-3
    """Learning rate; one to ten times AdamW's."""
    beta1: Annotated[float, Gt(0), Lt(1)] = 0.9
    """How near to the average, and not to the iterates, gradients are computed."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay rate of the second moment (the mean of the squares of gradients)."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if getattr(recipe.lr_scheduler, "decay_ratio", 0.0) != 0:
            yield "", "the learning rate must not decay: set lr_scheduler.decay_ratio = 0"
        whole: Any = recipe.optimizer
        while isinstance(whole, ByName):
            whole = whole.optimizer
        if whole is not self:  # which would not ask it for the point where gradients are wanted
            yield "", "must be the optimizer of the recipe, or of by_name, and of no other"

    def state_bytes(self, stored: int) -> float:
        """Return the bytes of optimizer state per parameter element, for `titan plan`; in backward a copy of
        the average is among them."""
        return 3 * 4.0


@section
class Group:
    """Parameters with a learning rate of their own."""

    match: Annotated[list[str], MinLen(1)]
    """Name patterns, e.g. `["*.lora_b"]`. A parameter belongs to the first group that matches."""
    lr_factor: Annotated[float, Ge(0)] = 1.0
    """Factor of the learning rate; 0 leaves these parameters as they are, except for weight decay."""
    weight_decay: Annotated[float, Ge(0)] | None = None
    """Weight decay of these parameters; None: that of the optimizer."""


@component("optimizer", "by_name", target="titan_optimizers.by_name:build")
class ByName:
    """Another optimizer, with learning rates and weight decay by parameter name.

    LoRA+ (arXiv 2402.12354) is `match = ["*.lora_b"]` with `lr_factor = 16`.
    """

    groups: list[Group] = field(default_factory=list)
    """The groups, at least one; all other parameters are stepped as the optimizer says."""
    optimizer: Annotated[Component, Slot("optimizer")] = field(default_factory=lambda: _adamw())
    """The optimizer."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if not self.groups:
            yield "groups", "no parameters have rates of their own: add one, or use the optimizer itself"

    @property
    def lr(self) -> Any:
        """Return the peak learning rate of the optimizer."""
        return self.optimizer.lr

    @property
    def weight_decay(self) -> Any:
        """Return the weight decay of the optimizer."""
        return getattr(self.optimizer, "weight_decay", None)

    def state_bytes(self, stored: int) -> float:
        """Return the bytes of optimizer state per parameter element, for `titan plan`."""
        return float(self.optimizer.state_bytes(stored))


def _adamw() -> Any:
    from titancli.optimizers import AdamW

    return AdamW()


@component("converter", "neftune", target="titan_optimizers.neftune:NoisyEmbeddings")
class Neftune:
    """NEFTune: uniform noise on embeddings in training (arXiv 2310.05914)."""

    alpha: Annotated[float, Gt(0)] = 5.0
    """The noise is uniform in ±alpha / √(tokens of a row · width)."""


@component("callback", "ema", target="titan_optimizers.ema:Average")
class EMA:
    """Exponential moving average of the weights, in fp32, saved and resumed with checkpoints."""

    decay: Annotated[float, Gt(0), Lt(1)] = 0.999
    """Weight of the average in each step; the new weights have the rest."""
    export: bool = True
    """Save the average when the run has finished, as RUN/exports/step-N-NAME: a checkpoint to generate from,
    to convert to a Hugging Face folder, or to start from (`weights`)."""
    name: str = "ema"
    """Name of the average in checkpoints and exports."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name):
            yield "name", f"{self.name!r} must consist of letters, digits, - and _: it names a folder"
        if sum(isinstance(one, EMA) and one.name == self.name for one in recipe.callbacks) > 1:
            yield "name", f"two averages would be saved as {self.name!r}: give them different names"


@component("callback", "param_norm", target="titan_optimizers.param_norm:Norm")
class ParamNorm:
    """The 2-norm of all trained weights, as the metric `param_norm` of each step."""


@hookimpl
def titan_components() -> list[type]:
    return [Lion, AdamW8bit, Adafactor, ScheduleFree, ByName, Neftune, EMA, ParamNorm]
