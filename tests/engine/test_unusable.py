"""An engine that nobody can put right says so, at each verb, until something does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_library import TINY, batch
from titancli import Batch, Engine, LossResult, TitanError
from titancli.engine.dry_run import local
from titancli.errors import EnvironmentProblem
from titancli.models import Llama3
from titancli.recipe.schema import Training

GOOD = batch()
TRAINING = Training(steps=9, seq_len=16, mixed_precision_param="float32")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.of(Llama3(**TINY), training=TRAINING) as made:
        yield made


def damage(folder: Path) -> None:
    """Change one byte of the numbers."""
    path = next(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 64
    path.write_bytes(data)


def step(engine: Engine) -> float:
    engine.forward_backward(GOOD)
    return float(engine.optim_step()["grad_norm"])


def refused(engine: Engine) -> None:
    verbs: tuple[Any, ...] = (
        lambda: engine.forward(GOOD),
        lambda: engine.evaluate(GOOD),
        lambda: engine.forward_backward(GOOD),
        engine.optim_step,
        lambda: engine.save("nowhere"),
        lambda: dict(engine.weights()),
        engine.sampling().__enter__,
        engine.clear_gradients,
    )
    for verb in verbs:
        with pytest.raises(TitanError, match=r"the engine is unusable: .* after it had started\n.*load"):
            verb()


def test_a_load_that_fails_half_way_is_mended_by_one_that_does_not(engine: Engine, tmp_path: Path) -> None:
    step(engine)
    for name in ("step-1", "step-2"):
        engine.save(tmp_path / name)
    expected = step(engine)
    damage(tmp_path / "step-2")
    with pytest.raises(EnvironmentProblem):
        engine.load(tmp_path / "step-2")
    refused(engine)
    with pytest.raises(TitanError, match="the engine is unusable"):
        engine.load(tmp_path / "step-1", optimizer=False)  # the optimizer's state would stay as it is
    with pytest.raises(TitanError, match="the engine is unusable"):
        engine.load_weights(None)
    engine.load(tmp_path / "step-1")
    assert step(engine) == expected


def test_weights_that_come_half_way_are_mended_by_whole_ones(engine: Engine) -> None:
    kept = {name: tensor.clone() for name, tensor in engine.weights()}
    expected = engine.forward(GOOD)
    name = next(iter(kept))
    with pytest.raises(TitanError, match="do not belong to this model"):
        engine.load_weights([(name, torch.zeros_like(kept[name]))])
    refused(engine)
    engine.load_weights(kept.items())
    assert torch.equal(engine.forward(GOOD), expected)


def test_a_load_that_fails_before_it_begins_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    engine.forward_backward(GOOD)
    gradients = [p.grad.clone() for _, p in engine.named_parameters()]
    with pytest.raises(EnvironmentProblem):
        engine.load(tmp_path)
    assert engine.status["accumulated"] == 1
    for (name, parameter), gradient in zip(engine.named_parameters(), gradients, strict=True):
        assert torch.equal(local(parameter.grad), local(gradient)), name


def test_what_no_load_mends_needs_a_new_engine(engine: Engine, tmp_path: Path) -> None:
    engine.save(tmp_path / "step-0")
    engine.mark_unusable("rank 1 is gone", "nothing")
    engine.mark_unusable("and this is said after it")
    with pytest.raises(TitanError, match="load: the engine is unusable: rank 1 is gone\nbuild a new engine"):
        engine.load(tmp_path / "step-0")


def test_a_loss_that_calls_a_verb_is_refused_and_leaves_nothing(engine: Engine) -> None:
    expected = engine.evaluate(GOOD)["loss"]

    def loss(out: torch.Tensor, given: Batch) -> LossResult:
        return LossResult((out - engine.forward(given)).sum(), 1)

    for verb in (engine.forward_backward, engine.evaluate):
        with pytest.raises(TitanError, match="forward: the engine is in the middle of"):
            verb(GOOD, loss)
    assert torch.equal(engine.evaluate(GOOD)["loss"], expected)


def test_weights_are_refused_in_a_loss_and_may_go_where_they_came_from(engine: Engine) -> None:
    expected = engine.evaluate(GOOD)["loss"]

    def loss(out: torch.Tensor, given: Batch) -> LossResult:
        return LossResult(out.sum() * len(list(engine.weights())), 1)

    with pytest.raises(TitanError, match="weights: the engine is in the middle of forward_backward"):
        engine.forward_backward(GOOD, loss)
    engine.load_weights(engine.weights())
    assert torch.equal(engine.evaluate(GOOD)["loss"], expected)


def test_weights_that_change_while_they_are_sent_are_no_mixture(engine: Engine) -> None:
    halfway = engine.weights()
    next(halfway)
    step(engine)
    with pytest.raises(TitanError, match=r"have changed since the first was sent \(version 0, now 1\)"):
        next(halfway)
    halfway = engine.weights()
    next(halfway)
    engine.close()
    with pytest.raises(TitanError, match="weights: the engine is closed"):
        next(halfway)


def test_a_fork_is_refused_by_name(engine: Engine) -> None:
    engine.evaluate(GOOD)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # no verb may run here: the threads of the process group are the parent's
        signal.alarm(60)
        try:
            engine.evaluate(GOOD)
        except TitanError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as words:
        assert f"evaluate: the engine belongs to process {os.getpid()}" in words.read()
    os.waitpid(child, 0)
    engine.evaluate(GOOD)


def test_a_scripts_default_dtype_changes_no_bit_of_a_step(engine: Engine) -> None:
    expected = step(engine)
    torch.set_default_dtype(torch.float64)
    try:
        with Engine.of(Llama3(**TINY), training=TRAINING) as other:
            assert step(other) == expected
            found = dict(other.plain_parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(tensor, found[name]) for name, tensor in engine.plain_parameters())


def test_a_second_threads_verb_is_refused_before_the_first_ones_batch_is_looked_at(engine: Engine) -> None:
    heard: list[str] = []

    def second() -> None:
        try:
            engine.forward(GOOD)
        except TitanError as error:
            heard.append(str(error))

    def loss(out: torch.Tensor, given: Batch) -> LossResult:
        return LossResult(-out.sum(), 1)

    def check_batch(given: Batch) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    loss.check_batch = check_batch  # type: ignore[attr-defined]
    engine.forward_backward(GOOD, loss)
    assert heard and "forward: the engine is in the middle of forward_backward" in heard[0]
    assert engine.forward(GOOD).shape == (4, 16)


def test_gradient_modes_of_the_script_are_refused_or_make_no_difference(engine: Engine) -> None:
    expected = engine.forward_backward(GOOD)["loss"]
    engine.clear_gradients()
    with torch.inference_mode():
        made = Batch({name: tensor.clone() for name, tensor in GOOD.items()})
        for verb in (engine.forward, engine.evaluate, engine.forward_backward):
            with pytest.raises(TitanError, match="under torch"):
                verb(GOOD)
    with torch.no_grad(), pytest.raises(TitanError, match="forward_backward under torch"):
        engine.forward_backward(GOOD)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TitanError, match="autocast"):
        engine.forward(GOOD)
    assert torch.equal(engine.forward_backward(made)["loss"], expected)
    assert float(engine.optim_step()["grad_norm"]) > 0


def test_gradients_that_a_script_has_cleared_are_missed(engine: Engine) -> None:
    engine.forward_backward(GOOD)
    before = {name: tensor.clone() for name, tensor in engine.plain_parameters()}
    engine.model.zero_grad()
    with pytest.raises(TitanError, match="removed from the parameters"):
        engine.optim_step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.plain_parameters())
    engine.clear_gradients()
    engine.forward_backward(GOOD)
    assert float(engine.optim_step()["grad_norm"]) > 0


def test_an_optimizer_that_fails_at_its_first_save_leaves_gradients_and_state(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.forward_backward(GOOD)
    kept = engine.optimizer.step

    def step(*args: Any) -> None:
        kept(*args)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine.optimizer, "step", step)
        with pytest.raises(MemoryError):
            engine.save(tmp_path / "step-0")
    assert not engine.optimizer.state
    assert engine.optimizer.param_groups[0]["lr"] > 0
    with Engine.of(
        Llama3(**TINY), training=Training(steps=9, seq_len=16, mixed_precision_param="float32")
    ) as other:
        other.forward_backward(GOOD)
        assert torch.equal(other.optim_step()["grad_norm"], engine.optim_step()["grad_norm"])
