"""A step's random numbers follow from the seed, and those of the process are none of its business."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import cases
from tests.engine.cases import Layout
from tests.parallel.dropout_cases import Dropping
from titancli.engine import Engine
from titancli.engine.rng import Stream, derive

pytestmark = pytest.mark.ranks

DROPPING = Layout(converters=[Dropping()], model={"n_layers": 2})


def drawn() -> tuple[Any, ...]:
    """One number of each generator of the process."""
    return random.random(), np.random.rand(), torch.rand(()).item()


def process_draws(verb: str) -> tuple[Any, Any]:
    """What the process draws after a verb, and what it draws without it."""
    with Engine.build(cases.recipe(DROPPING)) as engine:
        batches = cases.my_batches(engine)
        if verb == "optim_step":
            engine.forward_backward(batches)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)
        if verb == "optim_step":
            engine.optim_step()
        elif verb == "forward":
            engine.forward(batches[0])
        elif verb == "a loss that raises":
            with pytest.raises(ZeroDivisionError):
                engine.forward_backward(batches, lambda out, batch: drawn() and 1 / 0)
        else:
            getattr(engine, verb)(batches)
        after = drawn()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    return after, drawn()


VERBS = ["forward", "evaluate", "forward_backward", "optim_step", "a loss that raises"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_leaves_the_generators_of_the_process_alone(ranks: Any, verb: str) -> None:
    ((after, without),) = ranks(1, process_draws, verb)
    assert after == without


def test_a_stream_draws_what_generators_of_its_seed_draw_and_goes_on_where_it_was_left() -> None:
    seed = derive(3, "a step")
    python, numpy = random.Random(seed), np.random.RandomState(seed % 2**32)
    cpu = torch.Generator().manual_seed(seed)
    stream = Stream(torch.device("cpu"), 3, "a step")
    for _ in range(3):
        expected = (python.gauss(0, 1), numpy.randn(), torch.randn(3, generator=cpu).tolist())
        for one in (stream.copy(), stream):
            with one.drawn():
                assert (random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()) == expected


def sampled_until_good() -> int:
    """How often a script draws and gives up until it draws enough: without numbers of its own, for ever."""
    random.seed(1)
    with Engine.build(cases.recipe(Layout(model={"n_layers": 2}))) as engine:
        for attempt in range(20):
            engine.forward_backward(cases.my_batches(engine))
            if random.random() > 0.8:
                return attempt
            engine.clear_gradients()
    raise AssertionError("every attempt drew the same")


def test_a_script_that_draws_again_after_clearing_gradients_draws_something_else(ranks: Any) -> None:
    assert ranks(1, sampled_until_good)[0] > 0


def steps(disturb: bool, calls: int = 1) -> dict[str, torch.Tensor]:
    layout = replace(DROPPING, mesh={"dp_shard": 2}, micro_batches=2)
    with Engine.build(cases.recipe(layout)) as engine:
        for step in range(2):
            batches = cases.my_batches(engine, step)
            if disturb:
                drawn()
                engine.evaluate(batches)
            for part in [batches] if calls == 1 else [[batch] for batch in batches]:
                engine.forward_backward(part)
                if disturb:
                    drawn()
                    engine.forward(batches[0])
            engine.optim_step()
        return cases.wholes(engine.named_parameters())


@pytest.mark.parametrize("calls", [1, 2])
def test_dropout_draws_the_same_whatever_happens_between_the_calls_of_a_step(ranks: Any, calls: int) -> None:
    expected, *_ = ranks(2, steps, False)
    found, *_ = ranks(2, steps, True, calls)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def evaluated_twice() -> tuple[bool, bool, bool]:
    """Whether an evaluation is one without dropout, the same twice, and leaves the model training."""
    with (
        Engine.build(cases.recipe(DROPPING)) as engine,
        Engine.build(cases.recipe(replace(DROPPING, converters=[]))) as plain,
    ):
        [batch] = cases.my_batches(engine)
        with engine.sampling() as model:
            quiet = not any(module.training for module in model.modules())
        same = torch.equal(engine.forward(batch), plain.forward(batch))
        same &= torch.equal(engine.evaluate(batch)["loss"], plain.evaluate(batch)["loss"])
        return same, quiet, all(module.training for module in engine.model.modules())


def test_evaluation_drops_nothing(ranks: Any) -> None:
    assert ranks(1, evaluated_twice) == [(True, True, True)]
