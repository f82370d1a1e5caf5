"""Runs of the loop kto: they learn, are the same on any layout, resume byte for byte, and refuse by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import Layout, recipe
from tests.ranks import Ranks
from tests.run.conftest import Finished, here, losses, train, train_on  # noqa: F401 - fixtures
from titan_preference import ApoZeroUnpaired, Kto, KtoLoop, Unpaired
from titan_preference.kto import Compared
from titan_proof.digests import read_digests
from titancli import IGNORE, Batch, Engine
from titancli.errors import TitanError
from titancli.observe.events import read_events

RECIPE = """
extends = "titan:dpo_debug"
model = {dim = 32, n_layers = 1, hidden_dim = 64}
loop = "kto"

[loss]
type = "kto"
beta = 0.5
desirable_weight = 1.2

[dataset]
type = "unpaired"
path = "titan:sums_pairs"
pairs = true

[optimizer]
type = "adamw"
lr = 3e-3
eps = 1e-4                          # rounding does not turn into steps

[training]
steps = 8
local_batch_size = 4
global_batch_size = 8

[metrics]
log_freq = 1
"""


@pytest.fixture
def kto(here: Path) -> Path:  # noqa: F811
    (here / "kto.toml").write_text(RECIPE)
    return here


def metrics(run: Path, event: str = "step") -> list[dict[str, float]]:
    return [e["metrics"] for e in read_events(run / "events.jsonl") if e["event"] == event]


def test_a_run_learns_and_resumes_byte_for_byte(
    train: Callable[..., Finished],  # noqa: F811
    kto: Path,
) -> None:
    rows = [
        {"prompt": f"{n}?", "completion": "no!yes"[n % 2 * 3 :][:3], "label": n % 2 > 0} for n in range(64)
    ]
    (kto / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = '{type="unpaired", path="rows.jsonl", pairs=false}'
    held_out = f"validation.datasets.v={data[:-1]}, repeat=false}}"
    steps = ("training.steps=30", "lr_scheduler.total_steps=30", "lr_scheduler.warmup_steps=2")
    line = ("kto.toml", *steps, f"dataset={data}", held_out, "validation.freq=10", "validation.steps=4")
    done = train(*line, "--run-dir", "whole")
    assert done.code == 0, done.err
    first, *_, last = metrics(kto / "whole")
    assert 0.5 <= first["loss"] <= 0.6  # the model is the reference
    assert first["kl"] == 0 == first["reward_desirable"]
    assert last["reward_desirable"] > 0.5 > 0 > last["reward_undesirable"]
    assert any(one["kl"] > 0 for one in metrics(kto / "whole"))
    *_, end = metrics(kto / "whole", "validation")
    assert end["validation/v/loss"] < 0.8 * first["loss"]
    assert end["validation/v/reward_accuracy"] == 1
    assert train(*line, "--run-dir", "parts", "training.steps=13").code == 0
    done = train("parts", "--resume", "training.steps=30")
    assert done.code == 0, done.err
    assert losses(kto / "parts") == losses(kto / "whole")
    assert read_digests(kto / "parts") == read_digests(kto / "whole")


def test_rows_padded_to_the_longest_are_the_same_run(
    train: Callable[..., Finished],  # noqa: F811
    kto: Path,
) -> None:
    assert train("kto.toml", "training.seq_len=200", "--run-dir", "whole").code == 0
    done = train("kto.toml", "training.seq_len=200", "dataset.padding=longest", "--run-dir", "cut")
    assert done.code == 0, done.err
    assert losses(kto / "cut") == pytest.approx(losses(kto / "whole"), rel=3e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_ranks_make_the_run_of_one_also_where_one_has_no_answers(
    train: Callable[..., Finished],  # noqa: F811
    train_on: Callable[..., Finished],  # noqa: F811
    kto: Path,
    loss: str,
) -> None:
    """20 answers in steps of 8: the second rank has none of the last 4 if each has 4 rows."""
    pairs = [{"prompt": f"what is {n}", "chosen": f"{n}", "rejected": f"not {n}"} for n in range(10)]
    (kto / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    data = ("dataset.path=pairs.jsonl", "dataset.repeat=false")
    line = ("kto.toml", *data, f"loss.type={loss}", "training.seq_len=128")
    assert train(*line, "--run-dir", "one").code == 0
    assert list(losses(kto / "one")) == [1, 2, 3]
    layouts = {"fsdp": (), "ddp": ("mesh.dp_replicate=2",), "tp": ("mesh.tp=2",), "pp": ("mesh.pp=2",)}
    cut = "dataset.padding=longest"
    layouts |= {"cut": (cut,), "cut, tp": (cut, "mesh.tp=2"), "cut, cp": (cut, "mesh.cp=2")}
    for name, layout in layouts.items():
        model = ("model.n_layers=2",) if name == "pp" else ()
        alone = "one"
        if model:
            alone = "one-pp"
            assert train(*line, *model, "--run-dir", alone).code == 0
        done = train_on(2, *line, *layout, *model, "--run-dir", name)
        assert done.code == 0, done.err
        assert losses(kto / name) == pytest.approx(losses(kto / alone), rel=3e-6)
        ours, theirs = (metrics(kto / run) for run in (name, alone))
        for told, expected in zip(ours, theirs, strict=True):
            for key in {"kl", "reward_accuracy", "reward_desirable", "reward_undesirable"} & expected.keys():
                assert told[key] == pytest.approx(expected[key], rel=1e-4, abs=2e-6), key


def test_adapters_are_compared_with_their_base(
    train: Callable[..., Finished],  # noqa: F811
    kto: Path,
) -> None:
    assert train("kto.toml", "training.steps=2", "--run-dir", "base").code == 0
    lora = ('converters=[{type="lora", rank=4}]', "weights=base/checkpoints/step-2")
    done = train("kto.toml", *lora, "--run-dir", "lora")
    assert done.code == 0, done.err
    first, *_, last = metrics(kto / "lora")
    assert first["loss"] == pytest.approx((1.2 + 1) / 4)
    assert last["loss"] != first["loss"]


def test_what_does_not_fit_is_refused_by_name(
    train: Callable[..., Finished],  # noqa: F811
    kto: Path,
) -> None:
    for line, message in {
        ("loss=dpo",): 'the loss dpo does not learn from single answers: set loss = "kto"',
        ("loop=dpo",): "the loss kto cannot be trained on pairs",
        ("loop=pretrain",): 'its loop has what it compares with: set loop = "kto"',
        ("dataset.type=preference", "dataset.path=titan:sums_pairs"): "kto needs answers with labels",
        ('validation.datasets.v={type="chat", path="titan:sums"}',): "validation.datasets.v: kto needs",
        ("loss.desirable_weight=0.0", "loss.undesirable_weight=0.0"): "must be above 0",
        ("training.local_batch_size=1", "training.global_batch_size=1"): "a step has only one",
        ("dataset.padding=longest", "mesh.pp=2", "--nproc", "2"): "need rows of one length",
        ("dataset.trailing_newline=true",): "is not known to add a line break",
    }.items():
        done = train("kto.toml", *line, "--run-dir", f"r{abs(hash(line))}")
        assert done.code != 0
        assert message in " ".join(done.err.split()), (message, done.err)


# --------------------------------------------------------------------------------------------- by the engine


def answers(rows: int) -> Batch:
    """Prompts of three tokens and answers of two, all of them others; without targets from `rows` on."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 60, (4, 8), generator=generator)
    targets = torch.full_like(tokens, IGNORE)
    targets[:rows, 2:4] = tokens[:rows, 3:5]
    desirable = torch.tensor([1.0, 0.0, 1.0, 0.0])
    return Batch({"tokens": tokens, "targets": targets, "desirable": desirable})


class Other:
    """A reference whose log-probabilities are those of the model and one more for each row."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def log_probs(self, batch: Any) -> Any:
        found = self._engine.forward(batch)
        return torch.where(batch["targets"] != IGNORE, found + 0.25, 0.0)


def on_ranks(counts: list[int], loss: Any, fails: bool = False) -> Any:
    """Return the estimate, and what is raised, on ranks with so many answers, or batches, each."""
    made = replace(recipe(Layout(mesh={"dp_shard": len(counts)})), loss=loss, loop=KtoLoop())
    made = replace(made, dataset=Unpaired(path="titan:sums_pairs", pairs=True))
    with Engine.build(made) as engine:
        compared = Compared(engine, Other(engine), 8)  # type: ignore[arg-type]
        count = counts[engine.mesh.dp_rank]
        try:
            batches = compared([answers(4)] * count if fails else [answers(count)])
        except TitanError as error:
            # Nothing is spoilt: another call is fine.
            return error.message, engine.forward_backward(compared([answers(2)]))["kl"].item()
        return [batch["kl"].tolist() if "kl" in batch else None for batch in batches]


def test_the_divergence_is_at_least_0_and_is_that_of_all_ranks(ranks: Ranks) -> None:
    """The reference finds each of two tokens more probable by a quarter: the log-ratio is -0.5."""
    assert ranks(1, on_ranks, [4], Kto())[0] == [[0.0] * 4]
    assert ranks(2, on_ranks, [4, 0], Kto())[0] == [[0.0] * 4]
    assert ranks(1, on_ranks, [4], ApoZeroUnpaired())[0] == [None]


@pytest.mark.ranks
def test_ranks_with_different_numbers_of_batches_are_told_so_and_nothing_is_spoilt(ranks: Ranks) -> None:
    for message, kl in ranks(2, on_ranks, [1, 2], Kto(), True):
        assert "with 1 batches" in message and "with 2 batches" in message
        assert kl == 0.0
