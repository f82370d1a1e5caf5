"""`titan reproduce`: a run is repeated, and each difference between the two is reported."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import titancli.provenance
from tests.run.conftest import Finished, furnish, in_this_process, train_here, trained
from titan_proof import reproduce
from titan_proof.differences import provenance_differences
from titan_proof.reproduction import Reproduction, collect, extract, find, read, write
from titan_proof.verdict import compare
from titancli.errors import EnvironmentProblem, RecipeError, UsageError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run `r` of four steps."""
    folder = tmp_path_factory.mktemp("reproduce")
    trained(folder, "--run-dir", "r", "training.steps=4")
    return folder


@pytest.fixture
def run(finished: Path) -> Reproduction:
    return collect(finished / "r")


@pytest.fixture
def titan(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Finished]:
    """Return a function that runs `titan …` in a new folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITAN_RUNS", raising=False)

    return in_this_process(capfd)


def doctored(run: Reproduction, **made_by: Any) -> Reproduction:
    """Return the same run with other provenance."""
    return replace(run, made_by={**deepcopy(run.made_by), **made_by})


def parted(run: Reproduction, at: int = 2) -> Reproduction:
    """Return the same run with other numbers from a step on."""
    steps = {
        step: {name: value * 1.5 for name, value in row.items()} if int(step) >= at else row
        for step, row in run.steps.items()
    }
    return replace(run, steps=steps, weights={})


def test_a_run_is_reproduced_bit_for_bit_from_its_file_alone(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path
) -> None:
    assert titan("reproduce", finished / "r", "--export", "mine.repro").code == 0
    done = titan("reproduce", "mine.repro", "--run-dir", "again")
    assert (done.code, done.out.splitlines()) == (
        0,
        [
            "bitwise equal: losses and gradient norms of 4 logged steps, 1 to 4",
            "  weights and optimizer state: equal at step 2, 4",
        ],
    )
    assert (tmp_path / "again" / "recipe.lock.toml").read_text() == (
        finished / "r/recipe.lock.toml"
    ).read_text()


def test_a_reproduction_with_another_recipe_and_fewer_steps_parts(
    titan: Callable[..., Finished], finished: Path
) -> None:
    done = titan("reproduce", finished / "r", "--steps", 3, "optimizer.lr=0.004", "--json")
    found = json.loads(done.out)
    # The rate acts on the loss of the next step; the schedule is that of the whole run.
    assert (done.code, found["verdict"]["result"], found["verdict"]["step"]) == (1, "parts", 2)
    assert [one["what"] for one in found["verdict"]["because"]] == ["optimizer.lr"]
    assert found["verdict"]["compared_steps"] == [1, 2, 3] and found["problems"] == []


def lock(run: Reproduction, before: str, after: str) -> Reproduction:
    assert before in run.recipe
    return replace(run, recipe=run.recipe.replace(before, after))


def versions(run: Reproduction, **changed: str) -> dict[str, Any]:
    return {"versions": {**run.made_by["versions"], **changed}}


def machine(run: Reproduction, **changed: Any) -> dict[str, Any]:
    return {"machine": {**run.made_by["machine"], **changed}}


PLANTED: dict[str, tuple[Callable[[Reproduction], Reproduction], str, str]] = {
    "another torch": (
        lambda run: doctored(run, **versions(run, torch="2.12.0")),
        "torch",
        "version of torch: 2.12.0 -> ",
    ),
    "another titan": (
        lambda run: doctored(run, **versions(run, titancli="0.0.9")),
        "titan",
        "version of titan: 0.0.9 -> ",
    ),
    "the same version of titan with other code": (
        lambda run: doctored(run, code={**run.made_by["code"], "titan": "0" * 32}),
        "titan",
        "code of titan: 000000000000 -> ",
    ),
    "another Python": (
        lambda run: doctored(run, **versions(run, python="3.10.1")),
        "python",
        "version of python: 3.10.1 -> ",
    ),
    "other data": (
        lambda run: doctored(run, data={**run.made_by["data"], "contents": "f" * 32}),
        "data",
        "data, contents: ffffffffffff -> ",
    ),
    "another tokenizer": (
        lambda run: doctored(run, data={**run.made_by["data"], "tokenizer": "hf:1"}),
        "data",
        "data, tokenizer: hf:1 -> byte",
    ),
    "another CPU's kernels": (
        lambda run: doctored(run, **machine(run, cpu_kernels="AVX512+")),
        "cpu_kernels",
        "instructions of the CPU's kernels: AVX512+ -> ",
    ),
    "another device": (
        lambda run: doctored(run, device="NVIDIA H100"),
        "device",
        "device: NVIDIA H100 -> CPU",
    ),
    "another recipe": (
        lambda run: lock(run, "lr = 0.002", "lr = 0.003"),
        "recipe",
        "optimizer.lr: 0.003 -> 0.002",
    ),
    "another length of the schedule": (
        lambda run: lock(run, "steps = 4\n", "steps = 40\n"),
        "recipe",
        "length of the learning rate schedule: 40 -> 4",
    ),
    "another seed": (lambda run: lock(run, "seed = 0", "seed = 1"), "recipe", "training.seed: 1 -> 0"),
    "another environment": (
        lambda run: doctored(run, env={"NVIDIA_TF32_OVERRIDE": "1"}),
        "environment",
        "variable NVIDIA_TF32_OVERRIDE: 1 -> none",
    ),
    "another plugin's code": (
        lambda run: replace(
            doctored(run, code={**run.made_by["code"], "titan-muon": "0" * 32}),
            recipe=run.recipe.replace("titan/adamw", "titan-muon/muon"),
        ),
        "plugin",
        "code of plugin titan-muon: 000000000000 -> ",
    ),
    "another plugin file": (
        lambda run: replace(
            doctored(run, plugin_files=[{"path": "/x/faulty.py", "sha256": "e" * 64, "text": "1"}]),
            recipe=run.recipe.replace("titan/adamw", "faulty/adamw"),
        ),
        "plugin",
        "plugin file faulty.py: eeeeeeeeeeee -> none",
    ),
    "other first weights": (
        lambda run: doctored(run, first_weights={**run.made_by["first_weights"], "hash": "a" * 32}),
        "weights",
        "first weights: aaaaaaaaaaaa -> ",
    ),
    "a run that was resumed under another torch": (
        lambda run: replace(
            run,
            earlier=[{**doctored(run, **versions(run, torch="2.11.0")).made_by, "to_step": 2, "drift": []}],
        ),
        "resumed",
        "up to step 2, version of torch: 2.11.0 -> ",
    ),
    "a run that was resumed with another rate": (
        lambda run: replace(
            run, earlier=[{**run.made_by, "to_step": 2, "drift": ["optimizer.lr: 0.1 -> 0.002"]}]
        ),
        "resumed",
        "up to step 2, optimizer.lr: 0.1 -> 0.002",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named(run: Reproduction, name: str) -> None:
    plant, kind, words = PLANTED[name]
    verdict = compare(plant(run), parted(run))
    assert (verdict.result, verdict.step) == ("parts", 2)
    named = [one for one in verdict.because if one.kind == kind]
    assert [str(one).startswith(words) for one in named] == [True], [str(one) for one in verdict.because]


def test_what_has_no_effect_is_listed_and_explains_nothing(run: Reproduction) -> None:
    other = doctored(run, **versions(run, pydantic="1", **{"titan-muon": "9"}), **machine(run, cpu="Z80"))
    other = lock(other, "log_freq = 1", "log_freq = 2")
    verdict = compare(other, parted(run))
    assert verdict.because == [] and verdict.result == "parts"
    found = {(one.what, one.effect) for one in verdict.differences}
    assert found == {
        ("version of pydantic", "none"),
        ("version of titan-muon", "none"),
        ("cpu", "none"),
        ("metrics.log_freq", "none"),
    }


def test_without_a_known_difference_it_says_so(
    titan: Callable[..., Finished], run: Reproduction, tmp_path: Path, finished: Path
) -> None:
    write(tmp_path / "odd.repro", parted(run, at=3))
    done = titan("reproduce", tmp_path / "odd.repro", "--compare", finished / "r")
    assert done.code == 1
    first, loss, *_ = done.out.splitlines()
    assert first == "diverges at step 3, and no known difference explains it"
    assert loss == "  largest relative difference of loss: 3.3e-01 at step 3"


def shifted(run: Reproduction, relative: float) -> Reproduction:
    steps = {step: {**row, "loss": row["loss"] * (1 + relative)} for step, row in run.steps.items()}
    return replace(run, steps=steps, weights={})


def test_another_layout_is_within_its_envelope_or_not(run: Reproduction) -> None:
    other = doctored(run, world=2, mesh={**run.made_by["mesh"], "tp": 2})
    near, far = compare(shifted(run, 3e-7), other), compare(shifted(run, 3e-3), other)
    assert near.result == "within_envelope" and near.largest[0].relative == pytest.approx(3e-7, rel=1e-2)
    assert [str(one) for one in near.because] == ["ranks: 1 -> 2", "degree tp: 1 -> 2"]
    # More than rounding, and rounding is all that the layout explains.
    assert (far.result, far.step, far.because) == ("parts", 1, [])
    threads = compare(doctored(shifted(run, 3e-7), **machine(run, threads=64)), run)
    assert (threads.result, [one.kind for one in threads.because]) == ("within_envelope", ["threads"])
    assert near.envelope["loss"] == pytest.approx(1e-5 * 4**0.5)
    # The same layout has no envelope.
    assert compare(shifted(run, 3e-7), run).result == "parts"


def test_a_gpu_that_was_not_asked_for_determinism_has_an_envelope(run: Reproduction) -> None:
    one = doctored(run, device="NVIDIA H100")
    verdict = compare(one, shifted(one, 3e-7))
    assert (verdict.result, [d.kind for d in verdict.because]) == ("within_envelope", ["determinism"])
    exact = lock(one, "deterministic = false", "deterministic = true")
    assert compare(exact, shifted(exact, 3e-7)).result == "parts"


def test_weights_alone_may_part(run: Reproduction) -> None:
    other = replace(run, weights={**run.weights, "4": {"rank-00000.safetensors": "0"}})
    verdict = compare(run, other)
    assert (verdict.result, verdict.step, verdict.weights) == ("parts", 4, {"2": True, "4": False})


def test_numbers_that_are_not_finite_are_compared(run: Reproduction) -> None:
    nan = replace(run, steps={**run.steps, "3": {"loss": "NaN", "grad_norm": "NaN"}})
    assert compare(nan, nan).result == "bitwise_equal"
    other = doctored(run, world=2)
    assert (compare(nan, other).result, compare(nan, other).step) == ("parts", 3)


def test_weights_of_another_layout_are_compared_by_tensor(
    titan: Callable[..., Finished], finished: Path, run: Reproduction, tmp_path: Path
) -> None:
    furnish(tmp_path)
    paths = f'dataset.paths=["{finished}/text.txt"]'
    assert train_here("tiny.toml", paths, "training.steps=4", "optimizer.lr=0.00201", "--run-dir", "b") == 0
    layout: dict[str, Any] = {"world": 2, "mesh": {**run.made_by["mesh"], "dp_shard": 2}}
    found = collect(tmp_path / "b")
    files = {"4": {"rank-00001.safetensors": "0"}}  # those of other ranks
    other = replace(doctored(found, **layout), weights=files)
    [weights] = [one for one in compare(run, other).largest if one.metric.startswith("weights (")]
    assert 0 < weights.relative < 0.1 and weights.step == 4
    same = replace(doctored(run, **layout), weights=files)
    assert not [one for one in compare(run, same).largest if one.metric.startswith("weights (")]
    gone = replace(other, run={**other.run, "path": "/nowhere"})
    assert not [one for one in compare(run, gone).largest if one.metric.startswith("weights (")]


def test_first_weights_of_another_layout_are_not_compared(run: Reproduction) -> None:
    first = run.made_by["first_weights"]
    other = doctored(run, first_weights={"layout": "other", "hash": "other"})
    assert first is not None and not [
        one for one in provenance_differences(run, other) if one.kind == "weights"
    ]
    assert not [
        one for one in provenance_differences(run, doctored(run, first_weights=None)) if one.kind == "weights"
    ]


def test_a_smaller_batch_on_fewer_ranks_is_no_layout(run: Reproduction) -> None:
    two = doctored(run, world=2, mesh={**run.made_by["mesh"], "dp_shard": 2})
    [batch] = [one for one in provenance_differences(two, run) if one.effect == "results"]
    assert str(batch) == "rows of a global batch: 4 -> 2"
    plan = reproduce.plan(two, nproc=4, overrides=["training.local_batch_size=1"], dry_run=True)
    assert plan.loaded.recipe.training.global_batch_size == 4


# ------------------------------------------------------------------------------------------- beforehand


def test_check_says_what_differs_here(
    titan: Callable[..., Finished], finished: Path, run: Reproduction, tmp_path: Path
) -> None:
    same = titan("reproduce", finished / "r", "--check")
    assert (same.code, same.out) == (0, "nothing relevant differs\n")
    write(tmp_path / "old.repro", doctored(run, **versions(run, torch="2.1.0"), code=None))
    other = titan("reproduce", tmp_path / "old.repro", "--check", "optimizer.lr=1.0")
    assert other.code == 1
    assert "differs (changes results): optimizer.lr: 0.002 -> 1.0" in other.out
    assert "differs (changes results): version of torch: 2.1.0 -> " in other.out
    assert "the code of titan and its plugins: not recorded by the run" in other.out


def test_check_reads_the_data_that_are_here(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path
) -> None:
    furnish(tmp_path)
    moved = titan("reproduce", finished / "r", "--check", f'dataset.paths=["{tmp_path}/text.txt"]')
    assert moved.code == 0 and "differs (no effect): dataset.paths" in moved.out
    (tmp_path / "text.txt").write_text("another text\n" * 400)
    other = titan("reproduce", finished / "r", "--check", f'dataset.paths=["{tmp_path}/text.txt"]')
    assert other.code == 1 and "differs (changes results): data, contents: " in other.out
    gone = titan("reproduce", finished / "r", "--check", 'dataset.paths=["/nowhere/text.txt"]')
    assert gone.code == 1
    assert "cannot be reproduced here: dataset.paths: /nowhere/text.txt does not exist" in gone.out


# -------------------------------------------------------------------------------------------- the file


def test_a_file_holds_all_that_a_run_folder_does(run: Reproduction, finished: Path, tmp_path: Path) -> None:
    write(tmp_path / "x.repro", run)
    assert read(tmp_path / "x.repro") == run == find(str(finished / "r/checkpoints/step-4"))
    assert find(str(finished / "r/recipe.lock.toml")) == run
    with pytest.raises(EnvironmentProblem, match="exists"):
        write(tmp_path / "x.repro", run)


def test_a_file_that_is_damaged_or_newer_or_none_is_refused(run: Reproduction, tmp_path: Path) -> None:
    path = tmp_path / "x.repro"
    write(path, run)
    whole = path.read_bytes()
    for damaged, words in (
        (whole[: len(whole) // 2], "is damaged or was edited"),
        (whole.replace(b"lr = 0.002", b"lr = 0.003"), "is damaged or was edited"),
        (b"{}", "is not a file of"),
        (b"", "is not a file of"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(EnvironmentProblem, match=words):
            read(path)
    (tmp_path / "alone.toml").write_text("recipe = 1\n")
    with pytest.raises(EnvironmentProblem, match="a recipe without a run"):
        find(str(tmp_path / "alone.toml"))
    with pytest.raises(EnvironmentProblem, match="does not exist"):
        find(str(tmp_path / "nothing"))
    with pytest.raises(EnvironmentProblem, match="llama3_debug is a recipe without a run"):
        find("llama3_debug")


def test_a_newer_format_is_refused_with_what_still_helps(
    run: Reproduction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("titan_proof.reproduction.FORMAT", 2)
        write(tmp_path / "x.repro", doctored(run, **versions(run, titancli="9.9")))
    with pytest.raises(EnvironmentProblem, match="has format 2, but this version") as caught:
        read(tmp_path / "x.repro")
    assert "9.9" in str(caught.value.hint) and "titan train" in str(caught.value.hint)


def test_plugin_files_and_the_uncommitted_patch_are_kept_and_never_run(
    run: Reproduction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    from titancli.provenance import keep_sources, provenance

    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "code.py").write_text("x = 1\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    (folder / "code.py").write_text("x = 2\n")
    (folder / "mine.py").write_text("raise SystemExit('this was run')\n")
    made: list[Path] = []
    diff = titancli.provenance.uncommitted_patch
    monkeypatch.setattr("titancli.provenance.uncommitted_patch", lambda at: made.append(at) or diff(at))
    attempt = provenance([folder / "mine.py"])
    copied = tmp_path / "r"
    shutil.copytree(Path(run.run["path"]), copied)
    record = json.loads((copied / "run.json").read_text())
    record["attempts"][-1] |= attempt
    (copied / "run.json").write_text(json.dumps(record))
    keep_sources(copied, attempt)
    assert not made  # it is the patch that was recorded
    keep_sources(copied, attempt)  # a resume
    (folder / "mine.py").write_text("changed\n")
    (folder / "code.py").write_text("x = 3\n")
    found = collect(copied)
    assert found.missing == []
    write(tmp_path / "x.repro", found)
    files = {path.name: path.read_text() for path in extract(read(tmp_path / "x.repro"), tmp_path / "out")}
    assert files["mine.py"] == "raise SystemExit('this was run')\n"
    assert files["recipe.lock.toml"] == run.recipe
    subprocess.run(["git", "checkout", "-q", "code.py"], check=True)
    subprocess.run(["git", "apply", str(tmp_path / "out/uncommitted.patch")], check=True)
    assert (folder / "code.py").read_text() == "x = 2\n"
    # Without the copies the texts are gone, and this is reported.
    shutil.rmtree(copied / "sources")
    assert len(collect(copied).missing) == 2


# ---------------------------------------------------------------------------------- runs of every state


def test_how_far_a_run_is_followed(run: Reproduction) -> None:
    def state(name: str, last: int) -> Reproduction:
        steps = {step: row for step, row in run.steps.items() if int(step) <= last}
        return replace(run, run={**run.run, "state": name}, steps=steps)

    assert reproduce.target(run, None) is None
    assert reproduce.target(state("stopped", 3), None) == 3
    assert reproduce.target(state("running", 2), None) == 2
    assert reproduce.target(state("died", 2), None) == 2
    assert reproduce.target(state("failed", 2), None) == 3  # the step that failed
    assert reproduce.target(state("failed", 0), None) == 1
    assert reproduce.target(run, 2) == 2
    with pytest.raises(UsageError, match="has logged 3 steps, not 4"):
        reproduce.target(state("stopped", 3), 4)
    with pytest.raises(EnvironmentProblem, match="has logged no step"):
        reproduce.target(state("died", 0), None)


def test_a_recipe_that_this_version_does_not_know_says_which_does(run: Reproduction) -> None:
    old = lock(doctored(run, **versions(run, titancli="0.0.9")), "max_norm", "max_gone")
    with pytest.raises(RecipeError, match=r"made by titan 0\.0\.9") as caught:
        reproduce.plan(old, dry_run=True)
    assert caught.value.problems[0].hint and "install titan 0.0.9" in caught.value.problems[0].hint
    now, problems = reproduce.here(old)
    assert len(problems) == 1 and "version of titan" in {one.what for one in provenance_differences(old, now)}


def test_two_reproductions_at_once_have_folders_of_their_own(run: Reproduction, here: Path) -> None:
    from titancli.run.start import make_folder

    plans = [reproduce.plan(run), reproduce.plan(run)]
    assert len({make_folder(plan).path for plan in plans}) == 2


def test_a_run_of_several_nodes_wants_a_number_of_processes(run: Reproduction) -> None:
    several = replace(run, launch={"nproc": 8, "nnodes": 2})
    plan = reproduce.plan(run, dry_run=True)
    with pytest.raises(UsageError, match="2 nodes of 8 ranks"):
        reproduce.request(several, plan, None, traceback=False)
    assert reproduce.request(several, plan, 1, traceback=False).world == 1


def test_what_a_resume_changed_is_known(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(finished / "r", run)
    record = json.loads((run / "run.json").read_text())
    [first] = record["attempts"]
    second = {**deepcopy(first), "checkpoint": "/x/step-2", "drift": ["training.steps: 2 -> 4"]}
    here = first["machine"]["cpu_kernels"]
    first["machine"]["cpu_kernels"] = "AVX512+"
    record["attempts"] = [
        {**first, "world": 8},
        first,
        second,
    ]  # the first does not count
    (run / "run.json").write_text(json.dumps(record))
    verdict = compare(collect(run), parted(collect(finished / "r")))
    assert [str(one) for one in verdict.because] == [
        "up to step 2, training.steps: 2 -> 4",
        "up to step 2, instructions of the CPU's kernels: AVX512+ -> " + here,
    ]
    assert verdict.result == "parts"


def test_flags_that_do_nothing_are_refused(titan: Callable[..., Finished], finished: Path) -> None:
    for flags in (["--check", "--steps", 2], ["--check", "--export", "x"], ["--compare", "x", "a.b=1"]):
        assert titan("reproduce", finished / "r", *flags).code == 2


def test_events_or_checkpoints_that_are_gone_are_named(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(finished / "r", run)
    shutil.rmtree(run / "checkpoints/step-4")
    (run / "checkpoints/step-2/manifest.json").write_text("{}")
    found = collect(run)
    assert found.weights == {} and len(found.missing) == 2
    assert "step-4, is gone" in found.missing[1] and "is damaged" in found.missing[0]
    verdict = compare(found, collect(finished / "r"))
    assert (verdict.result, verdict.weights) == ("bitwise_equal", {})
    (run / "events.jsonl").unlink()
    (run / "run.json").unlink()
    bare = collect(run)
    assert bare.steps == {} and "there is no run.json" in bare.missing
    verdict = compare(bare, collect(finished / "r"))
    assert verdict.result == "not_comparable" and len(verdict.unknown) == 5


def test_a_run_that_failed_fails_again_in_the_same_step(
    titan: Callable[..., Finished], tmp_path: Path
) -> None:
    furnish(tmp_path)
    fault = ["loss=faulty", "loss.fault=error", "loss.call=3"]
    assert train_here("tiny.toml", "--run-dir", "f", "-p", "./faulty.py", "training.steps=4", *fault) == 1
    alone = titan("reproduce", "f")
    assert alone.code == 4 and "-p " in alone.err and "--extract" in alone.err
    done = titan("reproduce", "f", "-p", "./faulty.py")
    assert done.code == 0, done.out + done.err
    assert done.out.startswith("bitwise equal: ")


def test_a_signal_in_the_middle_leaves_what_can_be_resumed_and_compared(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    from titancli.observe.observers import Observers

    step_end = Observers.step_end

    def stopping(self: Observers, *arguments: Any, **named: Any) -> Any:
        done = step_end(self, *arguments, **named)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Observers, "step_end", stopping)
        stopped = titan("reproduce", finished / "r", "--run-dir", "again")
    assert stopped.code == 75 and "bitwise equal" in stopped.out
    assert "titan train again --resume" in stopped.err
    assert train_here("again", "--resume") == 0
    done = titan("reproduce", finished / "r", "--compare", "again")
    assert done.code == 0 and "4 logged steps, 1 to 4" in done.out
