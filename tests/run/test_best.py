"""The callbacks `best` and `early_stop`: what is kept, when a run ends, and what is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.run.conftest import Finished, in_this_process, on_pool
from titancli.callbacks import EarlyStop, WatchedMetric
from titancli.callbacks.early_stop import EarlyStop as Stopping
from titancli.callbacks.watched import is_better, value_of
from titancli.checkpoint.format.manifest import read_manifest
from titancli.engine.step import Hooks
from titancli.errors import RecipeError
from titancli.observe.events import read_events
from titancli.runs import RunFolder

HELD_OUT = "validation.datasets.v={type='text_files', paths=['text.txt'], repeat=false}"
EVALUATED = (HELD_OUT, "validation.steps=2", "validation.freq=1", "checkpoint.keep_latest_k=1")
BEST = 'callbacks=[{type="best"}]'
WORSE = 'callbacks=[{type="best", mode="max"}, {type="early_stop", mode="max", patience=2}]'
Train = Callable[..., Finished]


def evaluations(run: Path) -> dict[int, float]:
    found = (event for event in read_events(run / "events.jsonl") if event["event"] == "validation")
    return {event["step"]: event["metrics"]["validation/v/loss"] for event in found if event["step"]}


def kept(run: Path) -> dict[str, Any]:
    assert os.readlink(run / "best").startswith("exports/step-")
    assert len(list((run / "exports").glob("step-*-best"))) == 1
    manifest = read_manifest(run / "best")
    facts: dict[str, Any] = {**manifest.state["best"]}
    facts.pop("replaces", None)
    assert manifest.step == facts["step"]
    return facts


def test_the_best_checkpoint_is_kept_and_can_be_used(
    train: Train, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = train("tiny.toml", *EVALUATED, 'callbacks=[{type="best", mode="max"}]', "--run-dir", "r")
    assert done.code == 0, done.err
    found = evaluations(here / "r")
    best = max(found, key=lambda step: found[step])
    assert best < 4  # so that its step is not among those that are kept
    assert kept(here / "r") == {"metric": "validation/v/loss", "value": found[best], "step": best}
    assert [path.name for path in (here / "r/checkpoints").glob("step-*")] == ["step-6"]
    assert f"saved best: step {best}, validation/v/loss" in done.err
    titan = in_this_process(capfd)
    assert titan("generate", "r/best", "a", "--max-new-tokens", "1").code == 0
    assert titan("convert-checkpoint", "r/best", "hf", "--to", "hf").code == 0
    assert (here / "hf/config.json").is_file()
    assert train("tiny.toml", "weights=r/best", "--run-dir", "further", "training.steps=1").code == 0


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_better_one_takes_its_place_and_a_worse_one_does_not(train: Train, here: Path, mode: str) -> None:
    how = (*EVALUATED, BEST, "--run-dir", "r", f"checkpoint.async_mode={mode}")
    assert train("tiny.toml", *how).code == 0
    found = evaluations(here / "r")
    best = min(found, key=lambda step: found[step])
    assert kept(here / "r")["step"] == best == 6
    assert train("r", "--resume", "training.steps=8", "optimizer.lr=10.0", "stability.sigma=0").code == 0
    assert min(evaluations(here / "r").values()) == found[6]
    assert kept(here / "r") == {"metric": "validation/v/loss", "value": found[6], "step": 6}


@pytest.mark.ranks
def test_all_ranks_stop_at_the_same_step_and_keep_the_same(train: Train, ranks: Ranks, here: Path) -> None:
    done = train("tiny.toml", *EVALUATED, WORSE, "--run-dir", "r", *on_pool(ranks, 2), "training.steps=30")
    assert done.code == 0, done.err
    found = evaluations(here / "r")
    outcome = RunFolder(here / "r").outcome()
    assert outcome is not None and (outcome["why"], outcome["step"]) == ("finished", max(found))
    best = max(found, key=lambda step: found[step])
    assert kept(here / "r")["step"] == best == max(found) - 2
    assert "the run ends early: validation/v/loss was" in done.err
    assert "at its best, 2 evaluations ago" in done.err


@pytest.mark.parametrize("stop", [4, 5])
def test_counters_go_on_after_a_resume(train: Train, here: Path, stop: int) -> None:
    """Step 4 was saved before it was evaluated, and is evaluated again, once."""
    how = (*EVALUATED, "checkpoint.keep_latest_k=0", "checkpoint.interval=1", "training.steps=30")
    early = 'callbacks=[{type="early_stop", mode="max", patience=6}]'
    assert train("tiny.toml", *how, early, "--run-dir", "whole").code == 0
    last = max(evaluations(here / "whole"))
    assert stop < last < 30
    shutil.copytree(here / "whole", here / "parts")
    for path in (here / "parts/checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > stop:
            shutil.rmtree(path)
    (here / "parts/events.jsonl").unlink()
    done = train("parts", "--resume")
    assert done.code == 0, done.err
    assert evaluations(here / "parts") == {
        step: loss for step, loss in evaluations(here / "whole").items() if step >= stop
    }
    done = train("parts", "--resume")  # it has ended: not a step more
    assert done.code == 0 and max(evaluations(here / "parts")) == last


def test_a_run_without_the_metric_is_refused(train: Train) -> None:
    for callback in ("best", "early_stop"):
        done = train("tiny.toml", f'callbacks=["{callback}"]')
        assert done.code == 3 and "nothing is evaluated: add a dataset" in done.err
        two = HELD_OUT.replace("datasets.v", "datasets.w")
        done = train("tiny.toml", HELD_OUT, two, "validation.steps=1", f'callbacks=["{callback}"]')
        assert done.code == 3 and "there are several datasets: set metric" in done.err
        named = f'callbacks=[{{type="{callback}", metric="validation/x/loss"}}]'
        done = train("tiny.toml", *EVALUATED, named)
        assert done.code == 3 and "is no metric of an evaluation" in done.err
    done = train("tiny.toml", *EVALUATED, 'callbacks=["best", "best"]')
    assert done.code == 3 and "one run has one best checkpoint" in done.err
    done = train("tiny.toml", *EVALUATED, 'callbacks=["early_stop", {type="early_stop", patience=9}]')
    assert done.code == 3 and "two of them watch validation/v/loss" in done.err
    done = train("tiny.toml", *EVALUATED, BEST, "checkpoint.enable=false")
    assert done.code == 3 and "nothing is saved" in done.err
    done = train("tiny.toml", *EVALUATED, 'callbacks=["best", {type="ema", name="best"}]')
    assert done.code == 3 and "another callback is named best" in done.err
    lacking = 'callbacks=[{type="best", metric="validation/v/lots"}]'
    done = train("tiny.toml", *EVALUATED, lacking, "--run-dir", "r")
    assert done.code == 3 and "there is no metric 'validation/v/lots'" in done.err
    assert "validation/v/loss" in done.err


def test_a_damaged_one_does_not_stop_a_run(train: Train, here: Path) -> None:
    assert train("tiny.toml", *EVALUATED, BEST, "--run-dir", "r").code == 0
    (here / "r/best/manifest.json").write_text("{")
    done = train("r", "--resume", "training.steps=8")
    assert done.code == 0, done.err
    assert "the best checkpoint so far is damaged" in done.err
    assert kept(here / "r")["step"] > 6


def test_only_its_own_folder_is_deleted(train: Train, here: Path) -> None:
    """Copies and other exports whose names end alike stay, and so does what somebody else made the link's."""
    assert train("tiny.toml", *EVALUATED, BEST, "--run-dir", "r", "training.steps=2").code == 0
    exports = here / "r/exports"
    others = ("step-500-before-best", "step-1-best", "step-7-ema-best")
    for name in others:
        shutil.copytree(exports / "step-2-best", exports / name)
    (exports / "step-9-best").mkdir()
    assert train("r", "--resume", "training.steps=3").code == 0
    there = {path.name for path in exports.iterdir()}
    assert os.readlink(here / "r/best") == "exports/step-3-best"
    assert there == {*others, "step-9-best", "step-3-best"}
    (here / "r/best").unlink()
    (here / "r/best").symlink_to("exports/step-500-before-best")
    assert train("r", "--resume", "training.steps=4", 'callbacks=[{type="best", mode="max"}]').code == 0
    assert (exports / "step-500-before-best/manifest.json").is_file()


def test_exports_that_are_a_link_are_not_written_through(train: Train, here: Path) -> None:
    (here / "far").mkdir()
    for how in (
        (*EVALUATED, BEST),
        ("checkpoint.last_save_model_only=true",),
        ("checkpoint.last_save_in_hf=true",),
    ):
        assert train("tiny.toml", "--run-dir", "r", "training.steps=1").code == 0
        (here / "r/exports").symlink_to(here / "far")
        done = train("r", "--resume", "training.steps=2", *how)
        assert done.code == 5 and "exports is a link, to" in done.err
        assert not list((here / "far").iterdir())
        shutil.rmtree(here / "r")


def test_one_whose_save_was_killed_is_made_again(train: Train, here: Path) -> None:
    """After the checkpoint was complete, and before the link pointed there."""
    killed = (*EVALUATED, 'callbacks=[{type="best"}]', "--run-dir", "r", "training.steps=4")
    assert train("tiny.toml", *killed).code == 0
    saved, saved_by = kept(here / "r"), read_manifest(here / "r/best").run_id
    (here / "r/best").unlink()
    (here / f"r/.best-{saved_by}").symlink_to("nowhere")
    done = train("r", "--resume", "training.steps=6")
    assert done.code == 0, done.err
    found = evaluations(here / "r")
    assert saved["step"] == 4 and kept(here / "r")["value"] == min(found[step] for step in (4, 5, 6))


def test_a_name_that_is_taken_is_not_replaced(train: Train, here: Path) -> None:
    assert train("tiny.toml", *EVALUATED, "--run-dir", "r", "training.steps=2").code == 0
    (here / "r/best").mkdir()
    (here / "r/best/mine").touch()
    done = train("r", "--resume", BEST, "training.steps=4")
    assert done.code != 0 and "cannot be made a link" in done.err
    assert (here / "r/best/mine").exists()


def test_nan_and_infinity_are_never_better() -> None:
    least, most = WatchedMetric(), WatchedMetric(mode="max")
    assert is_better(least, 1.0, None) and is_better(most, 1.0, None)
    for bad in (math.nan, math.inf, -math.inf):
        assert not is_better(least, bad, None) and not is_better(most, bad, 1.0)
    assert is_better(least, 1.0, 2.0, 0.9) and not is_better(least, 1.0, 2.0, 1.0)
    assert is_better(most, 2.0, 1.0, 0.9) and not is_better(most, 1.0, 2.0)


def test_an_evaluation_that_was_left_out_does_not_count() -> None:
    class Run:
        recipe, ended = None, ""

        def end_early(self, reason: str) -> None:
            self.ended = reason

    run = Run()
    stopping = Stopping(EarlyStop(metric="validation/v/loss", patience=2), engine=None, run=run)  # type: ignore[arg-type]
    stopping.validated(1, {})
    stopping.validated(2, {"validation/w/loss": 1.0})
    for step in (3, 3, 3):
        stopping.validated(step, {"validation/v/loss": math.nan})
    assert not run.ended
    json.dumps(stopping.state(), allow_nan=False)
    stopping.validated(4, {"validation/v/loss": math.nan})
    assert "was never a finite number" in run.ended
    with pytest.raises(RecipeError, match="there are validation/v/accuracy"):
        value_of("validation/v/loss", {"validation/v/accuracy": 1.0})


def test_a_run_may_stop_by_several_metrics() -> None:
    """Each counts by itself, and keeps its state under its own name."""

    class Run:
        recipe = None

    metrics = ("validation/v/loss", "validation/w/loss")
    configs = [EarlyStop(metric=metric) for metric in metrics]
    hooks = Hooks()
    for config in configs:
        hooks.add(Stopping(config, engine=None, run=Run()))  # type: ignore[arg-type]
    assert list(hooks.state()) == [f"early_stop.{metric}" for metric in metrics]
