"""The results of a loss, and of a training pass over samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from titancli.errors import TitanError

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.protocols.batch import Batch


class LossResult(NamedTuple):
    """A sum and its weight: the engine divides once, by the total weight over all ranks and micro-batches.

    A NamedTuple because FSDP2 looks for the tensors of a module's output through the pytree.
    """

    sum: Tensor
    """Scalar, fp32, with gradient: the loss *summed* over whatever `weight` counts."""
    weight: Tensor
    """Scalar, fp32, without gradient: tokens, pairs, sequences, …"""
    metrics: dict[str, Tensor] = {}  # noqa: RUF012 - never written to
    """Further scalars to report, as sums over the same weight."""


class Result(NamedTuple):
    """What `Engine.forward_backward` returns for samples, in the order in which they were passed."""

    metrics: dict[str, Any]
    """As for batches: scalars on the device, the same on every rank."""
    logprobs: list[Tensor]
    """For each sample log p of its tokens under the weights before the step, in nats: [tokens] fp32 on the
    device, without gradient; 0 where the mask is 0, and at the first token."""
    entropy: list[Tensor] | None
    """For each sample the entropy of the distributions that its tokens were predicted by, in nats, likewise;
    None: the loss has it not computed (see `LossDefaults.entropy`)."""


def check_shape(batch: Batch, name: str, shape: str, loss: str) -> None:
    """Ensure that one of the batch's tensors has a number for each row ("B") or token ("BS").

    Raises:
        TitanError: it has another shape, or that is neither of these.
    """
    if shape not in ("B", "BS"):
        raise TitanError(f"the loss {loss} needs {name} as {shape!r}", hint='a shape is "B" or "BS"')
    wanted, found = batch["targets"].shape[: len(shape)], batch[name].shape
    if found != wanted:
        each = "token" if shape == "BS" else "row"
        spread = f"; one for a whole row: {name}[:, None].expand({wanted[0]}, {wanted[-1]})"
        raise TitanError(
            f"the loss {loss} takes {name} as [{', '.join(shape)}], which is {list(wanted)} here, but "
            f"the batch has {list(found)}",
            hint=f"pass one number for each {each}" + (spread if each == "token" and len(found) == 1 else ""),
        )
