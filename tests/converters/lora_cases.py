"""What the ranks run: adapters beside a base that lies in a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engine.cases import Layout, my_batches, recipe, small, wholes
from titancli.converters import LoRA
from titancli.converters.lora import adapter_names, weights_of
from titancli.distributed.local import local
from titancli.engine import Engine
from titancli.errors import TitanError
from titancli.recipe.schema import Recipe

RANK, ALPHA = 4, 6.0
LORA = LoRA(rank=RANK, alpha=ALPHA)


def lora_recipe(layout: Layout, base: Path, lora: LoRA | None = LORA) -> Recipe:
    return replace(recipe(replace(layout, converters=[lora] if lora else [])), weights=base)


def save_base(folder: Path, seed: int = 7) -> None:
    Engine.build(recipe(small(), seed=seed)).save(folder)


def steps(layout: Layout, base: Path, count: int = 3, lora: LoRA = LORA) -> dict[str, torch.Tensor]:
    """Losses and norms of some steps; gradients of the last; all parameters before and after."""
    engine = Engine.build(lora_recipe(layout, base, lora))
    found = {f"first {name}": t for name, t in wholes(engine.named_parameters()).items()}
    for step in range(count):
        metrics = engine.forward_backward(my_batches(engine, step))
        gradients = wholes((n, p.grad / engine.pending.weight) for n, p in engine.trained_parameters())
        metrics |= engine.optim_step()
        found |= {f"{name} {step}": metrics[name].clone() for name in ("loss", "grad_norm")}
    found |= {f"gradient {name}": t for name, t in gradients.items()}
    return found | {f"last {name}": t for name, t in wholes(engine.named_parameters()).items()}


def against_merged(base: Path, layout: Layout | None = None, lora: LoRA = LORA) -> dict[str, float]:
    """How far a model with adapters is from the plain model with merged weights: log-probabilities, and the
    adapters' gradients from those that the chain rule makes of the merged weights'."""
    layout = layout or small()
    engine = Engine.build(lora_recipe(layout, base, lora))
    for step in range(2):
        engine.forward_backward(my_batches(engine, step))
        engine.optim_step()
    plain = Engine.build(lora_recipe(layout, base, lora=None))
    plain.load_weights(iter([(name, tensor.clone()) for name, tensor in engine.weights()]))
    [batch] = my_batches(engine, 3)
    found = {"log-probs": error(engine.forward(batch), plain.forward(batch))}
    engine.forward_backward(batch)
    plain.forward_backward(batch)
    weights = wholes((name, p.grad) for name, p in plain.named_parameters())
    adapters = wholes(engine.trained_parameters())
    gradients = wholes((name, p.grad) for name, p in engine.trained_parameters())
    scale = lora.alpha / lora.rank
    for weight in weights_of(adapters):
        name_a, name_b = adapter_names(weight)
        a, b, by_weight = adapters[name_a], adapters[name_b], weights[weight]
        found[name_a] = error(gradients[name_a], scale * b.mT @ by_weight)
        found[name_b] = error(gradients[name_b], scale * by_weight @ a.mT)
    with engine.as_base():
        as_base = engine.forward(batch)
    base_engine = Engine.frozen(lora_recipe(layout, base, lora=None))
    found["as base"] = float((as_base - base_engine.forward(batch)).abs().max())
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def save_adapters(layout: Layout, base: Path, folder: Path, lora: LoRA = LORA) -> dict[str, torch.Tensor]:
    """Adapters after two steps, saved; and what a third makes of them."""
    engine = Engine.build(lora_recipe(layout, base, lora))
    for step in range(2):
        engine.forward_backward(my_batches(engine, step))
        engine.optim_step()
    engine.save(folder)
    return go_on(engine)


def go_on(engine: Engine) -> dict[str, torch.Tensor]:
    engine.forward_backward(my_batches(engine, 2))
    engine.optim_step()
    return wholes(engine.named_parameters())


def load_adapters(layout: Layout, base: Path, folder: Path, lora: LoRA = LORA) -> dict[str, torch.Tensor]:
    engine = Engine.build(lora_recipe(layout, base, lora))
    engine.load(folder)
    return go_on(engine)


def begin_with_adapters(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """A new engine whose `weights` is the checkpoint of adapters."""
    engine = Engine.build(lora_recipe(small(), folder))
    return wholes(engine.named_parameters()), engine.base


def refused(weights: Path, load: Path | None, lora: LoRA | None) -> str:
    """What is said to who builds an engine from `weights`, and loads a checkpoint."""
    try:
        engine = Engine.build(lora_recipe(small(), weights, lora))
        if load is not None:
            engine.load(load)
    except TitanError as problem:
        return f"{problem.message} | {problem.hint}"
    finally:
        dist.barrier()
    return "nothing"


def save_random(folder: Path, config: Any) -> None:
    """A base in which nothing is at its initial value: biases are not 0, norms not 1."""
    engine = Engine.build(recipe(Layout(config=config)))
    with torch.no_grad():
        for number, (_, parameter) in enumerate(engine.named_parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            local(parameter).add_(0.2 * noise)  # of one rank: the whole
    engine.save(folder)


def merged_of(layout: Layout, base: Path, lora: LoRA) -> dict[str, Any]:
    """After two steps: `weights()` and what `push_weights` hands on; the adapters; and log-probabilities of
    the model with adapters."""
    engine = Engine.build(lora_recipe(layout, base, lora))
    for step in range(2):
        engine.forward_backward(my_batches(engine, step))
        engine.optim_step()
    pushed: dict[str, torch.Tensor] = {}
    engine.push_weights(lambda name, tensor: pushed.update({name: tensor.clone()}))
    weights = [(name, None if tensor is None else tensor.clone()) for name, tensor in engine.weights()]
    return {
        "names": [name for name, _ in weights],
        "weights": {name: tensor for name, tensor in weights if tensor is not None},
        "pushed": pushed,
        "adapters": wholes(engine.trained_parameters()),
        "log-probs": engine.forward(my_batches(engine, 3)[0]),
    }


def on_one_stage(layout: Layout, base: Path, folder: Path, lora: LoRA) -> tuple[float, bool]:
    """Save between gradients and their step, go on in another engine: its norm, and whether a stage here has
    nothing to train. Both engines' steps are the same."""
    engine = Engine.build(lora_recipe(layout, base, lora))
    engine.forward_backward(my_batches(engine))
    engine.optim_step()
    engine.forward_backward(my_batches(engine, 1))
    engine.save(folder)
    norm = engine.optim_step()["grad_norm"]
    other = Engine.build(lora_recipe(layout, base, lora))
    other.load(folder)
    other.forward_backward(my_batches(other, 1))
    assert torch.equal(other.optim_step()["grad_norm"], norm)
    for (name, here), (_, there) in zip(engine.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(local(here), local(there)), name
    assert dict(engine.weights()).keys() == dict(other.weights()).keys()
    return float(norm), not engine.trained_parameters()


def merged_beside(layout: Layout, base: Path, lora: LoRA) -> dict[str, float]:
    """How far log-probabilities are from those of the plain model with merged weights, after two steps; and
    those without adapters from the base's."""
    engine = Engine.build(lora_recipe(layout, base, lora))
    for step in range(2):
        engine.forward_backward(my_batches(engine, step))
        engine.optim_step()
    plain = Engine.build(lora_recipe(layout, base, lora=None))
    [batch] = my_batches(engine, 3)
    with engine.as_base():
        as_base = float((engine.forward(batch) - plain.forward(batch)).abs().max())
    weights = [(name, None if tensor is None else tensor.clone()) for name, tensor in engine.weights()]
    plain.load_weights(iter(weights) if dist.get_rank() == 0 else None)
    return {"merged": error(engine.forward(batch), plain.forward(batch)), "as base": as_base}
