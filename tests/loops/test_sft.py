"""Supervised fine-tuning: packed rows equal single conversations, prompts give no gradient, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.helpers import make
from tests.engine.cases import Layout, recipe, wholes
from tests.ranks import Ranks
from tests.run.conftest import Finished, here, train  # noqa: F401 - fixtures
from titancli.data import Chat
from titancli.engine import Engine
from titancli.losses import SFT
from titancli.losses.chunked import linear_token_loss
from titancli.losses.sft import SFT as Loss
from titancli.observe.events import read_events
from titancli.protocols.batch import IGNORE, Batch

SUMS = "titan:sums_heldout"


def of_the_data(mesh: dict[str, int], pack: bool) -> dict[str, torch.Tensor]:
    """Loss and gradients of one epoch of conversations."""
    layout = Layout(mesh=mesh, model={"vocab_size": 257, "n_layers": 2}, loss=SFT())
    engine = Engine.build(recipe(layout, seq_len=96))
    dp = {"dp_rank": engine.mesh.dp_rank, "dp_size": engine.mesh.degrees.dp}
    data = make(Chat(path=SUMS, pack=pack, repeat=False), seq_len=96, rows=2, **dp)
    loss = engine.forward_backward(list(data))["loss"].clone()
    return {"loss": loss, **wholes((name, p.grad) for name, p in engine.named_parameters())}


@pytest.mark.ranks
def test_packed_rows_give_the_loss_and_gradients_of_conversations_one_by_one(ranks: Ranks) -> None:
    [alone] = ranks(1, of_the_data, {}, False)
    rows = {pack: len(list(make(Chat(path=SUMS, pack=pack, repeat=False), seq_len=96))) for pack in (0, 1)}
    assert rows[1] <= rows[0] / 2
    for mesh in ({}, {"dp_shard": 2}):
        for packed in ranks(2 if mesh else 1, of_the_data, mesh, True):
            for name, expected in alone.items():
                error = (packed[name] - expected).norm() / expected.norm()
                assert error < 1e-5, (mesh, name, error)


def test_prompt_tokens_get_no_gradient() -> None:
    batch = next(iter(make(Chat(path=SUMS), seq_len=96)))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 96, 8, generator=generator, requires_grad=True)
    weight = 0.1 * torch.randn(257, 8, generator=generator)
    total, log_probs = linear_token_loss(hidden, weight, batch["targets"], Loss().token_weights(batch))
    total.backward()
    answers = torch.zeros(2, 96, dtype=torch.bool)
    for row in range(2):  # what an answer's tokens are predicted from, found in the text itself
        ids = batch["tokens"][row].tolist()
        for at in range(96):
            if bytes(i for i in ids[max(0, at - 9) : at + 1] if i < 256) == b"assistant\n":
                end = at + 1 + next((n for n, i in enumerate(ids[at + 1 :]) if not 48 <= i < 58), 96)
                answers[row, at:end] = True
    assert 0 < answers.sum() < 48
    assert torch.equal(hidden.grad.abs().sum(-1) > 0, answers)  # type: ignore[union-attr]
    assert torch.equal(log_probs != 0, answers)


def test_the_loss_weighs_targets_as_the_batch_says() -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 5, 7)), rng.integers(0, 7, (2, 5))
    targets[0, :3] = IGNORE
    weights = rng.random((2, 5))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.where(targets >= 0, np.take_along_axis(log_p, targets.clip(0)[..., None], 2)[..., 0], 0)
    batch = {"targets": torch.from_numpy(targets), "weights": torch.from_numpy(weights)}
    found = Loss()(torch.from_numpy(picked).float(), Batch(batch))
    assert float(found.sum) == pytest.approx(-(weights * picked).sum(), rel=1e-5)
    assert float(found.weight) == pytest.approx((weights * (targets >= 0)).sum(), rel=1e-5)


SMALL = (
    *("sft_debug", "--run-dir", "r", "training.steps=5", "validation.freq=2", "metrics.log_freq=100"),
    *("model.dim=32", "model.n_layers=1", "model.hidden_dim=64", "training.seq_len=128"),
    *("checkpoint.interval=5", "lr_scheduler.warmup_steps=1"),
)


def test_a_run_tells_the_loss_on_held_out_data_as_the_engine_finds_it(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
    ranks: Ranks,
) -> None:
    done = train(*SMALL)
    assert done.code == 0, done.err
    events = [e for e in read_events(here / "r/events.jsonl") if e["event"] == "validation"]
    losses = {e["step"]: e["metrics"]["validation/held_out/loss"] for e in events}
    assert list(losses) == [0, 2, 4, 5]
    for event in events:
        loss, perplexity = (event["metrics"][f"validation/held_out/{n}"] for n in ("loss", "perplexity"))
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-5)
        assert f"held_out loss {loss:.4f}, perplexity {perplexity:.3f}" in done.err
    [found] = ranks(1, evaluated, here / "r")
    assert found == pytest.approx(losses[5], rel=1e-5)


def evaluated(run: Path) -> float:
    """The last checkpoint's loss on the held-out conversations, one at a time."""
    from titancli.recipe import load_recipe

    engine = Engine.build(load_recipe(run / "recipe.lock.toml").recipe, frozen=True)
    engine.load(run / "checkpoints/step-5", optimizer=False)
    data = make(Chat(path=SUMS, pack=False, repeat=False), seq_len=128, rows=1)
    return float(engine.evaluate(list(data))["loss"])


def test_an_evaluation_that_would_never_end_is_refused(train: Callable[..., Finished]) -> None:  # noqa: F811
    done = train("sft_debug", "validation.datasets.held_out.repeat=true")
    assert done.code == 3
    assert "an evaluation would never end: set it to false, or set validation.steps" in done.err


def test_what_cannot_keep_conversations_apart_is_refused(train: Callable[..., Finished]) -> None:  # noqa: F811
    ring = ("mesh.cp=2", "parallelize.context_parallel=ring", "--nproc", "2")
    done = train("sft_debug", *ring)
    assert done.code == 3
    assert 'context_parallel = "ring" cannot separate the conversations of a row' in done.err
