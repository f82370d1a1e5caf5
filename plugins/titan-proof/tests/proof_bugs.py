"""Faults as trainers have had them, put into titan on each rank of a layout: what `titan prove` must find."""

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

from titan_proof.prove.compare import adds_up, reference_of
from titan_proof.prove.measure import Results, measure
from titan_proof.prove.uses import exported, generated
from titancli import LossResult
from titancli.engine import Engine, grad_clip, pipelined, runners, sampling
from titancli.engine import engine as engine_module
from titancli.engine.experts import Balancing, RouterLosses
from titancli.engine.step import Step
from titancli.models.blocks.cache import Group, KVCache
from titancli.models.blocks.decoder import Decoder
from titancli.models.blocks.feed_forward import FeedForward
from titancli.models.blocks.hf import DecoderHF
from titancli.models.blocks.moe import Experts, MoE
from titancli.models.blocks.reach import Reach
from titancli.parallel import activation_checkpoint, alone, tensor
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
    """What a rank computes in a case, with a fault or without; of an export or of generation the answer."""
    recipe = load_recipe(Path(file), overrides).recipe
    recipe = dataclasses.replace(recipe, converters=[*recipe.converters, *converters])
    with BUGS[name]() if name is not None else nullcontext():
        if "export" in more:
            return exported(recipe, sizes, Path(folder) / "export")
        if "generation" in more:
            return generated(recipe, sizes, None)
        return measure(recipe, sizes, saved=Path(folder) / "step-1" if "resume" in more else None)


def nudged(file: str, overrides: list[str], sizes: list[int]) -> Results:
    return measure(load_recipe(Path(file), overrides).recipe, sizes, nudge=1e-6)


def halves_add_up(file: str, base: str, overrides: list[str]) -> bool:
    """See `adds_up`; the base that adapters need is made here."""
    recipe = load_recipe(Path(file), overrides).recipe
    with Engine.build(dataclasses.replace(recipe, weights=None, converters=[]), device="cpu") as engine:
        engine.save(base)
    reference = reference_of(measure(recipe, [8]), measure(recipe, [8], nudge=1e-6))
    return adds_up(recipe, 8, reference)


def several() -> bool:
    return dist.get_world_size() > 1


def wrapped(owner: Any, name: str, make: Callable[..., Any]) -> Any:
    """Have `make(original, *arguments)` called in place of a method or a function."""
    original = getattr(owner, name)
    return patch.object(owner, name, functools.wraps(original)(lambda *a, **k: make(original, *a, **k)))


# -------------------------------------------------------------------------------------------- reductions


@bug
def missing_reduction() -> Iterator[None]:
    """Norms under tensor parallel: their gradients are sums over a part of a row, and are not added."""

    def forward(original: Any, self: nn.RMSNorm, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)

    with wrapped(tensor._RMSNorm, "forward", forward):
        yield


@bug
def doubled_reduction() -> Iterator[None]:
    """Gradients are added over the replicas by FSDP2, and once more."""
    with wrapped(FSDPModule, "set_gradient_divide_factor", lambda original, self, _: original(self, 0.5)):
        yield


@bug
def average_of_averages() -> Iterator[None]:
    """FSDP2's own averaging is left on."""
    with wrapped(FSDPModule, "set_gradient_divide_factor", lambda original, self, _: None):
        yield


@bug
def one_gradient_twice() -> Iterator[None]:
    """A hook of one parameter multiplies its gradient by the number of ranks."""

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
    """The average over micro-batches of what is divided by all tokens already."""

    def divide(original: Any, parameters: Any, weight: Tensor, *more: Any) -> Any:
        return original(parameters, weight * 2, *more)

    with wrapped(engine_module, "norm_and_scale", divide):
        yield


@bug
def norm_of_a_shard() -> Iterator[None]:
    """The norm for clipping adds up the squares of this rank alone."""

    def norm(original: Any, parameters: Any, device: Any, stages: Any = None) -> Tensor:
        gradients = [p.grad.to_local() for p in parameters if p.grad is not None]
        return torch.stack([g.norm() for g in gradients]).norm()

    with wrapped(grad_clip, "total_norm", norm):
        yield


@bug
def undivided_on_shards() -> Iterator[None]:
    """An optimizer that divides gradients as it steps leaves those of shards alone."""

    def step(original: Any, self: torch.optim.AdamW, *given: Any) -> Any:
        if several():
            self.grad_scale = None
        return original(self, *given)

    with wrapped(torch.optim.AdamW, "step", step):
        yield


@bug
def third_micro_batch_lost() -> Iterator[None]:
    """What the third micro-batch of a call has to say does not come to the gradients."""
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
    """The bias of a row-parallel linear is added by every rank, before the sum."""

    def prepare(original: Any, path: str, module: Any, *more: Any) -> None:
        original(path, module, *more)
        if hasattr(module, "_adds_bias"):
            module._adds_bias = True

    with wrapped(tensor, "_prepare", prepare):
        yield


@bug
def window_off_by_one() -> Iterator[None]:
    """Under context parallel each token sees the next one too."""

    def mask(original: Any, self: Reach, queries: range, keys: range, device: Any) -> Tensor:
        return original(self, range(queries.start + 1, queries.stop + 1), keys, device)

    with wrapped(Reach, "mask", mask):
        yield


@bug
def router_sees_local_tokens() -> Iterator[None]:
    """Tokens are centred by the mean of those that this rank has, before the router scores them."""

    def forward(original: Any, self: MoE, x: Tensor) -> Tensor:
        keep = self.router.forward
        mean = x.flatten(0, -2).mean(0)
        with patch.object(self.router, "forward", lambda tokens, bias: keep(tokens - mean, bias)):
            return original(self, x)

    with wrapped(MoE, "forward", forward):
        yield


@bug
def dropout_without_rng() -> Iterator[None]:
    """What is run again in backward draws other numbers."""

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
    """A weight that was gathered in the first step is used in the second."""

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
    """What a weight was when it was first cast to bfloat16 is computed with from then on."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def local(original: Any, parameter: Tensor) -> Tensor:
        fresh: Tensor = original(parameter)
        first = kept.setdefault(id(parameter), (parameter, fresh.detach().clone()))[1]
        return fresh + (first - fresh).detach()

    with wrapped(alone, "local", local):
        yield


@bug
def state_lost_at_resume() -> Iterator[None]:
    """A resume loads the weights, and the optimizer begins anew."""
    with wrapped(Engine, "load", lambda original, self, folder: original(self, folder, optimizer=False)):
        yield


@bug
def replicas_begin_apart() -> Iterator[None]:
    """Initial values depend on the rank."""

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
    """Under context parallel each rank counts the positions of its part of a row from zero."""

    def angles(original: Any, self: Decoder, positions: Tensor) -> Any:
        return original(self, positions - positions.min())

    with wrapped(Decoder, "angles", angles):
        yield


@bug
def loss_divided_by_local_tokens() -> Iterator[None]:
    """Each rank divides by the targets that it has itself."""
    with wrapped(engine_module, "summed", lambda original, sums, group: dict(sums)):
        yield


@bug
def pipeline_averages_micro_batches() -> Iterator[None]:
    """A schedule divides gradients by its micro-batches, as torch's do unless they are asked not to."""

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
    """Tokens of one expert reach another one's weights on the rank that has both."""

    def compute(original: Any, self: Experts, x: Tensor, counts: Tensor, weights: Any) -> Tensor:
        if len(counts) < self.num_experts:
            weights = {name: weight.flip(0) for name, weight in weights.items()}
        return original(self, x, counts, weights)

    with wrapped(Experts, "compute", compute):
        yield


@bug
def experts_balanced_by_local_tokens() -> Iterator[None]:
    """The bias that evens out experts moves by the tokens of one rank."""

    def step_applied(original: Any, self: Balancing, step: Step) -> None:
        self._groups = []
        original(self, step)

    with wrapped(Balancing, "step_applied", step_applied):
        yield


@bug
def auxiliary_loss_of_each_micro_batch() -> Iterator[None]:
    """The load-balancing loss takes the shares of a micro-batch for those of all tokens."""
    with wrapped(RouterLosses, "_share", lambda original, self, weights: None):
        yield


# ------------------------------------------------------------------------------------- export, generation


@bug
def transposed_at_export() -> Iterator[None]:
    """A square matrix is written the other way round: nothing but its values shows it."""

    def to_hf(original: Any, self: DecoderHF, name: str, tensor: Tensor) -> Any:
        square = name.endswith("attention.wo.weight") and tensor.shape[0] == tensor.shape[1]
        return original(self, name, tensor.t().contiguous() if square else tensor)

    with wrapped(DecoderHF, "to_hf", to_hf):
        yield


@bug
def cache_off_by_one() -> Iterator[None]:
    """Tokens after the prompt are put one position too far."""

    def extend(original: Any, self: KVCache, rows: Any, counts: Any, device: Any) -> Any:
        later = [bool(self.table.lengths[row]) for row in rows]
        found = original(self, rows, counts, device)
        return dataclasses.replace(found, positions=found.positions + 1) if all(later) else found

    with wrapped(KVCache, "extend", extend):
        yield


@bug
def converters_taken_off_to_sample() -> Iterator[None]:
    """The model is sampled from without any forward that stands on an instance."""

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
    """Rows that are shorter than others see what fills up their keys."""

    def find(original: Any, self: Group, reach: Any, device: Any) -> Any:
        return original(self, reach, device)._replace(mask=None)

    with wrapped(Group, "_find", find):
        yield
