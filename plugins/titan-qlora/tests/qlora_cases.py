"""What the ranks run: a base in a checkpoint, quantized, with adapters beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.cases import VOCABULARY, Layout, my_batches, recipe, wholes
from titan_qlora import QLoRA
from titan_qlora.converter import rounded
from titan_qlora.weight import NF4Weight
from titancli.converters import LoRA
from titancli.engine import Engine
from titancli.errors import TitanError
from titancli.models import GptOss, Llama3, Qwen3
from titancli.models.sections import MoE
from titancli.protocols.samples import SamplingParams
from titancli.recipe.schema import Recipe

# Rows of whole blocks of 64, also of half of them.
DENSE = Llama3(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=256, vocab_size=VOCABULARY)
_SIZES: dict[str, Any] = dict(
    dim=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=VOCABULARY, rope_theta=10000.0
)
_ROUTING: dict[str, Any] = dict(
    hidden_dim=64,
    score_func="softmax",
    route_norm=True,
    score_before_experts=False,
    load_balance_coeff=None,
)
# One key head of 6 rows: of four ranks the last has none.
UNEVEN = Qwen3(**{**_SIZES, "n_heads": 32, "n_kv_heads": 1, "head_dim": 6}, hidden_dim=256)
MOE = Qwen3(**_SIZES, moe=MoE(num_experts=4, top_k=2, **_ROUTING))
TWO = Qwen3(**_SIZES, moe=MoE(num_experts=2, top_k=1, **_ROUTING))
GPT_OSS = GptOss(**_SIZES, sliding_window=4, moe=MoE(num_experts=4, top_k=2, gate_bias=True, **_ROUTING))
QLORA = QLoRA(rank=8, alpha=12.0)
EXPERTS = QLoRA(rank=8, alpha=12.0, targets=["experts.*", "wo"])


def qlora_recipe(layout: Layout, base: Path | None, converter: Any, **training: Any) -> Recipe:
    layout = replace(layout, converters=[converter] if converter else [])
    return replace(recipe(layout, **training), weights=base)


def save_base(folder: Path, layout: Layout, seed: int = 7) -> None:
    Engine.build(recipe(layout, seed=seed)).save(folder)


def save_rounded(base: Path, folder: Path, layout: Layout, converter: QLoRA) -> None:
    """Save a base with the values that the quantized one has."""
    names = set(Engine.build(qlora_recipe(layout, base, converter)).adapters.quantised)
    plain = Engine.build(qlora_recipe(layout, base, None))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name in names:
                parameter.copy_(
                    torch.stack([rounded(one) for one in parameter])
                    if parameter.ndim == 3
                    else rounded(parameter)
                )
    plain.save(folder)


def steps(
    layout: Layout, base: Path, converter: LoRA = QLORA, count: int = 2, **training: Any
) -> dict[str, Any]:
    """Losses and norms of some steps, gradients and adapters; the base as it is handed out at the start."""
    engine = Engine.build(qlora_recipe(layout, base, converter, **training))
    found: dict[str, Any] = {
        f"base {name}": tensor.clone() for name, tensor in engine.weights() if tensor is not None
    }
    return found | train(engine, count)


def train(engine: Engine, count: int, first: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for step in range(first, first + count):
        metrics = engine.forward_backward(my_batches(engine, step))
        gradients = wholes((n, p.grad / engine.pending.weight) for n, p in engine.trained_parameters())
        metrics |= engine.optim_step()
        found |= {f"gradient {step} {name}": tensor for name, tensor in gradients.items()}
        found |= {f"{name} {step}": metrics[name].clone() for name in ("loss", "grad_norm")}
    return found | wholes(engine.trained_parameters())


def held(layout: Layout, base: Path, converter: LoRA) -> dict[str, Any]:
    """Bytes and dtypes of what an engine holds."""
    engine = Engine.build(qlora_recipe(layout, base, converter))
    found: dict[str, Any] = {}
    for name, parameter in engine.named_parameters():
        part: Any = getattr(parameter, "_local_tensor", parameter)
        found[name] = (parameter.dtype, parameter.requires_grad, isinstance(part, NF4Weight))
        if isinstance(part, NF4Weight):
            assert part.content.full is None and part.packed is not None
            found[f"bytes {name}"] = sum(t.nbytes for t in (part.packed.codes, *part.packed.scales))
    return found


def resume(layout: Layout, base: Path, folder: Path, converter: LoRA) -> dict[str, Tensor]:
    engine = Engine.build(qlora_recipe(layout, base, converter))
    engine.load(folder)
    return train(engine, 1, first=2)


def save_and_go_on(layout: Layout, base: Path, folder: Path, converter: LoRA) -> dict[str, Tensor]:
    engine = Engine.build(qlora_recipe(layout, base, converter))
    train(engine, 2)
    engine.save(folder)
    return train(engine, 1, first=2)


def save_trained(layout: Layout, base: Path, folder: Path, converter: LoRA) -> dict[str, Tensor]:
    """Save a checkpoint after two steps, and return the weights that the engine hands out, under Hugging Face
    names."""
    engine = Engine.build(qlora_recipe(layout, base, converter))
    train(engine, 2)
    engine.save(folder)
    return {name: tensor.clone() for name, tensor in engine.weights() if tensor is not None}


def snapshot_and_sample(
    layout: Layout, base: Path, converter: LoRA
) -> tuple[float, list[int], list[int], str]:
    """How far log-probabilities of a copy are from the engine's; greedy tokens of both; what a write says."""
    engine = Engine.build(qlora_recipe(layout, base, converter))
    train(engine, 1)
    copy = engine.snapshot()
    [batch, *_] = my_batches(engine, 3)
    difference = float((engine.forward(batch) - copy.forward(batch)).abs().max())
    drawn = [
        one.sample([[1, 2, 3]], params=SamplingParams(max_tokens=4, temperature=0.0))
        for one in (engine, copy)
    ]
    said = ""
    for _, tensor in engine.named_parameters():
        part: Any = getattr(tensor, "_local_tensor", tensor)
        if isinstance(part, NF4Weight):
            try:
                part.detach().fill_(0.0)
            except TitanError as error:
                said = error.message
    return difference, *([int(t) for t in one[0][0].tokens] for one in drawn), said
