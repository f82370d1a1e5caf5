"""`titan bisect`: the first step, and then the first tensor, in which two runs diverge."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.conftest import Finished, furnish, in_this_process, train_here, trained
from titan_proof.bisect import Bisection, Side, bisect, side_of
from titan_proof.reproduction import collect, folder_of
from titancli.engine import Engine

STEPS = 6
WHERE = ("activation", "gradient", "weight")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run `r`, which saves at steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("bisect")
    trained(folder, "--run-dir", "r", "checkpoint.keep_latest_k=0")
    return folder


@pytest.fixture
def titan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Finished]:
    """Return a function that runs `titan …` in a new folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITAN_RUNS", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))  # in which nobody else works

    return in_this_process(capfd)


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.view(-1)[place : place + 1].view(torch.int32).bitwise_xor_(1 << bit)


def with_a_flip(
    patch: pytest.MonkeyPatch, where: str, step: int, name: str, bit: int = 20, place: int = 7
) -> None:
    """Flip one bit in a step: in the output of a module, in a gradient, or in a weight after the step."""
    from titancli.engine.digest import Digests

    forward_backward, optim_step = Engine.forward_backward, Engine.optim_step
    applied = Digests.step_applied

    def passes(self: Engine, *args: Any) -> Any:
        handle: Any = None
        if self.step + 1 == step and where == "activation":
            module = dict(self.model.named_modules())[name.rpartition(".")[0]]

            def after(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
                changed = out.detach().clone()
                flip(changed, changed.numel() - 40 + place, bit)  # a first token's query changes nothing
                return out + (changed - out).detach()

            handle = module.register_forward_hook(after)
        try:
            return forward_backward(self, *args)
        finally:
            if handle is not None:
                handle.remove()

    def steps(self: Engine, *args: Any) -> Any:
        if self.step + 1 == step and where == "gradient":
            flip(dict(self.named_parameters())[name].grad, place, bit)  # type: ignore[arg-type]
        return optim_step(self, *args)

    def moved(self: Any, at: Any) -> Any:
        # The weights after the optimizer's step.
        if at.number == step and where == "weight":
            with torch.no_grad():
                flip(dict(self._named)[name], place, bit)
        return applied(self, at)

    patch.setattr(Engine, "forward_backward", passes)
    patch.setattr(Engine, "optim_step", steps)
    patch.setattr(Digests, "step_applied", moved)


def flipped_run(finished: Path, folder: Path, patch: pytest.MonkeyPatch, *fault: Any) -> Path:
    furnish(folder)
    patch.chdir(folder)
    with patch.context() as own:
        with_a_flip(own, *fault)
        assert again(finished) == 0
    return folder / "b"


def again(finished: Path, *arguments: str) -> int:
    """Train the same run once more, as `b`."""
    same = (f'dataset.paths=["{finished}/text.txt"]', "checkpoint.keep_latest_k=0", "--run-dir", "b")
    return train_here("tiny.toml", *same, *arguments)


def found_in(one: Path, other: Path) -> Bisection:
    return bisect(side_of(collect(one)), side_of(collect(other)))


PARAMETERS = [
    f"layers.{layer}.{part}.weight"
    for layer in (0, 1)
    for part in ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2")
]


def check(finished: Path, folder: Path, patch: pytest.MonkeyPatch, where: str, step: int, name: str) -> None:
    other = flipped_run(finished, folder, patch, where, step, name)
    found = found_in(finished / "r", other)
    assert found.with_digests == list(range(1, STEPS + 1)) and found.result == "parts"
    assert found.step is not None and found.earliest is not None
    if "feed_forward" in name and found.step > step:
        # More values than a digest covers: a change in the others shows in the next step, which uses them
        # all.
        assert found.earliest <= step == found.step - 1
        return
    assert (found.step, found.after) == (step, step - 1 or None)
    if found.what == ["tensors of the checkpoint"]:
        assert {one.name.split(".", 1)[1].removesuffix(".exp_avg") for one in found.checkpoints[-1].unequal}
        return
    if where == "activation":
        assert found.phase in ("forward", "backward")  # a loss may round it away
    else:
        assert (found.phase, found.tensors) == (
            {"gradient": "backward", "weight": "optimizer"}[where],
            [name],
        )
    assert not found.because


@pytest.mark.parametrize("where", WHERE)
def test_a_flipped_bit_is_found_in_its_step_and_tensor(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    check(finished, tmp_path, monkeypatch, where, 3, PARAMETERS[3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_flipped_bits_are_found(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    drawn = random.Random(seed)
    step, name = drawn.randint(1, STEPS), drawn.choice(PARAMETERS)
    check(finished, tmp_path, monkeypatch, drawn.choice(WHERE), step, name)


def test_the_command_says_where_and_repeats_the_step(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = PARAMETERS[0]
    other = flipped_run(finished, tmp_path, monkeypatch, "gradient", 4, name)
    done = titan("bisect", finished / "r", other, "--repeat")
    assert done.code == 1, done.err
    first, phase, tensor, equal, before, after, why, a, b, end, *_ = done.out.splitlines()
    assert first.startswith("diverge at step 4: gradient") and "gradients (" in first
    assert phase == "  the loss is equal: the backward pass differs"
    assert tensor == f"  first tensor: {name}"
    assert equal == "  equal up to step 3, of 6 steps, 1 to 6 (digests)"
    assert before.startswith("  checkpoint step-2: all ") and " of " in after and "step-4: " in after
    assert why == "  no known difference explains it"
    assert a == "repeated from checkpoint step-2 of A: step 4 equals that of A"
    assert b == "repeated from checkpoint step-2 of B: step 4 equals that of A"
    assert end.startswith("  step 4 of B cannot be repeated here: something went wrong once")
    assert not list(Path(tempfile.gettempdir()).glob("titan-*"))


def test_runs_that_agree(titan: Callable[..., Finished], finished: Path) -> None:
    done = titan("bisect", finished / "r", finished / "r/checkpoints/step-4", "--repeat")
    assert (done.code, done.out.splitlines()[:2]) == (
        0,
        ["equal: 6 steps, 1 to 6 (digests)", "  checkpoint step-6: all 84 tensors are equal"],
    )


def test_what_explains_it_is_said_and_both_are_repeated(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path
) -> None:
    furnish(tmp_path)
    assert again(finished, "optimizer.lr=0.004") == 0
    done = titan("bisect", finished / "r", "b", "--repeat", "--json")
    found = json.loads(done.out)
    # A warm-up of one step: the first has its full rate.
    assert (done.code, found["step"], found["phase"], found["after"]) == (1, 1, "optimizer", None)
    assert [one["what"] for one in found["because"]] == ["optimizer.lr"]
    assert found["repeated"]["A"]["differs"]["A"] == [] == found["repeated"]["B"]["differs"]["B"]
    assert found["repeated"]["tensors"]["unequal"] and found["repeated"]["A"]["from_step"] == 0
    assert [one["step"] for one in found["checkpoints"]] == [2]


def test_a_step_before_a_resume_with_another_recipe_is_repeated_under_its_own(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path
) -> None:
    furnish(tmp_path)
    assert train_here("tiny.toml", "--run-dir", "a", "training.steps=2", "lr_scheduler.total_steps=6") == 0
    assert train_here("a", "--resume", "training.steps=6", "optimizer.lr=0.004") == 0
    assert again(finished, "optimizer.lr=0.004") == 0
    done = titan("bisect", "a", "b", "--repeat", "--json")
    found = json.loads(done.out)
    assert (done.code, found["step"], found["phase"]) == (1, 1, "optimizer")
    assert found["repeated"]["A"]["differs"]["A"] == [] == found["repeated"]["B"]["differs"]["B"]
    assert found["repeated"]["A"]["differs"]["B"] and found["repeated"]["B"]["differs"]["A"]


def test_another_run_in_the_same_folder_is_not_taken_for_it(finished: Path) -> None:
    one = collect(finished / "r")
    other = replace(one, run={**one.run, "run_id": "another"})
    assert (folder_of(one), folder_of(other)) == (finished / "r", None)
    assert side_of(other).folder is None and "is not here" in side_of(other).missing[0]


def test_other_rows_are_told_from_another_computation(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path
) -> None:
    furnish(tmp_path)
    (tmp_path / "text.txt").write_text("another text\n" * 4000)
    assert train_here("tiny.toml", "--run-dir", "b") == 0
    done = titan("bisect", finished / "r", "b")
    assert done.out.startswith("diverge at step 1: rows, loss, ")
    assert "  they were trained on other rows\n" in done.out
    assert "; data, contents: " in done.out
    assert "titan bisect" in done.err and "--repeat" in done.err


def test_other_first_weights_are_told_from_another_computation(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path
) -> None:
    furnish(tmp_path)
    assert again(finished, "training.seed=3") == 0  # with one document, every order is the same
    done = titan("bisect", finished / "r", "b")
    assert done.out.startswith("diverge at step 1: weights before it, loss, ")
    assert "  they began this step with other weights\n" in done.out
    assert "  because of training.seed: 0 -> 3" in done.out


def test_without_digests_the_logged_steps_are_compared(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = flipped_run(finished, tmp_path, monkeypatch, "gradient", 3, PARAMETERS[0], 30)
    shutil.rmtree(other / "digests")
    done = titan("bisect", finished / "r", other)
    assert re.match(r"diverge at step [34]: (loss|gradient norm)", done.out), done.out
    assert "of 6 steps, 1 to 6 (0 with digests, the others as they were logged)" in done.out
    assert "tiny has no digests of its steps (debug.digests): logged steps are compared" in done.out
    copied = shutil.copytree(finished / "r", tmp_path / "a", ignore=shutil.ignore_patterns("digests"))
    repeated = titan("bisect", copied, other, "--repeat").out
    assert repeated.count(": neither run has a digest of it\n") == 2 and "cannot be repeated" not in repeated
    assert titan("reproduce", other, "--export", "b.repro").code == 0
    other.rename(tmp_path / "gone")
    away = titan("bisect", finished / "r", "b.repro")
    assert "b is not here: its logged steps are compared, without digests" in away.out
    refused = titan("bisect", finished / "r", "b.repro", "--repeat")
    assert refused.code == 2 and "needs the folders of both runs" in refused.err


def test_digests_of_another_version_are_not_read_and_this_is_said(finished: Path, tmp_path: Path) -> None:
    copied = tmp_path / "r"
    shutil.copytree(finished / "r", copied)
    for path in copied.glob("digests/*/rank-*.bin"):
        path.write_bytes(path.read_bytes().replace(b'"format":2', b'"format":9'))
    found = found_in(finished / "r", copied)
    assert (found.result, found.with_digests) == ("equal", [])
    assert any("has no digests that this version of titan can read" in line for line in found.unknown)


def test_what_digests_do_not_sample_is_found_in_checkpoints(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = flipped_run(finished, tmp_path, monkeypatch, "weight", 4, PARAMETERS[2], 2)
    shutil.rmtree(other / "digests")
    shutil.copytree(finished / "r/digests", other / "digests")
    found = found_in(finished / "r", other)
    assert (found.result, found.step, found.what) == ("parts", 4, ["tensors of the checkpoint"])
    assert found.tensors == [f"model.{PARAMETERS[2]}"] and found.checkpoints[-1].unequal[0].elements == 1


def on_two_ranks(side: Side, relative: float, since: int) -> Side:
    """Return the same run as another layout would have made it, but with the same rows."""
    mesh = {**side.run.made_by["mesh"], "dp_shard": 2}
    run = replace(side.run, made_by={**side.run.made_by, "world": 2, "mesh": mesh}, weights={})
    digests = {}
    for step, digest in side.digests.items():
        layout = replace(digest.layout, world=2, mesh=mesh)
        factor = 1 + (relative if step >= since else 1e-7)
        digests[step] = replace(digest, loss=digest.loss * factor, layout=layout)
    return Side(run, side.folder, digests, {}, [])


def test_another_layout_parts_where_the_envelope_ends(finished: Path) -> None:
    one = side_of(collect(finished / "r"))
    near, far = bisect(one, on_two_ranks(one, 1e-7, 1)), bisect(one, on_two_ranks(one, 3e-3, 4))
    assert (near.result, near.step, near.first_bit, near.tensors) == ("within_envelope", None, 1, [])
    assert (far.result, far.step, far.after, far.phase) == ("parts", 4, 3, None)
    assert near.envelope["loss"] > 0 and far.largest[0].step >= 4
    # Its weights were not compared, whatever the losses are.
    assert bisect(one, on_two_ranks(one, 0.0, 1)).result == "within_envelope"
    rows = on_two_ranks(one, 1e-7, 1)
    rows.digests[5] = replace(rows.digests[5], rows=1)
    found = bisect(one, rows)
    assert (found.result, found.step, found.phase) == ("parts", 5, "data")
    for bad in (math.nan, math.inf):
        spoilt = on_two_ranks(one, 1e-7, 1)
        spoilt.digests[5] = replace(spoilt.digests[5], loss=bad)
        for sides in ((one, spoilt), (spoilt, one)):
            assert (bisect(*sides).result, bisect(*sides).step) == ("parts", 5)


def test_a_repetition_that_fails_says_why_and_leaves_nothing(
    titan: Callable[..., Finished], finished: Path, tmp_path: Path
) -> None:
    furnish(tmp_path)
    assert train_here("tiny.toml", "training.seed=3", "--run-dir", "b") == 0
    (tmp_path / "text.txt").unlink()
    done = titan("bisect", finished / "r", "b", "--repeat")
    assert done.code == 5 and "text.txt does not exist" in done.err
    assert not list(Path(tempfile.gettempdir()).glob("titan-*"))
