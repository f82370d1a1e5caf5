"""Schedule-free AdamW: the steps of the reference; what is evaluated, saved and exported is the average."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import optimizer_cases
import pytest
import torch
from torch import Tensor, nn

from tests.engine import cases
from tests.engine.cases import small
from titan_optimizers import ByName, Group, ScheduleFree
from titan_testing import run_cli
from titancli.checkpoint import CheckpointReader
from titancli.observe.events import read_events
from titancli.registry.component import build

WARM_UP, STEPS = 5, 30


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(32, n, generator=drawn) for n in (8, 4)) for _ in range(STEPS)]  # type: ignore[misc]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_thirty_steps_with_warm_up_are_those_of_the_reference(decay: float) -> None:
    """Losses, which are taken at y, and the averages."""
    reference = pytest.importorskip("schedulefree", reason="the extra [dev] installs it")
    theirs, mine = net(), net()
    named = list(mine.named_parameters())
    stepping: Any = build(ScheduleFree(lr=1e-2, weight_decay=decay), named_parameters=named, roles={})
    other = reference.AdamWScheduleFree(
        theirs.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=decay, warmup_steps=WARM_UP
    )
    for step, (x, target) in enumerate(rows()):
        other.train()
        other.zero_grad()
        expected = (theirs(x) - target).square().mean()
        expected.backward()
        other.step()
        stepping.zero_grad()
        stepping.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / WARM_UP)
        with stepping.around_backward(None):
            loss = (mine(x) - target).square().mean()
            loss.backward()
        stepping.step()
        assert abs(float((loss - expected).detach())) < 1e-6
    other.eval()
    for a, b in zip(theirs.parameters(), mine.parameters(), strict=True):
        assert float((a - b).detach().abs().max()) < 1e-6


def test_parameters_hold_the_average_but_for_backward_passes() -> None:
    """Also if one raises."""
    model = net()
    stepping: Any = build(ScheduleFree(lr=1e-1), named_parameters=list(model.named_parameters()), roles={})
    x, target = rows()[0]
    for _ in range(3):
        with stepping.around_backward(None):
            (model(x) - target).square().mean().backward()
        stepping.step()
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(ValueError, match="in the middle"), stepping.around_backward(None):
        assert not any(map(torch.equal, before, model.parameters()))
        raise ValueError("in the middle")
    assert all(map(torch.equal, before, model.parameters()))


FREE_ADAMW = ScheduleFree(lr=1e-2, weight_decay=0.0)
FUNCTIONS_OF_SAMPLES: dict[str, tuple[int, Any]] = {
    "one rank": (1, small()),
    "FSDP2": (2, small({"dp_shard": 2})),
    "TP": (2, small({"tp": 2})),
    "CP": (2, small({"cp": 2})),
    "PP": (2, small({"pp": 2})),
    "tied": (2, small({"dp_shard": 2}, tied=True)),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", FUNCTIONS_OF_SAMPLES)
def test_functions_of_samples_see_y(ranks: Any, name: str) -> None:
    """Both passes do: the function sees the log-probabilities that are differentiated."""
    world, layout = FUNCTIONS_OF_SAMPLES[name]
    for found in ranks(world, optimizer_cases.of_samples, layout, FREE_ADAMW):
        torch.testing.assert_close(found["seen"], found["given"], rtol=1e-5, atol=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["one rank", "FSDP2"])
def test_functions_of_samples_step_as_the_reference(ranks: Any, name: str) -> None:
    pytest.importorskip("schedulefree", reason="the extra [dev] installs it")
    world, layout = FUNCTIONS_OF_SAMPLES[name]
    expected = optimizer_cases.plain_of_samples(ranks(1, cases.initial_weights, small())[0])
    for found in ranks(world, optimizer_cases.of_samples, layout, FREE_ADAMW):
        for key, value in expected.items():
            assert distance(found[key], value) < 1e-4, key


@pytest.mark.ranks
def test_a_function_of_samples_that_raises_leaves_no_trace(ranks: Any) -> None:
    """Under FSDP2 no weights of the first pass stay gathered."""
    layout = small({"dp_shard": 2})
    expected = ranks(2, optimizer_cases.of_samples, layout, FREE_ADAMW)[0]
    found = ranks(2, optimizer_cases.of_samples, layout, FREE_ADAMW, True)[0]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


@pytest.mark.ranks
def test_within_by_name_it_has_rates_by_name(ranks: Any) -> None:
    grouped = ByName(groups=[Group(match=["layers.0.*"], lr_factor=0.0)], optimizer=ScheduleFree(lr=1e-2))
    first = ranks(1, optimizer_cases.trained, small(), grouped, 0)[0]
    for name, found in ranks(1, optimizer_cases.trained, small(), grouped, 2)[0].items():
        if not name.startswith("optimizer."):
            assert torch.equal(found, first[name]) == ("layers.0." in name), name


def test_within_another_optimizer_it_is_refused() -> None:
    muon = 'optimizer={type="muon", fallback={type="schedule_free"}}'
    done = run_cli("validate", "llama3_debug", muon, "lr_scheduler.decay_ratio=0")
    assert done.code == 3 and "must be the optimizer of the recipe, or of by_name" in done.stderr
    grouped = 'optimizer={type="by_name", groups=[{match=["*norm*"]}], optimizer={type="schedule_free"}}'
    done = run_cli("validate", "llama3_debug", grouped, "lr_scheduler.decay_ratio=0")
    assert done.code == 0, done.stderr


def test_a_rate_that_decays_is_refused() -> None:
    done = run_cli("validate", "llama3_debug", "optimizer=schedule_free")
    assert done.code == 3 and "set lr_scheduler.decay_ratio = 0" in done.stderr
    done = run_cli("validate", "llama3_debug", "optimizer=schedule_free", "lr_scheduler.decay_ratio=0")
    assert done.code == 0, done.stderr


SIZES = ("model.n_layers=2", "validation.steps=2")
HELD_OUT = "validation.datasets.v={type='text_files', paths=['held.txt'], repeat=false}"
FREE = ("optimizer=schedule_free", "optimizer.lr=1e-2", "lr_scheduler={decay_ratio=0, warmup_steps=2}")


def validated(run: str) -> float:
    """Return the loss of a run's last validation."""
    found = [event for event in read_events(Path(run, "events.jsonl")) if event["event"] == "validation"]
    return float(found[-1]["metrics"]["validation/v/loss"])


def test_a_run_validates_saves_and_exports_the_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle; resumed there, it continues bit for bit."""
    monkeypatch.chdir(tmp_path)
    Path("held.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    saved = ("training.steps=6", "checkpoint.interval=3", "validation.freq=2")
    done = run_cli("train", "llama3_debug", "--run-dir", "whole", *SIZES, *FREE, HELD_OUT, *saved)
    assert done.code == 0, done.stderr
    shutil.copytree("whole", "cut")
    shutil.rmtree("cut/checkpoints/step-6")
    done = run_cli("train", "cut", "--resume")
    assert done.code == 0, done.stderr
    first, second = (CheckpointReader(Path(run, "checkpoints/step-6")) for run in ("whole", "cut"))
    assert set(first.names()) == set(second.names())
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.names())
    assert validated("cut") == validated("whole")
    weight = "layers.0.attention.wq.weight"
    assert not torch.equal(first.read(f"optimizer.{weight}.z"), first.read(f"model.{weight}"))
    # What was validated last is what was saved: a run that begins with it and leaves it as it is.
    still = ("optimizer.lr=0", "training.steps=1", "validation.freq=1", "weights=whole/checkpoints/step-6")
    done = run_cli("train", "llama3_debug", "--run-dir", "again", *SIZES, HELD_OUT, *still)
    assert done.code == 0, done.stderr
    assert validated("again") == validated("whole")
    done = run_cli("convert-checkpoint", "whole", "hf", "--to", "hf", "--verify")
    assert done.code == 0, done.stderr
