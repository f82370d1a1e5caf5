"""A student learns more from a teacher's distributions than from the same tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.run.conftest import Finished, here, train  # noqa: F401 - fixtures
from titancli.observe.events import read_events

LETTERS = np.array(list("abcdefghijklmnop"))
SMALL = (
    *("tiny.toml", "model.vocab_size=257", "training.seq_len=64", "training.local_batch_size=16"),
    *("training.mixed_precision_param=float32", "checkpoint.interval=1000", "lr_scheduler.warmup_steps=10"),
    *("lr_scheduler.decay_type=cosine", "metrics.log_freq=50", "activation_checkpoint.mode=none"),
    *('validation.datasets.x={type="text_files", paths=["held_out.txt"]}', "validation.freq=1000"),
)
STUDENT = ("training.steps=200", "optimizer.lr=5e-3", 'dataset.paths=["little.txt"]')
DISTIL = ("loss=distil", 'loop.type="distil"', "loop.teacher.dtype=float32")


def texts(folder: Path) -> None:
    """Write texts of one Markov chain: much for the teacher, little for the student, and some to test on."""
    draw = np.random.default_rng(0)
    chances = draw.dirichlet(np.full(16, 0.4), size=16).cumsum(-1)
    for name, length in (("much.txt", 100_000), ("little.txt", 1_500), ("held_out.txt", 10_000)):
        state, numbers = 0, []
        for point in draw.random(length):
            state = min(15, int(np.searchsorted(chances[state], point)))
            numbers.append(state)
        (folder / name).write_text("".join(LETTERS[numbers]))


def held_out(run: Path) -> float:
    """Return the cross-entropy of the held-out text after the last step."""
    *_, last = (e["metrics"] for e in read_events(run / "events.jsonl") if e["event"] == "validation")
    return last.get("validation/x/cross_entropy", last["validation/x/loss"])


@pytest.mark.slow
def test_a_student_gains_over_sft_on_the_same_tokens(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    texts(here)
    much = ("training.steps=200", "optimizer.lr=5e-3", 'dataset.paths=["much.txt"]', "model.dim=64")
    assert train(*SMALL, *much, "--run-dir", "t").code == 0
    assert train(*SMALL, *STUDENT, "--run-dir", "sft").code == 0
    teacher = "loop.teacher.weights=t/checkpoints/step-200"
    runs = {"sft": (), "forward": (), "jsd": ("loss.divergence=jsd",)}
    for name, fields in runs.items():
        if name != "sft":
            done = train(*SMALL, *STUDENT, *DISTIL, teacher, *fields, "--run-dir", name)
            assert done.code == 0, done.err
    found = {name: held_out(here / name) for name in ("t", *runs)}
    print("held-out cross-entropy:", found)
    for name in ("forward", "jsd"):
        assert found["t"] - 0.02 < found[name] < found["sft"] - 0.1
