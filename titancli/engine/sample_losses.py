"""Losses of samples: batch losses that keep log-probabilities, and functions of all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from titancli.distributed.together import Ranks
from titancli.engine.inputs import checked, name_of, trained_alone
from titancli.engine.packing import Packed
from titancli.errors import TitanError
from titancli.protocols import LossDefaults
from titancli.protocols.batch import IGNORE, Batch
from titancli.protocols.result import LossResult
from titancli.protocols.samples import Sample
from titancli.registry.component import is_config

if TYPE_CHECKING:
    from titancli.engine.runners import Sums

SampleLoss = Callable[[list[Tensor], list[Sample]], LossResult]


def sample_loss(given: Any, loss_of: Callable[[Any], Any]) -> Kept:
    """Return a loss for samples: a function of all of them, or a wrapped batch loss.

    A callable without an attribute `output` is a function of all samples.
    """
    plain = callable(given) and not isinstance(given, type) and not is_config(given)
    return OfSamples(given) if plain and not hasattr(given, "output") else Kept(loss_of(given))


class Kept:
    """A batch loss that keeps the log-probabilities of all rows, and their entropy if it uses that."""

    def __init__(self, loss: Any) -> None:
        self._loss, self._function = loss, getattr(loss, "_function", loss)
        self.output = loss.output
        self.needs, self.entropy, self.weighted = loss.needs, loss.entropy, loss.weighted
        self.steady, self.temperature, self.outputs = loss.steady, loss.temperature, loss.outputs
        self.check_batch, self.token_weights = loss.check_batch, loss.token_weights
        self.kept: list[Tensor] = []
        """[R, S] fp32 each, over the rows of a call: log-probabilities, and entropy if used."""

    def begin(self, packed: Packed, device: torch.device) -> None:
        """Allocate memory for the rows of a call."""
        shape = (sum(batch.rows for batch in packed.batches), packed.batches[0]["tokens"].shape[1])
        self.kept = [torch.zeros(shape, device=device) for _ in range(2 if self.entropy else 1)]

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        log_probs = out.detach()
        if self.output == "model":
            flat = functional.cross_entropy(
                log_probs.flatten(0, 1).float(),
                batch["targets"].flatten(),
                ignore_index=IGNORE,
                reduction="none",
            )
            log_probs = -flat.view(batch["targets"].shape)
        self.kept[0][batch["row"]] = log_probs.float()
        if self.entropy:
            self.kept[1][batch["row"]] = batch["entropy"].detach()
        return self.result(out, batch)

    def result(self, out: Tensor, batch: Batch) -> LossResult:
        made: LossResult = self._loss(out, batch)
        return made


class OfSamples(Kept):
    """A function of the log-probabilities of all samples.

    Its gradients by the log-probabilities become token weights w of the loss −Σ w·log p, which has the same
    parameter gradients (Tinker's `forward_backward_custom`).
    """

    output = "logprobs"
    needs = ()
    entropy = False
    weighted = True
    outputs = ()

    def __init__(self, function: SampleLoss) -> None:
        trained_alone(function)
        self._function = function
        self.steady = getattr(function, "steady", LossDefaults.steady)
        self.temperature = getattr(function, "temperature", LossDefaults.temperature)
        if getattr(function, "outputs", ()):
            raise TitanError(
                f"{name_of(self)} is a function of samples, which has no outputs but log-probabilities",
                hint='for a function of a batch, give it an attribute output = "logprobs"',
            )
        self.kept = []
        self._weights = self._weight = torch.zeros(())

    def check_batch(self, batch: Batch) -> None:
        """Check nothing: the function reads samples."""

    def differentiate(
        self, log_probs: list[Tensor], samples: list[Sample], packed: Packed, shares: int
    ) -> Sums:
        """Compute the function and its gradients, and return this rank's share of its metrics.

        Args:
            log_probs: [tokens] of each sample.
            shares: the number of ranks that compute the same.
        """
        sums: Sums = {}
        if samples:
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in log_probs]
                result = checked(self._function(leaves, samples), self)
                slopes = torch.autograd.grad(result.sum, leaves, allow_unused=True)
            self._weights = -packed.repacked(slopes)
            sums = {"loss": result.sum.detach(), "weight": result.weight, **result.metrics}
        else:
            self._weights = torch.zeros_like(self.kept[0])
        everyones = [sorted(sums)] if shares > 1 else Ranks().gather(sorted(sums))
        nothing = torch.zeros((), device=self.kept[0].device)
        names = ("loss", "weight", *max(everyones, key=len))  # a rank without samples reports zeros
        shared = {name: sums.get(name, nothing).float() / shares for name in names}
        # Each micro-batch has an equal share, because a model may divide by it.
        self._weight = shared["weight"] / len(packed.batches)
        return shared

    def token_weights(self, batch: Batch) -> Tensor:
        """Return the negative gradient of the function by each log-probability, [B, S] fp32."""
        return self._weights[batch["row"]]

    def result(self, out: Tensor, batch: Batch) -> LossResult:
        return LossResult(-(self.token_weights(batch) * out).sum(), self._weight)
