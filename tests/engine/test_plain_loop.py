"""The verbs, on several layouts, against a loop of plain torch on one whole model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from tests.engine.cases import ROWS, Layout, recipe, small, whole_batch, wholes
from titancli import Batch, Engine, LossResult
from titancli.engine.rng import generator_for
from titancli.losses import CrossEntropy
from titancli.models.blocks.decoder import Decoder

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "one rank": (1, small(micro_batches=4)),
    "FSDP2": (2, small({"dp_shard": 2}, micro_batches=2)),
    "TP2": (2, small({"tp": 2}, micro_batches=4)),
    "PP2": (2, small({"pp": 2}, micro_batches=4)),
    "CP2": (2, small({"cp": 2}, micro_batches=4)),
}
layouts = pytest.mark.parametrize("name", LAYOUTS)


def rows(step: int) -> Batch:
    """All rows of a step, with what a policy's loss reads."""
    batch = whole_batch(step)
    generator = torch.Generator().manual_seed(100 + step)
    advantages, old = (torch.randn(batch["targets"].shape, generator=generator) for _ in range(2))
    return Batch({**batch, "advantages": advantages, "old": old - 4.0})


def policy(log_probs: Tensor, batch: Batch) -> LossResult:
    """Nothing linear, one weight for a token; by its attribute it is given the entropy."""
    there = batch["targets"] >= 0
    ratio = (log_probs - batch["old"]).exp().clamp(max=3.0) * there
    entropy = batch["entropy"]
    assert bool((entropy[~there] == 0).all())
    total = -(ratio * batch["advantages"]).sum()
    return LossResult(total, there.sum(), {"ratio": ratio.sum().detach(), "entropy": entropy.detach().sum()})


policy.entropy = True


def on_logits(logits: Tensor, batch: Batch) -> LossResult:
    """Counted in rows; its weight is a plain number."""
    flat = logits.flatten(0, 1).float()
    each = cross_entropy(flat, batch["targets"].flatten(), ignore_index=-100, reduction="none")
    return LossResult(each.pow(2).sum() * 1e-2, logits.shape[0])


on_logits.output = "model"
LOSSES: dict[str, Any] = {"component": CrossEntropy(), "log-probs": policy, "logits": on_logits}


# ------------------------------------------------------------------------------------------- the plain loop


class Plain:
    """One whole model, torch's AdamW, and averages as they are written down."""

    def __init__(self) -> None:
        made = recipe(small())
        self.model = Decoder(made.model)
        self.model.init_weights(generator_for(made.training.seed, torch.device("cpu")))
        config: Any = made.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def log_probs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["tokens"])
        targets = batch["targets"]
        picked = log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return picked.masked_fill(targets < 0, 0.0), logits

    def loss(self, kind: str, batch: Batch) -> LossResult:
        log_probs, logits = self.log_probs(batch)
        if kind == "component":
            return LossResult(-log_probs.sum(), (batch["targets"] >= 0).sum())
        if kind == "logits":
            return on_logits(logits, batch)
        all_log_probs = log_softmax(logits, -1).detach()
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1).masked_fill(batch["targets"] < 0, 0.0)
        return policy(log_probs, Batch({**batch, "entropy": entropy}))


@cache
def expected(kind: str) -> dict[str, Tensor]:
    plain = Plain()
    found: dict[str, Tensor] = {}
    for step, lr in enumerate((None, 3e-3)):
        batch = rows(step)
        result = plain.loss(kind, batch)
        average = result.sum / result.weight
        plain.optimizer.zero_grad()
        average.backward()
        found[f"loss {step}"] = average.detach()
        for name, value in result.metrics.items():
            found[f"{name} {step}"] = value / result.weight
        gradients = {n: p.grad.clone() for n, p in plain.model.named_parameters()}
        found |= {f"gradient {step} {name}": gradient for name, gradient in gradients.items()}
        found[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        plain.optimizer.param_groups[0]["lr"] = 1e-2 if lr is None else lr
        plain.optimizer.step()
    with torch.no_grad():
        log_probs, logits = plain.log_probs(rows(2))
    return found | dict(plain.model.named_parameters()) | {"log-probs": log_probs, "logits": logits}


# ---------------------------------------------------------------------------------------------- the verbs


def mine(engine: Engine, step: int) -> list[Batch]:
    settings, dp = engine.settings, engine.mesh.degrees.dp
    pieces = rows(step).split(ROWS // dp // settings.accumulation)
    return [pieces[k * dp + engine.mesh.dp_rank] for k in range(settings.accumulation)]


def with_the_verbs(layout: Layout, kinds: list[str]) -> dict[str, dict[str, Tensor]]:
    return {kind: two_steps(layout, kind) for kind in kinds}


def two_steps(layout: Layout, kind: str) -> dict[str, Tensor]:
    loss = LOSSES[kind]
    engine = Engine.build(recipe(layout, steps=10))
    found: dict[str, Tensor] = {}
    for step, lr in enumerate((None, 3e-3)):
        first, *others = mine(engine, step)
        # One call with one batch and one with the others: the sum of both is divided once.
        made = [engine.forward_backward(first, loss), engine.forward_backward(dict(others[0]), loss)]
        if others[1:]:
            made.append(engine.forward_backward(others[1:], loss))
        assert engine.status["accumulated"] == 1 + len(others)
        weight = engine.pending.weight
        evaluated = engine.evaluate(mine(engine, step), loss)
        torch.testing.assert_close(evaluated["weight"], weight)
        numbers = {name: value for name, value in evaluated.items() if name != "weight"}
        found |= {f"{name} {step}": value.clone() for name, value in numbers.items()}
        assert all(
            set(numbers) == set(metrics) - {"loss_max", "tokens", "targets", "padding"} for metrics in made
        )
        found |= wholes((f"gradient {step} {n}", p.grad / weight) for n, p in engine.named_parameters())
        told = engine.optim_step(lr)
        assert told["version"] == engine.version == step + 1
        assert told["lr"] == (1e-2 if lr is None and step == 0 else lr)
        found[f"norm {step}"] = told["grad_norm"].clone()
    mine_last = Batch({k: v for k, v in rows(2).items() if k in ("tokens", "targets")})
    log_probs, logits = engine.forward(mine_last), engine.forward(mine_last, return_logits=True)
    assert log_probs.dtype == torch.float32 and not log_probs.requires_grad
    only_tokens = engine.forward({"tokens": rows(2)["tokens"]}, return_logits=True)
    assert torch.equal(only_tokens, logits)
    return found | wholes(engine.named_parameters()) | {"log-probs": log_probs, "logits": logits}


@layouts
def test_the_verbs_equal_a_plain_loop(ranks: Any, name: str) -> None:
    world, layout = LAYOUTS[name]
    kinds = list(LOSSES) if name == "one rank" else ["log-probs", "logits"]
    everywhere = ranks(world, with_the_verbs, layout, kinds)
    for kind in kinds:
        reference = expected(kind)
        assert set().union(*(found[kind] for found in everywhere)) == reference.keys()
        for found in everywhere:
            for what, value in found[kind].items():
                wanted = reference[what].detach()
                error = float((value - wanted).norm() / wanted.norm())
                assert error <= 1e-5, f"{kind}: {what} is off by {error:.1e}"
