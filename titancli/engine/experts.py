"""Token counts of experts over a whole call, and balancing by bias."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titancli.engine.inputs import checked
from titancli.engine.rng import rewound
from titancli.errors import TitanError
from titancli.models.blocks.moe import moe_layers
from titancli.observe.metrics import collector, report
from titancli.parallel.fsdp import reshard
from titancli.parallel.unsharded import as_stored

if TYPE_CHECKING:
    from titancli.checkpoint.start_from import StartFrom
    from titancli.engine.step import Step
    from titancli.protocols.batch import Batch
    from titancli.recipe.schema import Recipe

TINY = torch.finfo(torch.float32).tiny


class RouterLosses:
    """Token counts of a whole call for the auxiliary losses of routers (balancing and z), and the factors
    that turn sums divided by the loss's weight into means. Falsy if the model has no such losses."""

    def __init__(
        self, parts: Sequence[Any], groups: Sequence[dist.ProcessGroup | None], names: Sequence[str]
    ) -> None:
        """
        Args:
            groups: all together count every token once; loss weights are summed over the first.
            names: the coefficients of the whole model (`router_losses`), so that pipeline stages without
                experts take part in the same collectives.
        """
        self.names = names
        self._parts, self._groups = parts, groups
        self._layers = [layer for part in parts for layer in moe_layers(part).values()] if names else []

    def __bool__(self) -> bool:
        return bool(self.names)

    def refuse(self, what: str, hint: str) -> None:
        """Refuse features that are incompatible with these losses, which are means over all tokens of a step.

        Raises:
            TitanError: the model has such losses.
        """
        if self.names:
            raise TitanError(
                f"{what}: {' and '.join(f'model.moe.{name}' for name in self.names)} multiplies a mean over "
                f"all tokens of a step, which must be in one call of forward_backward",
                hint=hint,
            )

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Reset the counts at the end of the block, so that no other call uses them."""
        try:
            yield
        finally:
            for layer in self._layers:
                layer.load = layer.per_token = None

    def count_beforehand(
        self, batches: Sequence[Batch], loss: Any, forward: Callable[[Batch, Any], Any]
    ) -> None:
        """Count the tokens and loss weights of all batches, in a separate forward pass with the random
        numbers of the pass that follows. Collective."""
        device = next(iter(batches[0].values())).device
        # Its metrics are reported by the forward that follows.
        with torch.no_grad(), rewound(device), collector.muted(), self.counted() as weights:
            weights += [checked(forward(batch, loss), loss).weight for batch in batches]
        for part in self._parts:
            reshard(part)

    @contextmanager
    def counted(self) -> Iterator[list[Tensor]]:
        """Count the tokens of forward passes in the block, which append their loss weights to the list, and
        set the resulting factors in the layers. Collective."""
        weights: list[Tensor] = []
        for layer in self._layers:
            layer.counting = torch.zeros(layer.config.num_experts, dtype=torch.int64, device=layer.device)
        try:
            yield weights
            if self._layers:
                self._share(weights)
        finally:
            for layer in self._layers:
                layer.counting = None

    def _share(self, weights: list[Tensor]) -> None:
        counts: list[Any] = [layer.counting for layer in self._layers]
        total, weight = torch.cat(counts), torch.stack([weight.float() for weight in weights]).sum()
        for group in self._groups:
            dist.all_reduce(total, group=group)
        dist.all_reduce(weight, group=self._groups[0])
        for layer, count in zip(self._layers, total.split([len(count) for count in counts]), strict=True):
            layer.load = layer.share_of(count)
            layer.per_token = weight * (layer.config.top_k / count.sum().clamp(min=1))


def router_losses(model: nn.Module) -> list[str]:
    """Return the names of the coefficients of a whole model's router losses."""
    layers = moe_layers(model).values()
    names = ("aux_loss_coeff", "z_loss_coeff")
    return [name for name in names if any(getattr(layer.config, name) for layer in layers)]


# -------------------------------------------------------------------------------------------------- balancing


# Not the module's name: messages below titan's logger are printed and become events of the run.
logger = logging.getLogger("titancli.experts")


def begins_unbalanced(hf_form: Any, recipe: Recipe, start: StartFrom) -> bool:
    """Return whether the recipe would balance a model just loaded from weights whose Hugging Face form has no
    balancing biases. The same on every rank."""
    moe = getattr(recipe.model, "moe", None)
    balanced = bool(getattr(moe, "load_balance_coeff", None)) and not getattr(
        moe, "freeze_expert_bias", False
    )
    lost = hf_form is not None and bool(hf_form.loses_biases)
    return balanced and lost and start.kind != "nothing"


def report_frozen(recipe: Recipe) -> None:
    """Report that training leaves the biases of the weights unchanged, if the recipe would balance
    otherwise."""
    moe = getattr(recipe.model, "moe", None)
    frozen = getattr(moe, "freeze_expert_bias", False) and getattr(moe, "load_balance_coeff", None)
    if frozen and dist.get_rank() == 0:
        logger.warning(
            "the balancing biases of the experts stay as they are in the weights "
            "(model.moe.freeze_expert_bias; set it to false to balance further)"
        )


def hold_biases(parts: Iterable[Any], device: torch.device, held_before: bool) -> bool:
    """Freeze biases that are all zero: moved, they would route tokens differently from the export, which
    cannot contain them. Nonzero biases mean that the weights were balanced before; balancing then continues.
    Collective.

    Returns:
        True if they are frozen.
    """
    layers = [layer for part in parts for layer in moe_layers(part).values()]
    biases = [layer.expert_bias for layer in layers if layer.expert_bias is not None]
    moved = torch.stack([bias.any() for bias in biases]).any() if biases else torch.zeros(())
    anywhere = moved.to(device, torch.float32)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    held = not bool(anywhere)
    for layer in layers:
        layer.holds_bias = held
    if held != held_before and dist.get_rank() == 0:
        logger.warning(
            "model.moe.load_balance_coeff is treated as 0: the weights have no balancing biases, which "
            "a Hugging Face folder of this model cannot hold"
            if held
            else "model.moe.load_balance_coeff applies: the checkpoint has balancing biases"
        )
    return held


class Balancing:
    """Updates state that has no gradients, by the token counts of all ranks' experts in a step."""

    def __init__(
        self,
        parts: Sequence[Any],
        groups: Sequence[dist.ProcessGroup | None],
        device: torch.device,
        *,
        begins_unbalanced: bool = False,
    ) -> None:
        """
        Args:
            groups: as for `RouterLosses`.
            begins_unbalanced: freeze biases that are zero; see `hold_biases`.
        """
        self._parts, self._groups, self._device = parts, groups, device
        self._begins_unbalanced, self._holds = begins_unbalanced, False

    def weights_loaded(self) -> None:
        """Check the biases of new weights. Collective."""
        if self._begins_unbalanced:
            self._holds = hold_biases(self._parts, self._device, self._holds)

    def step_applied(self, step: Step) -> None:
        """Update balancing state with the token counts of the step, and reset them. Collective."""
        counts = {name: count for part in self._parts for name, count in part.token_counts().items()}
        if not counts:
            return
        total = torch.cat(list(counts.values()))
        for group in self._groups:
            dist.all_reduce(total, group=group)
        sizes = [len(count) for count in counts.values()]
        _report_load(dict(zip(counts, total.split(sizes), strict=True)))
        if step.skipped is not None:  # a skipped step moves no bias
            total = torch.where(step.skipped > 0, torch.zeros_like(total), total)
        sums = dict(zip(counts, total.split(sizes), strict=True))
        for part in self._parts:
            if names := part.token_counts():
                with as_stored(part):
                    part.after_step({name: sums[name] for name in names})


def _report_load(sums: dict[str, Tensor]) -> None:
    """Report the ratio of the busiest expert's load to the mean, per layer and for the worst layer."""
    loads = {name: count.max() / count.float().mean().clamp(min=TINY) for name, count in sums.items()}
    for name, load in loads.items():
        report(f"expert_load/{name}", load)
    report("expert_load", torch.stack(list(loads.values())).max(), reduce="max")
