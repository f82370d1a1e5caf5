"""Losses, optimizers and learning rate schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from titancli.protocols.batch import Batch
    from titancli.protocols.model import Role
    from titancli.protocols.result import LossResult


class LossDefaults(Protocol):
    """Optional members of a loss, with their defaults."""

    needs: Sequence[str] | Mapping[str, Literal["B", "BS"]] = ()
    """The required members of a batch besides the model's inputs and targets; as a mapping, with their
    shape: one number for each row or for each token. Checked before anything is computed."""
    entropy: bool = False
    """Whether it needs `batch["entropy"]`: [B, S] fp32, the entropy of the model's distribution at each
    position in nats, 0 where there is no target. It carries its gradient if `output` is "logprobs"."""
    outputs: Sequence[str] = ()
    """What else of the model it needs in the batch: `"topk:K"`, for `topk_logprobs` [B, S, K] fp32 and
    `topk_ids` [B, S, K] int64 of the K most probable tokens at each position, without gradient;
    `"hidden:-1"`, for `hidden` [B, S, dim], with gradient, which the output projection is given."""
    temperature: float = 1.0
    """The logits are divided by it before log-probabilities and entropy are computed: that of sampling, for
    a loss of samples."""
    weighted: bool = False
    """Whether it multiplies what each target adds to it by `batch["weights"]` [B, S], where the batch has
    them. Samples whose mask holds other numbers than 0 and 1 are rejected for a loss that does not."""
    steady: bool = True
    """False for a loss without a stable level, such as that of a policy: its jumps and those of its
    gradient norm do not count as spikes, and the guard ([stability]) skips steps only if they are not
    finite."""

    values: Callable[[Any, Batch], Tensor] | None = None
    """For a loss with a value per token, as of a critic: `values(out, batch)` returns them, [B, S] fp32, from
    what the call gets, but from no further members of the batch than `outputs` are. It is what
    `Engine.forward(return_values=True)` returns."""

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Set the initial values of its own parameters and buffers in place, as `Model.init_weights` does.

        A loss that is an `nn.Module` with trainable parameters must have it: they become the model's, under
        the names `loss.NAME`, and are trained, sharded, saved and loaded as all others. In the call they are
        whole, in the compute dtype, and what they are applied to must be the same on all ranks with the same
        rows: `out`, or `batch["hidden"]` (see `outputs`).
        """
        return

    def sampled_at(self, temperature: float) -> None:
        """Take the temperature of the samples that are learned from next; a loop that draws them calls it."""
        return

    def check_batch(self, batch: Batch) -> None:
        """Check a batch before anything is computed; raises a TitanError if it cannot be used."""
        return

    def token_weights(self, batch: Batch) -> Tensor | None:
        """Return the weights w [B, S] if the loss is −Σ w·log p, else None. The gradients are then
        computed in forward, in chunks, and the loss is called with log-probs without gradient, for its
        weight and metrics."""
        return None


class Loss(LossDefaults, Protocol):
    """Computes a sum and the weight to divide it by; see `titancli.protocols.result`.

    Optional members are in `LossDefaults`.
    """

    output: Literal["logprobs", "model", "hidden", "projection"]
    """The first argument of the loss: log p(targets) [B, S] fp32; the model's raw output (logits); the hidden
    states [B, S, dim] that the output projection is given, of which no logits are made; or a
    `titancli.models.blocks.projection.Projection`, from which a loss of whole distributions makes the logits
    of some rows at a time."""

    def __call__(self, out: Any, batch: Batch) -> LossResult: ...


class LossBuilder(Protocol):
    def __call__(self, config: Any) -> Loss:
        """Build the loss. A builder with an argument `model` is also given the model's config, for the sizes
        of parameters (`model.dim`)."""
        ...


class OptimizerConfig(Protocol):
    """Members of an optimizer's config that `titan plan` needs, without torch. Optional: otherwise two fp32
    numbers are assumed.

    Other optional members of such a config are in `titancli.registry.defaults`.
    """

    rounds_stochastically: ClassVar[bool]
    """Whether weights and state in bfloat16 are rounded stochastically, so that small updates are not
    lost."""

    def state_bytes(self, stored: int) -> float:
        """Return the bytes of state for each element of a parameter that is stored in `stored` bytes."""
        ...


class OptimizerBuilder(Protocol):
    def __call__(
        self, config: Any, *, named_parameters: list[tuple[str, nn.Parameter]], roles: Mapping[str, Role]
    ) -> torch.optim.Optimizer:
        """Build the optimizer; `named_parameters` are those of this rank (with a pipeline, of its
        stages). `roles` says what each parameter is that is trained in the whole model, whatever this
        rank has of it; its keys are the names to check patterns against."""
        ...


class Schedule(Protocol):
    """The learning rate over a run, as factors on the optimizer's.

    It depends on nothing but the step, so that a resume continues it and all ranks have the same. A factor
    that is not a finite int or float of at least 0, and an error, end the run: before its first step where
    one of 1,000 steps over the run shows it, else at the step.
    """

    def __call__(self, step: int) -> float:
        """Return the factor of a step, counted from 0; a run may go on after the end of the schedule."""
        ...


class ScheduleBuilder(Protocol):
    def __call__(self, config: Any, *, steps: int) -> Schedule:
        """Build the schedule; `steps` is its length: `total_steps` of the config, or training.steps."""
        ...
