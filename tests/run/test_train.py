"""`titan train` in one process: new runs, the three forms of resuming, drift, what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.run_folders import attempt, began, ended, make
from tests.cli.run_folders import step as done_step
from tests.run.conftest import Finished, losses
from titan_proof.digests import read_digests
from titancli import registry
from titancli.errors import PluginError, TitanError
from titancli.observe.events import read_events
from titancli.recipe import load_recipe
from titancli.runs import RunFolder

Train = Callable[..., Finished]


def test_a_new_run_leaves_everything_in_its_folder(train: Train, here: Path) -> None:
    done = train("tiny.toml")
    assert done.code == 0, done.err
    [run] = (here / "runs").iterdir()
    assert done.err.startswith(f"run folder: runs/{run.name}\n")
    assert (run / "recipe.lock.toml").is_file()
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-4", "step-6"}
    record = json.loads((run / "run.json").read_text())
    [attempt] = record["attempts"]
    assert attempt["outcome"]["why"] == "finished"
    assert attempt["outcome"]["step"] == 6
    assert attempt["outcome"]["checkpoint"] == "checkpoints/step-6"
    assert attempt["mesh"]["dp_shard"] == 1
    assert attempt["world"] == 1
    assert attempt["versions"]["torch"]
    assert attempt["origins"]["training.steps"].startswith("tiny.toml:")
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
    ending = done.err.splitlines()[-3:]
    assert f"runs/{run.name}" in ending[0]
    assert f"titan recipe extend runs/{run.name} --steps 12" in ending[1]
    assert f"titan convert-checkpoint runs/{run.name}/checkpoints/step-6" in ending[2]


def test_a_resumed_run_equals_one_that_never_stopped_bit_for_bit(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "whole").code == 0
    assert train("tiny.toml", "--run-dir", "halves").code == 0
    shutil.rmtree(here / "halves/checkpoints/step-6")
    (here / "halves/events.jsonl").unlink()
    done = train("halves", "--resume")
    assert "changed:" not in done.err
    assert done.code == 0, done.err
    assert "from step-4" in done.err
    resumed, whole = losses(here / "halves"), losses(here / "whole")
    assert resumed == {step: whole[step] for step in (5, 6)}
    digests = read_digests(here / "whole")
    assert read_digests(here / "halves") == digests and list(digests) == [1, 2, 3, 4, 5, 6]
    assert {step: digest.loss for step, digest in digests.items()} == pytest.approx(whole, rel=1e-6)


def test_a_finished_run_is_extended(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r").code == 0
    before = (here / "r/recipe.lock.toml").read_text()
    done = train("r", "--resume")
    assert done.code == 0
    assert "r is finished: step 6 of 6" in done.err
    assert "titan recipe extend r --steps 12" in done.err
    assert RunFolder(here / "r").record()["attempts"][1:] == []
    run = RunFolder(here / "r")
    run.update_attempt(mesh={**run.record()["attempts"][-1]["mesh"], "dp_shard": 2})  # as if on two ranks
    done = train("r", "--resume", "training.steps=8")
    assert done.code == 0, done.err
    assert "changed: training.steps: 6 -> 8" in done.err
    assert "changed: rows of a step: 4 -> 2 (training.global_batch_size is not set, so" in done.err
    assert list(losses(here / "r")) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (here / "r/recipe.lock.1.toml").read_text() == before
    assert (here / "r/checkpoints/step-6/recipe.lock.toml").read_text() == before
    assert "steps = 8" in (here / "r/recipe.lock.toml").read_text()
    assert [a["outcome"]["step"] for a in RunFolder(here / "r").record()["attempts"]] == [6, 8]


def test_the_line_of_a_job_script_starts_and_then_continues(train: Train, here: Path) -> None:
    line = ("tiny.toml", "--run-dir", "job", "--resume")
    assert train(*line).code == 0
    shutil.rmtree(here / "job/checkpoints/step-6")
    done = train(*line)
    assert done.code == 0, done.err
    assert "from step-4" in done.err
    for checkpoint in (here / "job/checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    for record in ("run.json", "events.jsonl"):  # of a run that has saved they would say so
        (here / "job" / record).unlink()
    done = train(*line)  # a run that died before its first checkpoint must not stop the job
    assert done.code == 0, done.err
    assert "starts at step 0" in done.err


def test_the_recipe_of_a_job_script_may_change_but_not_its_model_or_data(train: Train, here: Path) -> None:
    line = ("tiny.toml", "--run-dir", "job", "--resume")
    assert train(*line, "training.steps=2").code == 0
    done = train(*line, "training.steps=3", "model.n_layers=3")
    assert done.code == 5
    assert "started with a different model" in done.err
    assert "model.n_layers: 2 -> 3" in done.err
    assert "--allow-drift" in done.err
    assert RunFolder(here / "job").record()["attempts"][1:] == []
    (here / "moved").mkdir()
    shutil.copy(here / "text.txt", here / "moved/text.txt")
    moved = ('dataset.paths=["moved/text.txt"]', "training.steps=3")
    assert train(*line, *moved).code == 5
    done = train(*line, *moved, "--allow-drift")
    assert done.code == 0, done.err
    assert "changed: dataset.paths" in done.err
    assert "starts from the beginning" not in done.err  # the same bytes in another place


def test_other_data_are_begun_anew_where_drift_is_allowed(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r", "training.steps=4").code == 0
    other = ('dataset.paths=["other.txt"]', "training.steps=6")
    (here / "other.txt").write_text((here / "text.txt").read_text().upper())
    refused = train("r", "--resume", *other)
    assert refused.code == 5
    assert "dataset.paths: " in refused.err
    assert "--allow-drift" in refused.err
    done = train("r", "--resume", *other, "--allow-drift", "debug.digests=false")
    assert done.code == 0, done.err
    assert list(read_digests(here / "r")) == [1, 2, 3, 4]
    assert (
        "warning: the data starts from the beginning: dataset text_files is not the data that the checkpoint"
    ) in done.err
    assert list(losses(here / "r")) == [1, 2, 3, 4, 5, 6]
    weights = ("weights=r/checkpoints/step-4", *other, "training.steps=1")
    done = train("tiny.toml", "--run-dir", "new", *weights)
    assert done.code == 0, done.err
    assert losses(here / "r")[5] == losses(here / "new")[1]  # the same weights on its first rows
    (here / "other.txt").write_text("the file has changed in its place\n" * 99)
    for more, code in (((), 5), (("--allow-drift",), 0)):
        done = train("r", "--resume", "training.steps=7", *more)
        assert done.code == code, done.err
        assert "bytes was" in done.err


def test_a_run_without_resume_is_a_new_run_of_its_recipe(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r", "training.seed=7").code == 0
    assert train("r").code == 0
    [again] = (here / "runs").iterdir()
    assert losses(again) == losses(here / "r")


def test_an_earlier_checkpoint_can_be_taken(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r").code == 0
    done = train("r", "--resume", "--step", "4")
    assert done.code == 0, done.err
    assert "from step-4" in done.err
    done = train("r", "--resume", "--step", "5")
    assert done.code == 5
    assert "no checkpoint of step 5" in done.err
    assert "available steps: 4, 6" in done.err


def left(here: Path, step: int | None, why: str | None) -> None:
    """A run `r` without a checkpoint, as one that ended so has left it."""
    from titancli.recipe import load_recipe, lock_text

    events = [began(), *([done_step(step, 4)] if step else [])]
    outcome = ended(why, step) if why else None
    make(here / "r", events, [attempt(outcome)], lock=lock_text(load_recipe("tiny.toml")))


@pytest.mark.parametrize("why", ["interrupted", "failed", None])
def test_a_run_that_was_stopped_before_its_first_step_is_resumed_by_the_same_words(
    train: Train, here: Path, why: str | None
) -> None:
    left(here, 0, why)
    done = train("r", "--resume")
    assert done.code == 0, done.err
    assert "the run has no checkpoint yet: it starts at step 0" in done.err
    assert list(losses(here / "r")) == [1, 2, 3, 4, 5, 6]


def test_steps_that_were_not_saved_are_not_done_again_in_silence(train: Train, here: Path) -> None:
    left(here, 3, "failed")
    done = train("r", "--resume")
    assert done.code == 5 and "has no checkpoint to resume from" in done.err
    assert f"titan train {here / 'r'}; or restart this one at step 0: --from-scratch" in done.err
    assert train("r", "--resume", "--from-scratch").code == 0


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("arguments", [(), ("--from-scratch",), ("--step", "3")])
def test_a_run_that_is_running_is_in_use_whatever_it_has_saved(
    train: Train, here: Path, step: int, arguments: tuple[str, ...]
) -> None:
    left(here, step, None)
    hold = RunFolder(here / "r").hold()
    try:
        done = train("r", "--resume", *arguments)
    finally:
        hold.release()
    assert done.code == 5, done.err
    assert f"is in use by process {os.getpid()}" in done.err
    assert "to resume from" not in done.err and "no checkpoints" not in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("tiny.toml", "--run-dir", "r"), 5, "titan train tiny.toml --run-dir r --resume"),
        (("r", "--resume"), 5, "has no checkpoint to resume from"),
        (("r", "--resume", "--step", "9"), 5, "the run has no checkpoints"),
        (("nothing/here", "--resume"), 5, "does not exist"),
        (("tiny.toml", "--resume"), 2, "--resume needs a run folder"),
        (("nonesuch", "--resume"), 3, "nonesuch"),
        (("tiny.toml", "--step", "4"), 2, "add --resume"),
        (("tiny.toml", "--allow-drift"), 2, "needs --resume"),
        (("tiny.toml", "other.toml"), 2, "one recipe"),
        (("training.steps=3",), 2, "needs a recipe"),
        (("tiny.toml", "--nnodes", "2"), 2, "--nnodes 2 needs --run-dir"),
        (("tiny.toml", "--nproc", "0"), 2, "neither a number of processes nor auto"),
        (("tiny.toml", "--nproc", "3", "mesh.dp_shard=2"), 3, "does not make 3 ranks"),
        (("tiny.toml", "training.global_batch_size=3"), 3, "not a multiple"),
        (("tiny.toml", "weights=nowhere"), 5, "nowhere does not exist"),
        (("tiny.toml", "tokenizer=hf", "tokenizer.path=nowhere"), 5, "nowhere does not exist"),
        (("tiny.toml", "training.stpes=3"), 3, "did you mean 'steps'?"),
        (("tiny.toml", 'dataset.paths=["gone.txt"]'), 5, "gone.txt does not exist"),
        (("tiny.toml", 'dataset.paths=["gone*.txt"]'), 5, "no file matches "),
        (("tiny.toml", "dataset.type=hf", "dataset.path=./gone"), 5, "dataset.path: "),
        (
            ("sft_debug", "validation.datasets.held_out.path=gone.jsonl"),
            5,
            "validation.datasets.held_out.path: ",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    train: Train, here: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (here / "r/checkpoints").mkdir(parents=True)
    (here / "r/logs").mkdir()
    from titancli.recipe import load_recipe, lock_text

    (here / "r/recipe.lock.toml").write_text(lock_text(load_recipe("tiny.toml")))
    before = sorted(here.rglob("*"))
    done = train(*arguments)
    assert done.code == code, done.err
    assert words in done.err
    assert "Traceback" not in done.err
    assert sorted(here.rglob("*")) == before


def test_a_run_folder_in_use_is_refused(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    hold = RunFolder(here / "r").hold()
    done = train("r", "--resume", "training.steps=4")
    hold.release()
    assert done.code == 5
    assert "is in use by process" in done.err
    assert RunFolder(here / "r").record()["attempts"][1:] == []


def test_a_dry_run_tells_what_is_missing_and_a_run_refuses_it(train: Train) -> None:
    words = ("tiny.toml", "tokenizer.type=hf", "tokenizer.path=./assets")
    done = train(*words, "--dry-run")
    assert done.code == 5  # as the start
    assert "missing     tokenizer.path: " in done.out
    refused = train(*words)
    assert refused.code == 5
    assert "does not exist" in refused.err


def test_a_dry_run_tells_the_plan_and_leaves_nothing(train: Train, here: Path) -> None:
    before = sorted(here.rglob("*"))
    done = train("tiny.toml", "--dry-run", "--nproc", "2", "training.global_batch_size=8")
    assert done.code == 0
    assert sorted(here.rglob("*")) == before
    assert "dp_shard 2" in done.out
    assert "8 rows x 32 tokens = 256 tokens per step" in done.out
    assert "2 times per step" in done.out
    assert "-m titancli.launchers.agent" in done.out
    plan = json.loads(train("tiny.toml", "--dry-run", "--json").out)["plan"]
    assert plan["parameters"] > 0
    assert plan["command"] is None


def test_json_puts_the_events_and_nothing_else_on_stdout(train: Train, here: Path) -> None:
    done = train("tiny.toml", "--run-dir", "r", "--json", "training.steps=2")
    assert done.code == 0
    events = [json.loads(line) for line in done.out.splitlines()]
    assert [e["event"] for e in events] == ["run_start", "step", "step", "checkpoint", "run_end"]
    assert done.out == (here / "r/events.jsonl").read_text()


def test_a_bug_in_a_plugin_is_one_block_with_its_own_traceback(train: Train, here: Path) -> None:
    done = train("tiny.toml", "-p", "./faulty.py", "loss=faulty", "loss.fault=error", "--run-dir", "r")
    assert done.code == 1
    assert "error: the run failed at step 3: ValueError: a row of 13 tokens" in done.err
    assert done.err.count("Traceback") == 1
    assert 'faulty.py", line' in done.err
    assert "titancli/worker/rank.py" not in done.err
    outcome = RunFolder(here / "r").outcome()
    assert outcome is not None
    assert (outcome["why"], outcome["step"]) == ("failed", 2)
    told = r"ValueError: a row of 13 tokens \(in the loss faulty/faulty, faulty\.py:\d+\)"
    assert re.fullmatch(told, outcome["error"])
    last = read_events(here / "r/events.jsonl")[-1]
    assert (last["event"], last["why"], last["error"]) == ("run_end", "failed", outcome["error"])


def test_an_error_with_a_remedy_is_told_in_words_alone(train: Train) -> None:
    done = train("tiny.toml", "-p", "./faulty.py", "loss=faulty", "loss.fault=advice")
    assert done.code == 1
    assert "error: the teacher does not answer\n start it first" in done.err
    assert "Traceback" not in done.err


def test_a_resume_says_which_plugin_file_is_missing_or_changed(train: Train, here: Path) -> None:
    arguments = ("-p", "./faulty.py", "loss=faulty", "training.steps=2", "--run-dir", "r")
    assert train("tiny.toml", *arguments).code == 0
    done = train("r", "--resume", "training.steps=3")
    assert done.code == 4
    assert f"add -p {here}/faulty.py" in done.err
    with open(here / "faulty.py", "a") as file:
        file.write("# changed\n")
    done = train("r", "--resume", "training.steps=3", "-p", "./faulty.py")
    assert done.code == 0, done.err
    assert "changed since the run was last started: plugin file faulty.py: " in done.err


def test_recipes_of_a_run_name_its_plugin_files(train: Train, here: Path) -> None:
    """As generate, eval and convert-checkpoint read them, of the run or of a checkpoint."""
    options = ("-p", "./faulty.py", "loss=faulty", "training.steps=1")
    assert train("tiny.toml", *options, "--run-dir", "r").code == 0
    registry.configure()
    for folder in ("r", "r/checkpoints/step-1"):
        with pytest.raises(
            PluginError, match=f"r was started with -p {here}/faulty.py; without it: "
        ) as told:
            load_recipe(here / folder / "recipe.lock.toml", runnable=False)
        assert told.value.hint == f"add -p {here}/faulty.py"
    (here / "r/run.json").write_text("{")  # damaged: the fault itself is told
    with pytest.raises(TitanError, match="no plugin 'faulty'"):
        load_recipe(here / "r/recipe.lock.toml")


def test_a_resume_names_an_installed_plugin_that_was_upgraded(train: Train, here: Path) -> None:
    """A warning in the output and the event log; those that the recipe does not use change nothing."""
    assert train("tiny.toml", "optimizer=muon", "training.steps=1", "--run-dir", "r").code == 0
    folder = RunFolder(here / "r")
    record = folder.record()
    record["attempts"][-1]["versions"] |= {"titan-muon": "0.0.7", "titan-wandb": "0.0.7"}
    record["attempts"][-1]["code"]["titan-muon"] = "0" * 32
    folder.write_record(record)
    said = [
        f"changed since the run was last started: version of titan-muon: 0.0.7 -> {version('titan-muon')}",
        "changed since the run was last started: code of plugin titan-muon: 000000000000 -> ",
    ]
    done = train("r", "--resume", "training.steps=2")
    assert done.code == 0, done.err
    warned = [e["message"] for e in read_events(folder.events) if e.get("level") == "warning"]
    for text in (done.err, "\n".join(warned)):
        assert [text.count(line) for line in said] == [1, 1] and "titan-wandb" not in text
    assert "last started" not in train("r", "--resume", "training.steps=3").err


def test_data_that_ends_is_an_end_in_good_order(train: Train, here: Path) -> None:
    (here / "text.txt").write_text("short " * 40)
    done = train("tiny.toml", "--run-dir", "r", "training.steps=100", "dataset.repeat=false")
    assert done.code == 0, done.err
    outcome = RunFolder(here / "r").outcome()
    assert outcome is not None
    assert outcome["why"] == "data_ended"
    assert f"reached the end of the data at step {outcome['step']}" in done.err
