"""What the ranks run: a small student on some layout, and a wider teacher from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.engine.cases import ROWS, Layout, recipe, small, whole_batch, wholes
from tests.models.by_spec import Gemma2, Phi
from titan_distil import Distil, DistilLoss, Teacher
from titan_distil.teacher import Teacher as Frozen
from titancli import Batch, Engine, LossResult
from titancli.data import TextFiles
from titancli.layout.degrees import Mesh
from titancli.losses import chunked
from titancli.models import Llama3
from titancli.recipe.schema import Recipe

WIDE = Llama3(dim=48, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=64)
SPEC: dict[str, Any] = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64)
STUDENTS: dict[str, Any] = {
    "llama3": None,
    "capped": Gemma2(**SPEC, final_logit_softcapping=2.0),
    "biased": Phi(**SPEC),
}
TEACHERS: dict[str, Any] = {
    "llama3": WIDE,
    "capped": Gemma2(**{**SPEC, "dim": 64}, final_logit_softcapping=2.0),
    "biased": Phi(**{**SPEC, "dim": 64}),
}


def save_teacher(folder: Path, name: str = "llama3", scale: float = 8.0) -> Path:
    """Save a teacher whose distributions are far from flat."""
    layout = Layout(config=TEACHERS[name])
    with Engine.build(recipe(layout, seed=1)) as engine:
        with torch.no_grad():
            engine.model.output.weight.mul_(scale)
        engine.save(folder / "step-1")
    return folder / "step-1"


def recipes(layout: Layout, loss: DistilLoss, teacher: Teacher) -> Recipe:
    return replace(
        recipe(layout), loss=loss, loop=Distil(teacher=teacher), dataset=TextFiles(paths=["text.txt"])
    )


def with_weights(batch: Batch) -> Batch:
    """Weights of all sizes; of one row none count."""
    weights = torch.rand(batch["tokens"].shape, generator=torch.Generator().manual_seed(5))
    weights[1] = 0.0
    return Batch({**batch, "weights": weights})


def mine(engine: Engine, whole: Batch) -> list[Batch]:
    settings, dp = engine.settings, engine.mesh.degrees.dp
    pieces = whole.split(ROWS // dp // settings.accumulation)
    return [pieces[k * dp + engine.mesh.dp_rank] for k in range(settings.accumulation)]


def of_losses(
    folder: Path,
    losses: dict[str, DistilLoss],
    layout: Layout,
    mesh: dict[str, int] | None = None,
    name: str = "llama3",
) -> dict[str, Tensor]:
    """Numbers and gradients of one step under each loss, in chunks of a few rows."""
    chunked.CHUNK_BYTES["cpu"] = 6 * 4 * 64 * 10
    teacher = Teacher(
        weights=folder,
        model=TEACHERS[name],
        dtype="float32",
        mesh=None if mesh is None else Mesh(**{"dp_shard": 1, **mesh}),
    )
    layout = replace(layout, config=STUDENTS[name])
    found: dict[str, Tensor] = {}
    try:
        for key, loss in losses.items():
            own = recipes(layout, loss, teacher)
            with Engine.build(own) as engine:
                frozen = Frozen(engine, own, teacher)
                batches = [frozen(batch) for batch in mine(engine, with_weights(whole_batch()))]
                metrics = engine.forward_backward(batches)
                evaluated = engine.evaluate(batches)
                told = {"loss": metrics["loss"], "evaluated": evaluated["loss"]}
                told |= {name: metrics[name] for name in ("divergence", "cross_entropy")}
                found |= {f"{key} {name}": value.clone() for name, value in told.items()}
                weight = engine.pending.weight
                found |= wholes((f"{key} {n}", p.grad / weight) for n, p in engine.named_parameters())
                frozen.engine.close()
    finally:
        chunked.CHUNK_BYTES["cpu"] = 64 * 2**20
    return found


def of_top(folder: Path, losses: dict[str, DistilLoss], layout: Layout, k: int) -> dict[str, Tensor]:
    """Numbers and gradients of one step from the teacher's most probable tokens."""
    chunked.CHUNK_BYTES["cpu"] = 6 * 4 * 64 * 10
    theirs = replace(recipe(Layout(mesh=layout.mesh, config=WIDE)), weights=folder)
    own = recipes(layout, DistilLoss(), Teacher(weights=folder, dtype="float32"))
    found: dict[str, Tensor] = {}
    try:
        with Engine.frozen(theirs) as frozen, Engine.build(own) as engine:
            batches = []
            for batch in mine(engine, with_weights(whole_batch())):
                best = frozen.forward(batch, return_logits=True).log_softmax(-1).topk(k)
                given = {"teacher_topk_logprobs": best.values, "teacher_topk_ids": best.indices}
                batches.append(Batch({**batch, **given}))
            for key, loss in losses.items():
                metrics = engine.forward_backward(batches, loss)
                weight = engine.pending.weight
                found |= {f"{key} {name}": metrics[name].clone() for name in ("loss", "divergence")}
                found |= wholes((f"{key} {n}", p.grad / weight) for n, p in engine.named_parameters())
                engine.clear_gradients()
    finally:
        chunked.CHUNK_BYTES["cpu"] = 64 * 2**20
    return found


class Plain:
    """The loss by plain torch, on the logits of both."""

    output = "model"

    def __init__(self, loss: DistilLoss) -> None:
        self.loss = loss

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        own, theirs = out.double(), batch["teacher_logits"].double()
        t, beta, w = self.loss.temperature, self.loss.beta, self.loss.sft_weight
        p, q = (own / t).softmax(-1), (theirs / t).softmax(-1)
        if self.loss.divergence == "forward_kl":
            each = (q * (q / p).log()).sum(-1)
        elif self.loss.divergence == "reverse_kl":
            each = (p * (p / q).log()).sum(-1)
        else:
            m = (1 - beta) * p + beta * q
            each = beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)
        plain = functional.cross_entropy(own.transpose(1, 2), batch["targets"], reduction="none")
        weights = torch.where(batch["targets"] >= 0, batch["weights"], 0.0)
        return LossResult((weights * ((1 - w) * each + w * plain)).sum(), weights.sum())


def by_plain_torch(folder: Path, losses: dict[str, DistilLoss], name: str = "llama3") -> dict[str, Tensor]:
    """Return the same numbers, computed from all logits."""
    layout = small(config=STUDENTS[name]) if STUDENTS[name] is not None else small()
    found: dict[str, Tensor] = {}
    batch = with_weights(whole_batch())
    theirs = replace(recipe(Layout(config=TEACHERS[name])), weights=folder)
    with Engine.frozen(theirs) as frozen:
        logits = frozen.forward(batch, return_logits=True)
    with Engine.build(recipe(layout)) as engine:
        for key, loss in losses.items():
            given = Batch({**batch, "teacher_logits": logits})
            found[f"{key} loss"] = engine.forward_backward(given, Plain(loss))["loss"].clone()
            weight = engine.pending.weight
            found |= wholes((f"{key} {n}", p.grad / weight) for n, p in engine.named_parameters())
            engine.clear_gradients()
    return found
