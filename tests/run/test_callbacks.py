"""`[[callbacks]]`: the two that titan has, and what a plugin's may do to a run."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.conftest import Finished
from titancli.checkpoint import CheckpointReader
from titancli.loops.hooks import RunHooks
from titancli.observe.events import read_events
from titancli.recipe import load_recipe
from titancli.runs import RunFolder

EMA = 'callbacks=[{type="ema", decay=0.9}]'
PLUGIN = '''
from titancli import TitanError, component, hookimpl

@component("callback", "watch", target="watching:Watching")
class Watch:
    """Notes what it is told."""
    raises: str = ""
    """The moment at which it raises."""
    on_rank: int = -1
    """The rank that does; -1: all."""
    veto: int = 0
    """The step that it vetoes."""
    early: int = 0
    """The step after which it ends the run."""

class Watching:
    def __init__(self, config, *, engine, run):
        import torch.distributed as dist
        self.config, self.run, self.seen = config, run, []
        self.mine = config.on_rank in (-1, dist.get_rank())

    def at(self, moment, *what):
        self.seen.append(moment)
        with open(self.run.folder / f"seen-{self.mine}.txt", "a") as file:
            print(moment, *what, file=file)
        if moment == self.config.raises and self.mine:
            raise TitanError(f"no {moment}")

    def around_backward(self, backward):
        self.at("around_backward")

    def gradients_ready(self, step):
        self.at("gradients_ready")
        return self.mine and step.number == self.config.veto

    def step_applied(self, step):
        self.at("step_applied")
        return {"seen": len(self.seen), "nothing": float("nan")}

    def run_start(self, step):
        assert self.run.recipe.training.steps == self.run.steps and self.run.tokenizer.vocab_size
        assert self.run.data.state
        self.at("run_start", step)

    def step_done(self, step):
        self.at("step_done", step)
        if self.mine and step == self.config.early:
            self.run.end_early("it is enough")

    def checkpoint_saved(self, step, path):
        self.at("checkpoint_saved", path.name)

    def stop_requested(self, signal):
        self.at("stop_requested", signal)

    def run_end(self, why):
        self.at("run_end", why)

    def close(self, error):
        self.at("close", error)

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"] if state else []
        self.at("load_state", len(self.seen))

@hookimpl
def titan_components():
    return [Watch]
'''
NUMBERS = itertools.count()
Train = Callable[..., Finished]


@pytest.fixture
def watch(here: Path) -> Callable[[str], tuple[str, ...]]:
    module = f"watching_{next(NUMBERS)}"  # ranks that stand keep what they have imported
    (here / f"{module}.py").write_text(PLUGIN.replace("watching:", f"{module}:"))
    return lambda fields="": ("-p", f"./{module}.py", f'callbacks=[{{type="watch"{fields}}}]')


def read(checkpoint: Path, prefix: str) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(checkpoint, prefix=prefix)
    return {name: reader.read(name) for name in reader.names()}


def average(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The average in a checkpoint, whole, by the names of parameters."""
    return read(checkpoint, "callbacks.ema.")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read(checkpoint, "model.")


def test_an_average_is_that_of_the_weights_and_continues_bitwise(train: Train, here: Path) -> None:
    save = ("checkpoint.interval=1", "checkpoint.keep_latest_k=0")
    assert train("tiny.toml", "--run-dir", "r", EMA, *save).code == 0
    steps = [here / f"r/checkpoints/step-{step}" for step in range(1, 7)]
    for before, after in pairwise(steps):
        expected = average(before)
        for name, weight in weights(after).items():
            expected[name].lerp_(weight, torch.tensor(1 - 0.9))
        assert equal(expected, average(after))
    assert equal(average(steps[-1]), weights(here / "r/exports/step-6-ema"))
    assert train("tiny.toml", "--run-dir", "s", EMA, "training.steps=6", *save).code == 0
    shutil.rmtree(here / "s/checkpoints/step-6")
    shutil.rmtree(here / "s/checkpoints/step-5")
    assert train("s", "--resume", "--step", "4").code == 0
    assert equal(average(here / "s/checkpoints/step-6"), average(steps[-1]))


STOPS = """
import os, signal
from titancli import component, hookimpl

@component("callback", "stops", target="stopping:Stops")
class Config:
    "Sends a signal to its own process."

class Stops:
    def __init__(self, config, *, engine, run): ...

    def step_done(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

@hookimpl
def titan_components():
    return [Config]
"""


def test_a_run_that_is_stopped_exports_no_average_and_its_resume_does(train: Train, here: Path) -> None:
    (here / "stopping.py").write_text(STOPS)
    callbacks = 'callbacks=["ema", {type="stops"}]'
    done = train("tiny.toml", "--run-dir", "r", "-p", "./stopping.py", callbacks, "training.steps=4")
    assert done.code == 75 and not (here / "r/exports").exists()
    assert train("r", "--resume", "-p", "./stopping.py").code == 0
    assert [path.name for path in (here / "r/exports").iterdir()] == ["step-4-ema"]


def test_an_average_is_put_on_another_layout(train: Train, train_on: Any, here: Path) -> None:
    two = ("mesh.dp_shard=2", "training.steps=4")
    assert train_on(2, "tiny.toml", "--run-dir", "r", EMA, *two).code == 0
    before = average(here / "r/checkpoints/step-4")
    assert equal(before, weights(here / "r/exports/step-4-ema"))
    more = ("mesh.dp_shard=1", "launcher=local", "training.steps=5")
    done = train("r", "--resume", "-p", "./faulty.py", *more)
    assert done.code == 0 and "begin anew" not in done.err
    after = average(here / "r/checkpoints/step-5")
    for name, weight in weights(here / "r/checkpoints/step-5").items():
        before[name].lerp_(weight, torch.tensor(1 - 0.9))
    assert equal(before, after)


def test_an_average_that_a_checkpoint_lacks_begins_anew(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    done = train("r", "--resume", EMA, "training.steps=3")
    assert (
        done.code == 0 and "callbacks begin anew, since" in done.err and "no state of them: ema" in done.err
    )
    expected = weights(here / "r/checkpoints/step-2")
    for name, weight in weights(here / "r/checkpoints/step-3").items():
        expected[name].lerp_(weight, torch.tensor(1 - 0.9))
    assert equal(expected, average(here / "r/checkpoints/step-3"))
    assert train("r", "--resume", "callbacks=[]", "training.steps=4").code == 0
    assert not average(here / "r/checkpoints/step-4")


def test_an_average_keeps_what_a_skipped_step_leaves(train: Train, here: Path, watch: Any) -> None:
    both = 'callbacks=[{type="ema", decay=0.9}, {type="watch", veto=3}]'
    more = (*watch()[:2], "checkpoint.interval=1", "training.steps=3")
    done = train("tiny.toml", "--run-dir", "r", both, *more)
    assert done.code == 0 and "step 3 was skipped: a callback has vetoed it" in done.err
    assert equal(*(average(here / f"r/checkpoints/step-{step}") for step in (2, 3)))


def test_two_averages_need_two_names(here: Path) -> None:
    two = 'callbacks=[{type="ema"}, {type="ema"%s}]'
    assert len(load_recipe("llama3_debug", [two % ', name="slow", decay=0.99']).recipe.callbacks) == 2
    with pytest.raises(Exception, match="two averages would be saved as 'ema'"):
        load_recipe("llama3_debug", [two % ""])


def test_the_norm_is_a_metric_of_each_step(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r", "callbacks=[{type='param_norm'}]").code == 0
    metrics = [event["metrics"] for event in read_events(here / "r/events.jsonl") if event["event"] == "step"]
    squares = sum(float(t.double().square().sum()) for t in weights(here / "r/checkpoints/step-6").values())
    assert len(metrics) == 6 and metrics[-1]["param_norm"] == pytest.approx(squares**0.5, rel=1e-6)


def test_a_callback_is_told_of_a_run_and_of_how_it_goes_on(train: Train, here: Path, watch: Any) -> None:
    assert train("tiny.toml", "--run-dir", "r", *watch(), "training.steps=2").code == 0
    seen = (here / "r/seen-True.txt").read_text().splitlines()
    step = ["around_backward", "gradients_ready", "step_applied"]
    saved = ["checkpoint_saved step-2", "run_end finished", "close None"]
    assert seen == ["run_start 0", *step, "step_done 1", *step, "step_done 2", *saved]
    assert train("r", "--resume", *watch()[:2], "training.steps=3").code == 0
    seen = (here / "r/seen-True.txt").read_text().splitlines()[len(seen) :]
    assert seen[:2] == ["load_state 9", "run_start 2"]  # checkpoint_saved came after the state was taken
    metrics = [event["metrics"] for event in read_events(here / "r/events.jsonl") if event["event"] == "step"]
    assert metrics[0]["seen"] == 4 and metrics[0]["nothing"] not in (0, 1)  # NaN, or what stands for it


@pytest.mark.parametrize("moment", ["gradients_ready", "step_done", "close"])
def test_what_a_callback_raises_on_one_rank_ends_the_run(
    train: Train, here: Path, watch: Any, moment: str
) -> None:
    fields = f', raises="{moment}", on_rank=1'
    done = train("tiny.toml", "--run-dir", "r", *watch(fields), "--nproc", "2")
    assert done.code == 1 and f"no {moment}" in done.out + done.err
    assert RunFolder(here / "r").record()["attempts"][-1]["outcome"]["why"] == "failed"
    *_, last = (here / "r/seen-True.txt").read_text().splitlines()
    assert last == ("close None" if moment == "close" else f"close no {moment}")


def test_a_callback_is_closed_if_the_run_does_not_begin(train: Train, here: Path, watch: Any) -> None:
    assert train("tiny.toml", "--run-dir", "r", *watch(), "training.steps=2").code == 0
    done = train("r", "--resume", *watch(', raises="load_state"'), "training.steps=3")
    assert done.code == 1 and "no load_state" in done.err
    seen = (here / "r/seen-True.txt").read_text().splitlines()
    assert seen[-2:] == ["load_state 9", "close no load_state"]


def test_each_hook_is_closed_whatever_another_raises() -> None:
    closed: list[str] = []

    class Hook:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self, error: BaseException | None) -> None:
            closed.append(f"{self.name}: {error}")
            if self.name == "second":
                raise OSError("the disk is full")

    hooks = RunHooks()
    with pytest.raises(OSError, match="full"), hooks:
        for name in ("first", "second", "third"):
            hooks.add(Hook(name))
        raise ValueError("a step")
    assert closed == ["third: a step", "second: a step", "first: a step"]


def test_a_veto_or_an_early_end_of_one_rank_is_that_of_all(train_on: Any, here: Path, watch: Any) -> None:
    done = train_on(2, "tiny.toml", "--run-dir", "r", *watch(", veto=2, early=3, on_rank=1"))
    assert done.code == 0, done.err
    outcome = RunFolder(here / "r").record()["attempts"][-1]["outcome"]
    assert (outcome["why"], outcome["step"], outcome["checkpoint"]) == ("finished", 3, "checkpoints/step-3")
    assert outcome["metrics"]["skipped_steps"] == 1
    assert "run_end finished" in (here / "r/seen-False.txt").read_text()
