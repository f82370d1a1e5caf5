"""What plugins give an engine: converters that change more than a model's layers are refused by name; a loss
may be a function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.test_library import TINY, batch
from titancli import Engine, LossResult, component
from titancli.engine.build import converted
from titancli.errors import PluginError
from titancli.layout.degrees import Degrees
from titancli.losses import CrossEntropy
from titancli.models import Llama3
from titancli.recipe.schema import Compile, Training


@component("converter", "odd", target="tests.engine.test_converted:OddConverter")
class Odd:
    """Does what a converter must not do."""

    how: str = ""
    """Which of it."""


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class OddConverter:
    def __init__(self, config: Odd, **runtime: Any) -> None:
        self.how = config.how
        if self.how == "owns":
            self.owns = lambda name: name == "scale"

    def convert(self, model: Any) -> Any:
        if self.how == "adds":
            model.scale = nn.Parameter(torch.ones(2))  # which would begin as titan's own parameters do
        if self.how == "renames":
            model[0] = Scaled(model[0])
        if self.how == "owns":
            model.scale = nn.Parameter(torch.ones(2))
        return {"returns": nn.Linear(2, 2), "itself": model}.get(self.how)


def convert(*hows: str) -> list[Any]:
    recipe: Any = SimpleNamespace(converters=[Odd(how=how) for how in hows], compile=Compile())
    return converted(nn.Sequential(nn.Linear(2, 2)), recipe, Degrees())


@pytest.mark.parametrize(
    ("hows", "words"),
    [
        (["returns"], "odd returned another model"),
        (["adds"], r"odd added the parameter scale \(1 in all\), whose initial value"),
        (["renames"], r"odd removed or renamed the parameter 0.bias \(2 in all\)"),
        (["owns", "", "owns"], "odd adds parameters of its own, and so does one before it"),
    ],
)
def test_what_a_converter_must_not_do_is_refused(hows: list[str], words: str) -> None:
    with pytest.raises(PluginError, match=words):
        convert(*hows)


def test_what_a_converter_may_do_is_done() -> None:
    assert len(convert("", "itself", "owns")) == 3


@component("loss", "plain_function", target="tests.engine.test_converted:function_of")
class PlainFunction:
    """A loss whose target returns a function."""


def function_of(config: PlainFunction) -> Any:
    return lambda out, batch: LossResult(-out.sum(), (batch["targets"] >= 0).sum())


def test_a_loss_component_may_be_a_plain_function() -> None:
    with Engine.of(Llama3(**TINY), loss=PlainFunction(), training=Training(steps=1, seq_len=16)) as engine:
        own, given = engine.evaluate(batch()), engine.evaluate(batch(), CrossEntropy())
        assert abs(float(own["loss"] - given["loss"])) < 1e-6


@component("optimizer", "odd_steps", target="tests.engine.test_converted:optimizer_of")
class OddSteps:
    """An optimizer that titan cannot step."""

    how: str = ""
    """In which way."""


def optimizer_of(config: OddSteps, *, named_parameters: Any, roles: Any) -> Any:
    return torch.optim.LBFGS([p for _, p in named_parameters]) if config.how == "closure" else None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("closure", r"odd_steps \(LBFGS\) needs a closure that computes the loss again"),
        ("nothing", "odd_steps built a NoneType, not a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_stepped_is_refused(how: str, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        Engine.of(Llama3(**TINY), optimizer=OddSteps(how=how))
