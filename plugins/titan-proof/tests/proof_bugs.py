"""Real training bugs, injected into titan on each rank of a layout: `titan prove` must find them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_proof.prove.cases import GIVEN
from titan_proof.prove.compare import adds_up, reference_of
from titan_proof.prove.measure import Results, measure
from titan_proof.prove.uses import exported, generated
from titancli import LossResult
from titancli.engine import Engine, grad_clip, pipelined, runners, samples, sampling, training
from titancli.engine.experts import Balancing, RouterLosses
from titancli.engine.step import Step
from titancli.models.blocks.attention_window import Reach
from titancli.models.blocks.cache import Group, KVCache
from titancli.models.blocks.decoder import Decoder
from titancli.models.blocks.feed_forward import FeedForward
from titancli.models.blocks.hf import DecoderHF
from titancli.models.blocks.moe import Experts, MoE
from titancli.parallel import activation_checkpoint, tensor, unsharded
from titancli.recipe import load_recipe

BUGS: dict[str, Callable[[], Any]] = {}


def bug(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    BUGS[function.__name__] = contextmanager(function)
    return function


def seeded(
    name: str | None,
    file: str,
    overrides: list[str],
    sizes: list[int],
    folder: str = "",
    more: tuple[str, ...] = (),
    converters: tuple[Any, ...] = (),
) -> Results | dict[str, Any]:
    """Measure a case on a rank, with or without a fault; for an export or generation, return the answer."""
    recipe = load_recipe(Path(file), overrides).recipe
    recipe = dataclasses.replace(recipe, converters=[*recipe.converters, *converters])
    with BUGS[name]() if name is not None else nullcontext():
        if "export" in more:
            return exported(recipe, sizes, Path(folder) / "export")
        if "generation" in more:
            return generated(recipe, sizes, None)
        how = [name for name in more if name in GIVEN]
        return measure(recipe, sizes, saved=Path(folder) / "step-1" if "resume" in more else None, how=how)


def nudged(file: str, overrides: list[str], sizes: list[int], how: tuple[str, ...] = ()) -> Results:
    return measure(load_recipe(Path(file), overrides).recipe, sizes, nudge=1e-6, how=how)


def halves_add_up(file: str, base: str, overrides: list[str]) -> bool:
    """Call `adds_up`; the base that adapters need is made here."""
    recipe = load_recipe(Path(file), overrides).recipe
    with Engine.build(dataclasses.replace(recipe, weights=None, converters=[]), device="cpu") as engine:
        engine.save(base)
    reference = reference_of(measure(recipe, [8]), measure(recipe, [8], nudge=1e-6))
    return adds_up(recipe, 8, reference)


def several() -> bool:
    return dist.get_world_size() > 1


def wrapped(owner: Any, name: str, make: Callable[..., Any]) -> Any:
    """Call `make(original, *arguments)` instead of a method or function."""
    original = getattr(owner, name)
    return patch.object(owner, name, functools.wraps(original)(lambda *a, **k: make(original, *a, **k)))


# -------------------------------------------------------------------------------------------- reductions


@bug
def missing_reduction() -> Iterator[None]:
    """Leave out a sum: the gradients of norms under tensor parallel cover a part of a row, and are not
    added up."""

    def forward(original: Any, self: nn.RMSNorm, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)

    with wrapped(tensor._RMSNorm, "forward", forward):
        yield


@bug
def doubled_reduction() -> Iterator[None]:
    """Add gradients over the replicas twice: by FSDP2, and once more."""
    with wrapped(FSDPModule, "set_gradient_divide_factor", lambda original, self, _: original(self, 0.5)):
        yield


@bug
def average_of_averages() -> Iterator[None]:
    """Leave FSDP2's own averaging on."""
    with wrapped(FSDPModule, "set_gradient_divide_factor", lambda original, self, _: None):
        yield


@bug
def one_gradient_twice() -> Iterator[None]:
    """Multiply the gradient of one parameter by the number of ranks, in a hook."""

    def build(original: Any, *given: Any, **more: Any) -> Engine:
        engine: Engine = original(*given, **more)
        for name, parameter in engine.named_parameters():
            if name == "layers.1.attention.wk.weight" and several():
                parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(dist.get_world_size()))
        return engine

    with wrapped(Engine, "build", build):
        yield


@bug
def divided_again_by_micro_batches() -> Iterator[None]:
    """Average over micro-batches gradients that are already divided by all tokens."""

    def divide(original: Any, parameters: Any, weight: Tensor, *more: Any) -> Any:
        return original(parameters, weight * 2, *more)

    with wrapped(training, "norm_and_scale", divide):
        yield


@bug
def norm_of_a_shard() -> Iterator[None]:
    """Compute the norm for clipping from the squares of this rank alone."""

    def norm(original: Any, parameters: Any, device: Any, stages: Any = None) -> Tensor:
        gradients = [p.grad.to_local() for p in parameters if p.grad is not None]
        return torch.stack([g.norm() for g in gradients]).norm()

    with wrapped(grad_clip, "total_norm", norm):
        yield


@bug
def undivided_on_shards() -> Iterator[None]:
    """Let an optimizer that divides gradients as it steps leave those of shards undivided."""

    def step(original: Any, self: torch.optim.AdamW, *given: Any) -> Any:
        if several():
            self.grad_scale = None
        return original(self, *given)

    with wrapped(torch.optim.AdamW, "step", step):
        yield


@bug
def third_micro_batch_lost() -> Iterator[None]:
    """Lose the gradients of the third micro-batch of a call."""
    calls = 0

    def begin(original: Any, *given: Any, **more: Any) -> Any:
        nonlocal calls
        calls = 0
        return original(*given, **more)

    def checked(original: Any, *given: Any) -> LossResult:
        nonlocal calls
        calls += 1
        result: LossResult = original(*given)
        if calls != 3:
            return result
        return result._replace(sum=result.sum * 0 + result.sum.detach())

    with wrapped(runners.WholeModel, "forward_backward", begin), wrapped(runners, "checked", checked):
        yield


# --------------------------------------------------------------------------------------- what is computed


@bug
def bias_on_each_rank() -> Iterator[None]:
    """Add the bias of a row-parallel linear on every rank, before the sum."""

    def prepare(original: Any, path: str, module: Any, *more: Any) -> None:
        original(path, module, *more)
        if hasattr(module, "_adds_bias"):
            module._adds_bias = True

    with wrapped(tensor, "_prepare", prepare):
        yield


@bug
def window_off_by_one() -> Iterator[None]:
    """Let each token see the next one too, under context parallel."""

    def mask(original: Any, self: Reach, queries: range, keys: range, device: Any) -> Tensor:
        return original(self, range(queries.start + 1, queries.stop + 1), keys, device)

    with wrapped(Reach, "mask", mask):
        yield


@bug
def router_sees_local_tokens() -> Iterator[None]:
    """Center tokens by the mean of this rank's tokens, before the router scores them."""

    def forward(original: Any, self: MoE, x: Tensor, **more: Any) -> Tensor:
        keep = self.router.forward
        mean = x.flatten(0, -2).mean(0)
        with patch.object(self.router, "forward", lambda tokens, *given: keep(tokens - mean, *given)):
            return original(self, x, **more)

    with wrapped(MoE, "forward", forward):
        yield


@bug
def dropout_without_rng() -> Iterator[None]:
    """Draw new random numbers when forward is recomputed in backward."""

    def forward(original: Any, self: FeedForward, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(original(self, x), 0.5)

    def checkpoint(original: Any, *given: Any, **more: Any) -> Any:
        return original(*given, **more | {"preserve_rng_state": False})

    with (
        wrapped(FeedForward, "forward", forward),
        wrapped(activation_checkpoint, "checkpoint", checkpoint),
    ):
        yield


@bug
def stale_weight() -> Iterator[None]:
    """Use in the second step a weight that was gathered in the first."""

    def forward(original: Any, self: FeedForward, x: Tensor) -> Tensor:
        weight = self.w2.weight
        if not hasattr(self, "kept"):
            self.kept = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(self.kept)
        return original(self, x)

    with wrapped(FeedForward, "forward", forward):
        yield


@bug
def stale_cast() -> Iterator[None]:
    """Keep using a weight as it was when it was first cast to bfloat16."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def local(original: Any, parameter: Tensor) -> Tensor:
        fresh: Tensor = original(parameter)
        first = kept.setdefault(id(parameter), (parameter, fresh.detach().clone()))[1]
        return fresh + (first - fresh).detach()

    with wrapped(unsharded, "local", local):
        yield


@bug
def state_lost_at_resume() -> Iterator[None]:
    """Load only the weights at a resume, so that the optimizer starts anew."""
    with wrapped(Engine, "load", lambda original, self, folder: original(self, folder, optimizer=False)):
        yield


@bug
def replicas_begin_apart() -> Iterator[None]:
    """Make initial values depend on the rank."""

    def build(original: Any, *given: Any, **more: Any) -> Engine:
        engine: Engine = original(*given, **more)
        weight = dict(engine.named_parameters())["layers.0.feed_forward.w1.weight"]
        with torch.no_grad():
            (weight.to_local() if isinstance(weight, DTensor) else weight).mul_(1 + dist.get_rank())
        return engine

    with wrapped(Engine, "build", build):
        yield


@bug
def rope_restarts_on_each_rank() -> Iterator[None]:
    """Count positions from zero on each rank, under context parallel."""

    def angles(original: Any, self: Decoder, positions: Tensor) -> Any:
        return original(self, positions - positions.min())

    with wrapped(Decoder, "angles", angles):
        yield


@bug
def loss_divided_by_local_tokens() -> Iterator[None]:
    """Divide by the rank's own number of targets."""
    with wrapped(training, "summed", lambda original, sums, group: dict(sums)):
        yield


@bug
def pipeline_averages_micro_batches() -> Iterator[None]:
    """Divide gradients by the number of micro-batches in the schedule, which is torch's default."""

    def schedule(original: Any, name: str) -> Any:
        class Scaling(original(name)):  # type: ignore[misc]
            def __init__(self, *given: Any, **more: Any) -> None:
                super().__init__(*given, **more | {"scale_grads": True})

        return Scaling

    with wrapped(pipelined, "get_schedule_class", schedule):
        yield


# ----------------------------------------------------------------------------------------------- experts


@bug
def experts_swapped() -> Iterator[None]:
    """Swap the weights of two experts on the rank that has both."""

    def compute(original: Any, self: Experts, x: Tensor, counts: Tensor, weights: Any) -> Tensor:
        if len(counts) < self.num_experts:
            weights = {name: weight.flip(0) for name, weight in weights.items()}
        return original(self, x, counts, weights)

    with wrapped(Experts, "compute", compute):
        yield


@bug
def experts_balanced_by_local_tokens() -> Iterator[None]:
    """Move the bias that balances experts by the tokens of one rank."""

    def step_applied(original: Any, self: Balancing, step: Step) -> None:
        self._groups = []
        original(self, step)

    with wrapped(Balancing, "step_applied", step_applied):
        yield


@bug
def auxiliary_loss_of_each_micro_batch() -> Iterator[None]:
    """Compute the load-balancing loss from the shares of a micro-batch instead of all tokens."""
    with wrapped(RouterLosses, "_share", lambda original, self, weights: None):
        yield


# ------------------------------------------------------------------------------------- export, generation


@bug
def transposed_at_export() -> Iterator[None]:
    """Write a square matrix transposed: only its values show it."""

    def to_hf(original: Any, self: DecoderHF, name: str, tensor: Tensor) -> Any:
        square = name.endswith("attention.wo.weight") and tensor.shape[0] == tensor.shape[1]
        return original(self, name, tensor.t().contiguous() if square else tensor)

    with wrapped(DecoderHF, "to_hf", to_hf):
        yield


@bug
def cache_off_by_one() -> Iterator[None]:
    """Put tokens after the prompt one position too far."""

    def extend(original: Any, self: KVCache, rows: Any, counts: Any, device: Any) -> Any:
        later = [bool(self.table.lengths[row]) for row in rows]
        found = original(self, rows, counts, device)
        return dataclasses.replace(found, positions=found.positions + 1) if all(later) else found

    with wrapped(KVCache, "extend", extend):
        yield


@bug
def converters_taken_off_to_sample() -> Iterator[None]:
    """Sample from the model without forward methods that are set on an instance."""

    @contextmanager
    def as_written(block: Any) -> Iterator[None]:
        own = vars(block).pop("forward", None)
        yield
        if own is not None:
            block.forward = own

    with patch.object(sampling, "as_written", as_written):
        yield


@bug
def filling_seen() -> Iterator[None]:
    """Let rows that are shorter than others see the filling of their keys."""

    def find(original: Any, self: Group, reach: Any, device: Any) -> Any:
        return original(self, reach, device)._replace(mask=None)

    with wrapped(Group, "_find", find):
        yield


# ---------------------------------------------------------------------------------- samples, routes, epochs


@bug
def padding_counted_by_routers() -> Iterator[None]:
    """Let rows without targets count for the losses of routers."""

    def forward(original: Any, self: MoE, x: Tensor, given: Any = None, padding: Any = None) -> Tensor:
        return original(self, x, given)

    with wrapped(MoE, "forward", forward):
        yield


@bug
def routes_of_the_first_rank() -> Iterator[None]:
    """Replay on every rank of tensor parallel the routes of the first rank's tokens."""

    def my_part(original: Any, self: MoE, rows: Tensor) -> Tensor:
        group = self._tensor_group
        return rows if group is None else rows.chunk(group.size, 1)[0]

    with wrapped(MoE, "_my_part", my_part):
        yield


@bug
def samples_see_each_other() -> Iterator[None]:
    """Let samples that share a row attend to each other."""

    def pack(original: Any, *given: Any) -> Any:
        packed = original(*given)
        for batch in packed.batches:
            batch["document_ids"].fill_(1)
        return packed

    with wrapped(samples, "pack", pack):
        yield
