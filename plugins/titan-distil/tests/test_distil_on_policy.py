"""On-policy distillation: a student learns from a teacher what to write, the same on any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished, here, losses, train, train_on  # noqa: F401 - fixtures
from titan_proof.digests import read_digests

SMALL = (
    *("tiny.toml", "model.vocab_size=258", "training.mixed_precision_param=float32"),
    *("lr_scheduler.total_steps=6", "optimizer.lr=1e-2"),
)
TEACHER = (*SMALL, "model.dim=64", "training.steps=4", "--run-dir", "t")
LOOP = (
    'loop={type="distil_on_policy", prompts=4, samples=2, task="sum", teacher={dtype="float32", '
    'weights="t/checkpoints/step-4"}, generator={type="local", max_new_tokens=8}}'
)
ON_POLICY = (*SMALL, "--unset", "dataset", LOOP, "loss.type=distil", "loss.divergence=reverse_kl")


@pytest.mark.ranks
def test_it_learns_resumes_byte_for_byte_and_is_the_same_on_two_ranks(
    train: Callable[..., Finished],  # noqa: F811
    train_on: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    assert train(*TEACHER).code == 0
    done = train(*ON_POLICY, "--run-dir", "whole")
    assert done.code == 0, done.err
    whole = losses(here / "whole")
    assert whole[6] < 0.8 * whole[1]
    assert train(*ON_POLICY, "--run-dir", "parts", "training.steps=2").code == 0
    done = train("parts", "--resume", "training.steps=6")
    assert done.code == 0, done.err
    assert losses(here / "parts") == whole
    assert read_digests(here / "parts") == read_digests(here / "whole")
    for name, layout in {"fsdp": (), "tp": ("mesh.tp=2",)}.items():
        done = train_on(2, *ON_POLICY, *layout, "--run-dir", name)
        assert done.code == 0, done.err
        assert losses(here / name) == pytest.approx(whole, rel=1e-5)


def test_what_does_not_fit_is_refused_by_name(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    assert train(*TEACHER).code == 0
    for line, message in {
        ("loop.samples=3", "loop.prompts=1"): "cannot be dealt evenly",
        ("training.global_batch_size=8",): "a step uses loop.prompts x loop.samples",
        ("loop.generator.max_new_tokens=32",): "it leaves no room for a prompt",
        ("loop.teacher.topk=t",): "nothing is stored of completions",
    }.items():
        done = train(*ON_POLICY, *line)
        assert done.code != 0 and message in done.err, (line, done.err)
