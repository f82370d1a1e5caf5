"""Weights under Hugging Face names: in and out, handed on, and refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.cases import Layout, my_batches, part, recipe, small
from tests.ranks.layouts import EIGHT
from titancli import Engine

pytestmark = pytest.mark.ranks

HEAD = "lm_head.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def locals_of(engine: Engine) -> dict[str, Tensor]:
    return {name: torch.from_numpy(part(tensor)[2]) for name, tensor in engine.plain_parameters()}


def same(a: Engine, b: Engine) -> bool:
    here, there = locals_of(a), locals_of(b)
    assert here.keys() == there.keys()
    return all(torch.equal(here[name], there[name]) for name in here)


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---------------------------------------------------------------------------------------------- identity


def into_another(layout: Layout) -> list[Any]:
    """Weights out of one engine and into another, and back into the first after it has gone on."""
    one, other = Engine.build(recipe(layout)), Engine.build(recipe(layout, seed=8))
    batches = my_batches(one)
    found: list[Any] = [same(one, other)]
    other.forward_backward(batches)
    other.load_weights(one.weights())
    found += [same(one, other), other.status["accumulated"], other.version]
    # What has been loaded is what is trained with.
    for engine in (one, other):
        engine.forward_backward(batches)
        engine.optim_step()
    found += [same(one, other), raised(lambda: other.optim_step())]
    # From copies, and onto what has gone on; a balancing bias has no Hugging Face name, and stays.
    kept = [(name, None if tensor is None else tensor.clone()) for name, tensor in one.weights()]
    before = {name: x for name, x in locals_of(one).items() if one.hf_form and one.hf_form.sources(name)}
    one.forward_backward(batches)
    one.optim_step()
    found.append(any(not torch.equal(before[name], locals_of(one)[name]) for name in before))
    one.load_weights(kept if dist.get_rank() == 0 else None)
    return [*found, all(torch.equal(before[name], locals_of(one)[name]) for name in before)]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, small({"dp_shard": 2}), id="FSDP2"),
        pytest.param(2, small({"tp": 2}, tied=True), id="TP2, tied"),
        pytest.param(2, small({"pp": 2}), id="PP2"),
        pytest.param(1, Layout(config=EIGHT), id="experts"),
    ],
)
def test_loading_what_weights_gives_changes_no_bit(ranks: Any, world: int, layout: Layout) -> None:
    for found in ranks(world, into_another, layout):
        differed, equal, accumulated, version, still_equal, refused, *back = found
        assert differed is False and equal is True and still_equal is True
        assert (accumulated, version) == (0, 1), "its gradients were those of other weights"
        assert "optim_step without gradients" in refused
        assert back == [True, True]


# ------------------------------------------------------------------------------------------------ errors


def wrong_weights() -> list[Any]:
    engine = Engine.build(recipe(small({"dp_shard": 2})))
    first = dist.get_rank() == 0

    def changed() -> Iterator[Any]:
        for name, tensor in engine.weights():
            if name == HEAD:
                yield "lm_haed.weight", tensor
            elif name == DOWN:
                yield name, None if tensor is None else tensor[:-1]
            else:
                yield name, tensor
            if name == "model.norm.weight":
                yield name, tensor

    def broken() -> Iterator[Any]:
        yield "model.norm.weight", torch.ones(32)
        raise OSError("the server is gone")

    messages = [
        raised(lambda: engine.load_weights(changed())),
        raised(lambda: engine.load_weights(broken() if first else None)),
        raised(lambda: engine.load_weights(None)),
        raised(lambda: engine.load_weights([("model.norm.weight", [1.0])] if first else None)),
    ]
    refused = raised(engine.optim_step)
    engine.load_weights(Engine.build(recipe(small({"dp_shard": 2}))).weights())  # ranks are still in step
    return [*messages, refused, engine.version]


def test_what_is_wrong_with_weights_is_told_on_every_rank(ranks: Any) -> None:
    here, there = ranks(2, wrong_weights)
    for message in (here[0], there[0]):
        assert "missing: lm_head.weight" in message and "unknown: lm_haed.weight" in message
        assert "given twice: model.norm.weight" in message
        assert f"shapes differ: {DOWN} is [31, 48], layers.1.feed_forward.w2.weight is [32, 48]" in message
    assert here[1:4] == there[1:4]
    assert "load_weights: reading the weights failed on rank 0: OSError: the server is gone" in here[1]
    assert "no weights were passed on rank 0" in here[2]
    assert "model.norm.weight is a list, not a tensor" in here[3]
    assert (
        "optim_step: the engine is unusable: load_weights failed after it had started" in here[4] == there[4]
    )
    assert here[-1] == there[-1] > 1


# --------------------------------------------------------------------------------------------- handing on


class Stops:
    """Takes two tensors and leaves."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.names = [next(weights)[0], next(weights)[0]]


def fails(name: str, tensor: Tensor) -> None:
    raise ValueError(f"no room for {name}")


def pushed() -> list[Any]:
    engine = Engine.build(recipe(small({"dp_shard": 2})))
    kept: dict[str, Tensor] = {}
    stops = Stops()

    def keep(name: str, tensor: Tensor) -> None:
        kept[name] = tensor.clone()

    versions = [engine.push_weights(keep), engine.push_weights(stops)]
    messages = [raised(lambda: engine.push_weights(fails)), raised(lambda: engine.push_weights(7))]  # type: ignore[arg-type]
    whole = {name: tensor for name, tensor in engine.weights() if tensor is not None}
    return [
        versions,
        stops.names,
        messages,
        list(kept) == list(whole),
        all(map(torch.equal, kept.values(), whole.values())),
    ]


def test_a_target_is_handed_all_weights_on_rank_0(ranks: Any) -> None:
    here, there = ranks(2, pushed)
    assert here[0] == there[0] == [0, 0]
    assert here[1] == ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
    assert there[1] == []
    assert here[2] == there[2]
    assert "failed on rank 0: ValueError: no room for model.embed_tokens.weight" in here[2][0]
    assert "a int cannot receive weights" in here[2][1]
    assert here[3:] == [True, True] and there[3:] == [True, True]
