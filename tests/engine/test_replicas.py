"""Engines that add up their gradients and take over each other's state, compared to one with all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.cases import ROWS, Layout, recipe, small, whole_batch
from tests.ranks.layouts import EIGHT
from titancli.engine import Engine
from titancli.engine.replicas import reduce_gradients, shared_state, take_state
from titancli.errors import TitanError


def step_of_both(one: Engine, other: Engine, parts: Sequence[object]) -> None:
    """A step of two engines that exchange what they have."""
    for engine, part in zip((one, other), parts, strict=True):
        engine.forward_backward(part)
    sent: list[Tensor] = []

    def send(tensors: Sequence[Tensor]) -> None:
        sent.extend(tensor.clone() for tensor in tensors)

    def add(tensors: Sequence[Tensor]) -> None:
        for tensor, more in zip(tensors, sent, strict=True):
            both = tensor + more
            tensor.copy_(both)
            more.copy_(both)

    def take(tensors: Sequence[Tensor]) -> None:
        for tensor, both in zip(tensors, sent, strict=True):
            tensor.copy_(both)

    reduce_gradients(other, send)
    told = reduce_gradients(one, add)
    assert reduce_gradients(other, take)["loss"] == told["loss"]
    one.optim_step()
    other.optim_step()


def state(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in shared_state(engine)[0].items()}


@pytest.mark.parametrize("layout", [small(), Layout(config=EIGHT)], ids=["dense", "experts with biases"])
def test_two_engines_are_one_with_all_rows(layout: Layout) -> None:
    """Targets are unevenly many: an average of averages would be wrong."""
    given = recipe(layout)
    with Engine.build(given) as whole, Engine.build(given) as one, Engine.build(given) as other:
        for step in range(3):
            rows = whole_batch(step).split(ROWS // 2)
            whole.forward_backward(rows)
            whole.optim_step()
            step_of_both(one, other, rows)
        reference, found, others = state(whole), state(one), state(other)
        for name, value in reference.items():
            assert (found[name] - value).norm() <= 1e-5 * value.norm(), name
            assert torch.equal(found[name], others[name])
        assert one.status["tokens_seen"] == whole.status["tokens_seen"]


def test_a_state_that_was_taken_over_goes_on_bit_for_bit() -> None:
    given = recipe(small())
    with (
        Engine.build(given) as first,
        Engine.build(replace(given, training=replace(given.training, seed=8))) as new,
    ):
        for engine, steps in ((first, 3), (new, 1)):
            for step in range(steps):
                engine.forward_backward(whole_batch(step))
                engine.optim_step()
        new.forward_backward(whole_batch(5))  # of a step that is not to be taken
        tensors, counters = shared_state(first)
        before = new.status["version"]
        take_state(new, {name: tensor.clone() for name, tensor in tensors.items()}, counters)
        assert new.status == {**first.status, "version": before + 1, "accumulated": 0}
        for engine in (first, new):
            engine.forward_backward(whole_batch(3))
            engine.optim_step()
        assert all(torch.equal(value, state(new)[name]) for name, value in state(first).items())


def test_a_state_that_does_not_fit_is_refused_untouched() -> None:
    given = recipe(small())
    with Engine.build(given) as engine:
        before = state(engine)
        cut = {name: tensor[:1] for name, tensor in before.items() if tensor.dim()}
        for tensors in ({}, cut, {**before, "optimizer.x.momentum": torch.zeros(2)}):
            with pytest.raises(TitanError, match="does not fit"):
                take_state(engine, tensors, {})
        assert all(torch.equal(value, before[name]) for name, value in state(engine).items())
        with pytest.raises(TitanError, match="cannot have written"):
            take_state(engine, before, {"step": "3"})
        with pytest.raises(TitanError, match="unusable: to take over"):
            engine.forward_backward(whole_batch())
        take_state(engine, before, COUNTERS)
        engine.forward_backward(whole_batch())


COUNTERS = {"step": 0, "version": 0, "tokens_seen": 0}


def test_an_exchange_that_fails_leaves_no_gradients() -> None:
    with Engine.build(recipe(small())) as engine:
        with pytest.raises(TitanError, match="call forward_backward first"):
            reduce_gradients(engine, lambda tensors: None)
        engine.forward_backward(whole_batch())

        def lost(tensors: Sequence[Tensor]) -> None:
            tensors[0].fill_(torch.nan)
            raise ConnectionError("the other is gone")

        with pytest.raises(ConnectionError):
            reduce_gradients(engine, lost)
        with pytest.raises(TitanError, match="optim_step without gradients"):
            engine.optim_step()
        engine.forward_backward(whole_batch())
        assert torch.isfinite(engine.optim_step()["grad_norm"])
