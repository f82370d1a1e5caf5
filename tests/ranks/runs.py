"""What the ranks run for the same-answer suite: two optimizer steps, and all that came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.engine.cases import Layout, Part, assembled, my_batches, part, recipe
from titancli.engine import Engine
from titancli.models.blocks.decoder import Decoder
from titancli.models.blocks.moe import moe_layers

STEPS = 2
LR = 0.5


def run(layout: Layout, optimizer: str) -> dict[str, torch.Tensor]:
    """Losses, gradient norms, and every gradient and updated weight after each step, by name; of experts also
    how many tokens each had, and their biases.

    Tensors come from the first rank of each pipeline stage; numbers from all.
    """
    with balancing_seen() as seen:
        return steps(layout, optimizer) | seen


@contextmanager
def balancing_seen() -> Iterator[dict[str, torch.Tensor]]:
    """What moves without gradients, where a model has it."""
    seen: dict[str, torch.Tensor] = {}
    done: Counter[str] = Counter()
    kept = Decoder.after_step

    def watched(model: Decoder, counts: Mapping[str, torch.Tensor]) -> None:
        kept(model, counts)
        for name, layer in moe_layers(model).items():
            seen[f"routes {done[name]} {name}"] = counts[name].float()
            if layer.expert_bias is not None:
                seen[f"weight {done[name]} {name}.expert_bias"] = layer.expert_bias.clone()
            done[name] += 1

    Decoder.after_step = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Decoder.after_step = kept  # type: ignore[method-assign]


def steps(layout: Layout, optimizer: str) -> dict[str, torch.Tensor]:
    engine = Engine.build(recipe(layout))
    lr = use_sgd(engine) if optimizer == "sgd" else None
    degrees = engine.mesh.degrees
    first = dist.get_rank() % (degrees.dp * degrees.cp * degrees.tp) == 0
    result: dict[str, torch.Tensor] = {}
    parts: dict[str, Part] = {}
    for step in range(STEPS):
        metrics = engine.forward_backward(my_batches(engine, step, layout.documents))
        result[f"loss {step}"] = metrics["loss"].clone()
        for name, parameter in trained(engine):
            shape, place, values = part(parameter.grad)
            parts[f"gradient {step} {name}"] = shape, place, values / float(engine.pending.weight)
        result[f"norm {step}"] = engine.optim_step(lr)["grad_norm"].clone()
        parts |= {f"weight {step} {name}": part(parameter) for name, parameter in trained(engine)}
    tensors = assembled(parts)
    return result | (tensors if first else {})


def trained(engine: Engine) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in engine.named_parameters() if p.requires_grad]


class LocalSGD(torch.optim.Optimizer):
    """Plain SGD on what each rank has. On a mesh of three dimensions DTensor needs longer to find how to run
    torch's own than all else of a case takes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    if isinstance(parameter, DTensor):
                        assert gradient.placements == parameter.placements
                        parameter, gradient = parameter.to_local(), gradient.to_local()
                    parameter.sub_(group["lr"] * gradient)


def use_sgd(engine: Engine) -> float:
    """Plain SGD: a weight then moves by its gradient and nothing else. Returns the learning rate."""
    engine.optimizer = LocalSGD([p for _, p in trained(engine)], {"lr": LR})
    for group in engine.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LR


def run_divided_by_ranks(layout: Layout, optimizer: str) -> dict[str, torch.Tensor]:
    """The same with FSDP2's own averaging left on: what the suite must notice."""
    from torch.distributed.fsdp import FSDPModule

    kept = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]
    try:
        return run(layout, optimizer)
    finally:
        FSDPModule.set_gradient_divide_factor = kept  # type: ignore[method-assign]
