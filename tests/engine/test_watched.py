"""Parameters that a script replaces, adds or freezes after the engine was built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.test_library import TINY, batch
from titancli import Engine, TitanError
from titancli.engine.dry_run import local
from titancli.models import Llama3
from titancli.recipe.schema import Training

GOOD = batch()
TRAINING = Training(steps=9, seq_len=16, mixed_precision_param="float32")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.of(Llama3(**TINY), training=TRAINING) as made:
        yield made


def new_weight(engine: Engine) -> None:
    engine.model.output.weight = nn.Parameter(torch.zeros(64, 32))


def frozen_weight(engine: Engine) -> None:
    engine.model.output.weight = nn.Parameter(torch.zeros(64, 32), requires_grad=False)


def new_module(engine: Engine) -> None:
    engine.model.layers["0"].feed_forward.w1 = nn.Linear(32, 48, bias=False)


def added(engine: Engine) -> None:
    engine.model.gate = nn.Linear(32, 1)


def taken(engine: Engine) -> None:
    engine.model.layers["1"].attention_norm = nn.Identity()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (new_weight, "output.weight was replaced or added"),
        (frozen_weight, "output.weight was replaced or added"),
        (new_module, "layers.0.feed_forward.w1.weight was replaced or added"),
        (added, "gate.weight, gate.bias were replaced or added"),
        (taken, "layers.1.attention_norm.weight was removed"),
    ],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_every_verb_names_what_is_no_longer_the_engines(
    engine: Engine, tmp_path: Path, change: Callable[[Engine], None], words: str, stepped: bool
) -> None:
    if stepped:
        engine.forward_backward(GOOD)
    change(engine)
    verbs: tuple[Callable[[], Any], ...] = (
        lambda: engine.forward(GOOD),
        lambda: engine.evaluate(GOOD),
        lambda: engine.forward_backward(GOOD),
        engine.optim_step,
        lambda: engine.save(tmp_path / "step-0"),
        lambda: engine.load(tmp_path / "step-0"),
        lambda: dict(engine.weights()),
        lambda: engine.load_weights([]),
        engine.sampling().__enter__,
    )
    for verb in verbs:
        with pytest.raises(TitanError, match=f"{words} after the engine was built"):
            verb()


def test_what_is_put_back_is_the_engines_again(engine: Engine) -> None:
    kept = engine.model.output.weight
    new_weight(engine)
    engine.model.output.weight = kept
    engine.model.layers["0"].feed_forward.more = nn.Dropout()  # nothing that could be trained
    engine.forward_backward(GOOD)
    assert float(engine.optim_step()["grad_norm"]) > 0


def test_what_is_unfrozen_is_in_no_optimizer(tmp_path: Path) -> None:
    from titancli.converters import LoRA

    with Engine.of(Llama3(**TINY)) as base:
        base.save(tmp_path / "step-0")
    with Engine.of(
        Llama3(**TINY), training=TRAINING, converters=[LoRA(rank=2)], weights=tmp_path / "step-0"
    ) as engine:
        engine.forward_backward(GOOD)
        engine.model.output.weight.requires_grad_(True)
        with pytest.raises(TitanError, match=r"output\.weight requires a gradient, but the optimizer"):
            engine.forward_backward(GOOD)
        engine.model.output.weight.requires_grad_(False)
        engine.optim_step()


def test_what_is_frozen_stays_and_the_rest_moves(engine: Engine, tmp_path: Path) -> None:
    still = [engine.model.output.weight, engine.model.layers["0"].feed_forward.w1.weight]
    for parameter in still:
        parameter.requires_grad_(False)
    before = {name: local(p).detach().clone() for name, p in engine.named_parameters()}
    for _ in range(2):
        engine.forward_backward(GOOD)
        engine.optim_step()
    for name, parameter in engine.named_parameters():
        same = torch.equal(before[name], local(parameter))
        assert same == any(parameter is p for p in still), name
    engine.save(tmp_path / "step-2")
    with Engine.of(Llama3(**TINY), training=TRAINING) as other:
        other.load(tmp_path / "step-2")
        assert other.step == 2
