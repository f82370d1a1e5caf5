"""DPO: the same answer on every layout, its reference, and whole runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.data.helpers import make
from tests.engine.cases import ROWS, Layout, recipe, whole_batch, wholes
from tests.ranks import Ranks
from tests.run.conftest import Finished, here, losses, train  # noqa: F401 - fixtures
from titan_preference import DPO, Preference
from titan_proof.digests import read_digests
from titancli.engine import Engine
from titancli.observe.events import read_events
from titancli.protocols.batch import Batch

TOLERANCE = 1e-5


def steps(layout: Layout) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step on four pairs, the first of which has no targets in one row."""
    engine = Engine.build(recipe(layout))
    whole = whole_batch()
    reference = -30 * torch.rand(ROWS, generator=torch.Generator().manual_seed(1))
    pairs = Batch({**whole, "reference_row_logprobs": reference}, unit=2)
    accumulation, dp = engine.settings.accumulation, engine.mesh.degrees.dp
    pieces = pairs.split(ROWS // dp // accumulation)
    mine = [pieces[k * dp + engine.mesh.dp_rank] for k in range(accumulation)]
    metrics = engine.forward_backward(mine)
    found = {name: metrics[name].clone() for name in ("loss", "reward_margin", "reward_accuracy")}
    return found | wholes((name, p.grad / engine.pending.weight) for name, p in engine.named_parameters())


LAYOUTS = {
    "accumulation 4": (1, Layout(micro_batches=4)),
    "FSDP2": (2, Layout(mesh={"dp_shard": 2}, micro_batches=2)),
    "TP2": (2, Layout(mesh={"tp": 2})),
}


@pytest.mark.ranks
def test_every_layout_gives_the_same_loss_and_gradients(ranks: Ranks) -> None:
    loss, sizes = DPO(beta=0.2, label_smoothing=0.05), {"n_layers": 2}
    [expected] = ranks(1, steps, Layout(loss=loss, model=sizes))
    assert float(expected["loss"]) > 0 and any(expected["output.weight"].flatten())
    for name, (count, layout) in LAYOUTS.items():
        changed = Layout(**{**vars(layout), "loss": loss, "model": sizes})
        for found in ranks(count, steps, changed):
            for key, value in expected.items():
                error = float((found[key] - value).norm() / value.norm().clamp(min=1e-12))
                assert error < TOLERANCE, (name, key, error)


SMALL = (
    *("dpo_debug", "training.steps=4", "lr_scheduler.warmup_steps=1", "model.dim=32", "model.n_layers=1"),
    *("model.hidden_dim=64", "training.local_batch_size=4", "metrics.log_freq=1", "optimizer.lr=1e-2"),
    *("checkpoint.interval=2", "lr_scheduler.total_steps=4"),
)


@pytest.mark.ranks
def test_runs_begin_at_the_reference_learn_and_go_on_bitwise(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
    ranks: Ranks,
) -> None:
    done = train(*SMALL, "--run-dir", "whole", "validation.freq=4", *HELD_OUT)
    assert done.code == 0, done.err
    whole = losses(here / "whole")
    assert whole[1] == pytest.approx(math.log(2), abs=1e-6) and whole[4] != whole[1]
    events = read_events(here / "whole/events.jsonl")
    last = [e["metrics"] for e in events if e["event"] == "step"][-1]
    assert {"reward_margin", "reward_chosen"} <= last.keys()
    first, *_, last = [e["metrics"] for e in events if e["event"] == "validation"]
    assert first["validation/pairs/loss"] == pytest.approx(math.log(2), abs=1e-6)
    names = {f"validation/pairs/{name}" for name in ("loss", "reward_accuracy", "reward_margin")}
    assert names <= last.keys() and "validation/pairs/perplexity" not in last
    assert train(*SMALL, "--run-dir", "parts", "training.steps=2").code == 0
    done = train("parts", "--resume", "training.steps=4")
    assert done.code == 0, done.err
    assert losses(here / "parts") == whole
    digests = read_digests(here / "whole")
    assert read_digests(here / "parts") == digests and list(digests) == [1, 2, 3, 4]
    # The base is the reference of adapters: it is found without a second model, and is the same.
    lora = ("weights=whole/checkpoints/step-4", 'converters=[{type="lora", rank=2}]')
    assert train(*SMALL, *lora, "--run-dir", "lora").code == 0
    found = losses(here / "lora")
    assert found[1] == pytest.approx(math.log(2), abs=1e-6) and found[4] != found[1]
    # Log-probabilities that were found before stand for the model that they were found with.
    [known] = ranks(1, log_probs, here / "whole")
    rows = [json.loads(line) for line in BUNDLED.read_text().splitlines()]
    pairs = [
        {**row, "reference_chosen_logp": chosen, "reference_rejected_logp": rejected}
        for row, chosen, rejected in zip(rows, known[0::2], known[1::2], strict=True)
    ]
    (here / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    settings = ('dataset={type="preference", path="known.jsonl", reference_logps=true}', *lora)
    assert train(*SMALL, *settings, "--run-dir", "known").code == 0
    assert losses(here / "known")[1] == pytest.approx(math.log(2), abs=1e-4)


HELD_OUT = (
    'validation.datasets.pairs={type="preference", path="titan:sums_pairs"}',
    "validation.steps=2",
)
BUNDLED = Path(__file__).parents[3] / "titancli/data/bundled/sums_pairs.jsonl"


def log_probs(run: Path) -> list[float]:
    """Return a number for every row of the pairs, in the order of the file."""
    engine = Engine.frozen(run)
    data = make(Preference(path=str(BUNDLED), shuffle=False, repeat=False), seq_len=64, rows=8)
    return [float(value) for batch in data for value in engine.forward(batch).sum(1)]


def test_what_does_not_give_or_take_pairs_is_refused(train: Callable[..., Finished]) -> None:  # noqa: F811
    done = train(
        *SMALL, "loss=sft", 'dataset={type="chat", path="titan:sums"}', "training.local_batch_size=3"
    )
    assert done.code == 3
    assert 'the loss sft cannot be trained on pairs: set loss = "dpo"' in done.err
    assert 'dpo needs pairs: set [dataset] type = "preference"' in done.err
    done = train(*SMALL, 'validation.datasets.x={type="chat", path="titan:sums"}')
    assert done.code == 3 and "validation.datasets.x: dpo is evaluated on pairs: set type" in done.err
    done = train(*SMALL, "training.local_batch_size=3")
    assert done.code == 3 and "use an even training.local_batch_size" in done.err
    done = train(*SMALL, "mesh.pp=2", "--nproc", "2")
    assert done.code == 3 and "use an even pipeline.microbatch_size" in done.err
