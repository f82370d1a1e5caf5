"""Sampling from the model under training: parameters are gathered once, and forward passes are plain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titancli.checkpoint.hf.lazy_tensor import put
from titancli.checkpoint.hf.sidecar_files import end_ids
from titancli.distributed.private import forget_iteration
from titancli.distributed.together import Ranks
from titancli.engine.first_weights import allocate
from titancli.engine.rng import derive
from titancli.errors import TitanError
from titancli.models.blocks.state import named_state
from titancli.models.loss import of_loss
from titancli.parallel.unsharded import held
from titancli.parallel.wrapped import as_written
from titancli.rl.complete import Completing

if TYPE_CHECKING:
    from titancli.layout.degrees import Degrees
    from titancli.protocols import Tokenizer
    from titancli.protocols.samples import Completion, SamplingParams

FSDP = "torch.distributed.fsdp"
"""Module prefix of the hooks that gather parameters before a forward and free them after it."""


def seeds_of(prompts: Sequence[Sequence[int]], n: int, seed: int) -> list[list[int]]:
    """Return the seeds of n completions of each prompt, derived from (seed, number, prompt) alone."""
    return [[derive(seed, number, *prompt) for number in range(n)] for prompt in prompts]


def sampled(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    *,
    seeds: Sequence[Sequence[int]] | None,
    limits: Sequence[int] | None,
    tokenizer: Tokenizer | None,
    batch_size: int,
) -> list[list[Completion]]:
    """Return completions; see `Engine.sample`."""
    engine.ready("sample")
    call, degrees = engine.call("sample"), engine.mesh.degrees
    tokenizer = tokenizer or engine.tokenizer
    ends = end_ids(engine.kept, None if tokenizer is None else tokenizer.eos_id)

    def asked(rows: slice) -> Completing:
        return Completing(
            engine.parts[0],
            prompts[rows],
            (seeds or seeds_of(prompts, n, params.seed))[rows],
            params,
            tokenizer=tokenizer,
            end_ids=ends,
            limits=None if limits is None else limits[rows],
        )

    with call.agreed():
        for name, number in {"n": n, "batch_size": batch_size}.items():
            if type(number) is not int or number < 1:
                raise TitanError(f"sample: {name} is {number!r}", hint="it is an integer of 1 or more")
        whole = asked(slice(None))
        call.same_rows(f"with other prompts, seeds or options ({derive(whole.prompts, whole.rows, params)})")
    # Ranks with the same prompts split them: their results might differ by rounding on a device.
    peers = degrees.cp * degrees.tp

    def run(asked: Completing) -> list[list[Completion]]:
        return asked.run(model, engine.device, batch_size=batch_size, version=engine.version)

    with engine.sampling() as model:
        if peers == 1:
            with call.shared():
                return run(whole)
        rank, first = dist.get_rank() % peers, dist.get_rank() // peers * peers
        everyones = Ranks().allgather_call("sample", lambda: run(asked(slice(rank, None, peers))))
    return [everyones[first + number % peers][number // peers] for number in range(len(prompts))]


def refuse_layout(model: Any, degrees: Degrees) -> None:
    """Check that the model and its layout can be sampled from.

    Raises:
        TitanError: they cannot.
    """
    if degrees.pp > 1:
        raise TitanError(
            f"sampling: a model under mesh.pp = {degrees.pp} cannot be sampled from: each rank holds only "
            "some stages of the model",
            hint="set mesh.pp = 1, or pass engine.weights() to a separate generator",
        )
    if model.new_cache is None:
        raise TitanError(
            f"sampling: {type(model).__name__} cannot generate: {model.why_no_cache}",
            hint="docs/your-own-model.md describes what a model needs for that",
        )


@contextmanager
def not_training(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Set modules to evaluation mode in the block: no dropout. Training mode is restored after it."""
    training = [module for part in parts for module in part.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def whole_model(engine: Any) -> Iterator[Any]:
    """Provide the whole model in each rank's own memory in the block. Collective at its beginning.

    With tp, cp or ep it is an assembled copy, otherwise the module under training itself.
    """
    degrees = engine.mesh.degrees
    if degrees.tp * degrees.cp * degrees.ep > 1:
        yield assembled(engine)
        return
    model = engine.parts[0]
    with not_training([model]), gathered(model):
        yield model


def assembled(engine: Any) -> Any:
    """Return a copy of the whole model, as for a single rank, in the compute dtype. Collective."""
    model = engine.uncut()
    allocate(model.to(getattr(torch, engine.config["compute_dtype"])), engine.device)
    target = dict(named_state(model))
    for name, tensor in named_state(engine.parts[0]):
        if not of_loss(name):
            whole = tensor.detach()
            put(target[name], whole.full_tensor() if isinstance(whole, DTensor) else whole)
    return model.eval()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather all parameters on every rank in the block, and run forward passes without FSDP2 hooks,
    compilation and activation checkpointing; converters' changes stay. Everything is restored after it.
    Collective at its beginning."""
    with ExitStack() as stack:
        stack.callback(forget_iteration, model)  # frees gathered parameters, even if gathering raises
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        stack.enter_context(held(model))
        for module in model.modules():
            stack.enter_context(_without_fsdp_hooks(module))
        for block in model.layers.values():  # type: ignore[operator]
            stack.enter_context(as_written(block))
        yield


@contextmanager
def _without_fsdp_hooks(module: nn.Module) -> Iterator[None]:
    # They have nothing to gather, yet cost as much time as a small layer.
    registries: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
    kept = [dict(registry) for registry in registries]
    try:
        for registry in registries:
            for key, hook in list(registry.items()):
                if str(getattr(hook, "__module__", "")).startswith(FSDP):
                    del registry[key]
        yield
    finally:
        for registry, hooks in zip(registries, kept, strict=True):
            registry.clear()
            registry.update(hooks)
