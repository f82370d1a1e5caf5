"""Losses of a small model in low precision beside bf16: each recipe of titan-float8, emulated on the CPU.

    python benchmarks/low_precision.py [--steps 300] [--only WORD …] [--json FILE]

A decoder of dense layers and one of experts learn a random language: each token follows from the two before
it, one of four with fixed probabilities. Every recipe begins with the same weights and sees the same tokens.
The table has the mean loss of the 20 steps before each step named, and its difference to bf16's; bf16 with
another seed shows how much chance makes. Losses do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_families import Mixtral
from titan_float8 import (
    Float8Experts,
    Float8Linear,
    MXFP8Experts,
    MXFP8Linear,
    NVFP4Experts,
    NVFP4Linear,
)
from titancli.engine import Engine
from titancli.loops import Pretrain
from titancli.losses import CrossEntropy
from titancli.models import Llama3
from titancli.models.sections import MoE
from titancli.optimizers import AdamW, WarmupStableDecay
from titancli.parallel import Decoder
from titancli.protocols.batch import Batch
from titancli.recipe.schema import Mesh, Recipe, Training

WORDS, LENGTH, ROWS, MEAN = 16, 128, 4, 20
SIZES: dict[str, Any] = dict(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=WORDS)
DENSE = Llama3(**SIZES, hidden_dim=256)
EXPERTS = Mixtral(
    **SIZES,
    moe=MoE(
        num_experts=4,
        top_k=2,
        hidden_dim=128,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
    ),
)
SKIP: dict[str, Any] = {"skip": ["output"]}
LINEARS: dict[str, Any] = {
    "float8 tensorwise": Float8Linear(**SKIP),
    "float8 rowwise": Float8Linear(recipe="rowwise", **SKIP),
    "float8 rowwise_with_gw_hp": Float8Linear(recipe="rowwise_with_gw_hp", **SKIP),
    "mxfp8": MXFP8Linear(**SKIP),
    "mxfp8 floor": MXFP8Linear(scale_calculation_mode="floor", **SKIP),
    "mxfp8 wgrad_with_hp": MXFP8Linear(wgrad_with_hp=True, **SKIP),
    "nvfp4": NVFP4Linear(**SKIP),
    "nvfp4, nearest": NVFP4Linear(stochastic_rounding=False, **SKIP),
    "nvfp4, no Hadamard": NVFP4Linear(hadamard=False, **SKIP),
    "nvfp4 wgrad_with_hp": NVFP4Linear(wgrad_with_hp=True, **SKIP),
}
STACKS: dict[str, Any] = {
    "float8 rowwise": Float8Experts(),
    "float8 blockwise": Float8Experts(recipe="blockwise"),
    "mxfp8": MXFP8Experts(),
    "mxfp8 wgrad_with_hp": MXFP8Experts(wgrad_with_hp=True),
    "nvfp4": NVFP4Experts(),
    "nvfp4, nearest": NVFP4Experts(stochastic_rounding=False),
}


class Language:
    """Rows of a random language, the same for all runs."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(0)
        self.follows = torch.randint(0, WORDS, (WORDS, WORDS, 4), generator=made)
        self.likely = torch.tensor([0.6, 0.25, 0.1, 0.05])

    def batch(self, step: int) -> Batch:
        made = torch.Generator().manual_seed(1 + step)
        rows = torch.randint(0, WORDS, (ROWS, 2), generator=made)
        for _ in range(LENGTH - 1):
            which = self.likely.multinomial(ROWS, replacement=True, generator=made)
            after: Tensor = self.follows[rows[:, -2], rows[:, -1], which]
            rows = torch.cat((rows, after[:, None]), 1)
        return Batch({"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()})


def losses(model: Any, converters: list[Any], steps: int, seed: int = 0) -> list[float]:
    """Train, and return the loss of each step."""
    recipe = Recipe(
        model=model,
        tokenizer=None,
        dataset=None,
        converters=converters,
        mesh=Mesh(dp_shard=1),
        parallelize=Decoder(),
        optimizer=AdamW(lr=3e-3),
        lr_scheduler=WarmupStableDecay(warmup_steps=20),
        loss=CrossEntropy(),
        training=Training(
            steps=steps,
            seq_len=LENGTH,
            local_batch_size=ROWS,
            global_batch_size=ROWS,
            mixed_precision_param="bfloat16",
            seed=seed,
        ),
        loop=Pretrain(),
        launcher=None,
    )
    language, found = Language(), []
    with Engine.build(recipe) as engine:
        for step in range(steps):
            found.append(engine.forward_backward(language.batch(step))["loss"].item())
            engine.optim_step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=[], help="such as 'experts: mxfp8', or 'linear layers'")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    at = [step for step in (50, 100, 200, 300) if step <= given.steps] or [given.steps]
    every: dict[str, list[float]] = {}
    print(f"| converted | recipe | {' | '.join(f'step {step}' for step in at)} | against bf16 |")
    print(f"|---|---|{'---|' * len(at)}---|")
    kinds = {"linear layers": (DENSE, LINEARS), "experts": (EXPERTS, STACKS)}
    for kind, (model, table) in kinds.items():
        if given.only and not any(kind in word for word in given.only):
            continue
        runs = {"bf16": [], "bf16, another seed": [], **{name: [one] for name, one in table.items()}}
        for name, converters in runs.items():
            full = f"{kind}: {name}"
            wanted = not given.only or any(word in full for word in given.only)
            if not wanted and name != "bf16":
                continue
            every[full] = found = losses(model, converters, given.steps, int("seed" in name))
            means = [sum(found[step - MEAN : step]) / MEAN for step in at]
            if name == "bf16":
                usual = means[-1]
            texts = " | ".join(f"{mean:.4f}" for mean in means)
            print(f"| {kind} | {name} | {texts} | {means[-1] / usual - 1:+.2%} |", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(every))


if __name__ == "__main__":
    sys.exit(main())
