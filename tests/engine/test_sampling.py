"""`engine.sampling()`: the module under training samples, and training does not notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.cases import Layout, my_batches, recipe, whole
from tests.generate.models import feed
from tests.ranks.layouts import EIGHT
from titancli import Engine, TitanError, component
from titancli.converters import LoRA
from titancli.engine.dry_run import local
from titancli.models.blocks.decoder import Decoder
from titancli.parallel.wrapped import is_wrapped
from titancli.protocols.samples import SamplingParams
from titancli.registry import current
from titancli.rl.decode import Row, decode

pytestmark = pytest.mark.ranks

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5]]
BUSY = Layout(activation_checkpoint={"mode": "selective"}, compile="eager", reshard="always")


def sample(model: Any, count: int = 3) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in range(count)]

    def keep(row: int, token: int) -> bool:
        made[row].append(token)
        return len(made[row]) < 4 + 2 * row

    rows = [Row(number % 2, number, 12) for number in range(count)]
    decode(model, PROMPTS, rows, SamplingParams(temperature=1.0), keep, device=torch.device("cpu"))
    return made


def trained(layout: Layout, sampled: bool) -> tuple[list[torch.Tensor], list[Any]]:
    engine = Engine.build(recipe(layout))
    made = []
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in engine.model.modules()]
    for step in range(3):
        if sampled:
            with engine.sampling() as model:
                # Ranks need not keep step: they sample different numbers of rows.
                made.append(sample(model, 2 + dist.get_rank()))
        engine.forward_backward(my_batches(engine, step))
        if sampled and step == 1:
            with engine.sampling() as model:  # between a backward and its step
                assert sample(model, 2) == sample(model, 2)
        engine.optim_step()
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in engine.model.modules()]
    return [local(p).clone() for _, p in engine.named_parameters()], made


def disturbed(layout: Layout) -> tuple[bool, list[Any]]:
    (plain, _), (others, made) = trained(layout, False), trained(layout, True)
    return all(map(torch.equal, plain, others)), made


def test_sampling_leaves_training_as_it_was_bit_for_bit(ranks: Any) -> None:
    busy = Layout(**{**vars(BUSY), "mesh": {"dp_shard": 2}})
    (same, here), (same_there, there) = ranks(2, disturbed, busy)
    assert same and same_there
    assert [made[:2] for made in there] == here, "both ranks have the same weights"
    assert all(len(made) == 3 for made in there)


def seen() -> tuple[int, int, bool]:
    """How many modules' outputs are seen in a forward of compiled blocks, and as they are written."""
    engine, found = Engine.build(recipe(Layout(compile="eager"))), []
    inside = [m for name, m in engine.parts[0].named_modules() if name.startswith("layers.0.")]
    for module in inside:
        module.register_forward_hook(lambda *_, module=module: found.append(module))
    [batch, *_] = my_batches(engine, 0)
    plain = engine.forward(batch)
    with engine.as_written():
        found.clear()
        same = torch.equal(engine.forward(batch), plain)
    count = len(found)
    assert is_wrapped(engine.parts[0].layers["0"])
    return count, len(inside), same


def test_hooks_of_modules_see_what_goes_through_blocks_as_they_are_written(ranks: Any) -> None:
    ((count, modules, same),) = ranks(1, seen)
    assert count == modules and same


def experts() -> tuple[bool, Any]:
    layout = Layout(config=EIGHT)
    return disturbed(layout)


def test_experts_count_no_tokens_that_were_sampled(ranks: Any) -> None:
    ((same, _),) = ranks(1, experts)
    assert same


def against_a_plain_model() -> tuple[Any, Any, list[str]]:
    engine = Engine.build(recipe(BUSY))
    plain = Decoder(recipe(BUSY).model)
    plain.load_state_dict({name: whole(p) for name, p in engine.named_parameters()})
    batch = my_batches(engine)[0]
    messages = []
    with engine.sampling() as model:
        hooks = [
            h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
        ]
        assert hooks == [], "they would gather and free parameters, out of step"
        made = sample(model)
        for verb in (
            lambda: engine.forward(batch),
            lambda: engine.forward_backward(batch),
            lambda: engine.model,
            lambda: engine.sampling().__enter__(),
            lambda: engine.sample([[1]]),
            lambda: dict(engine.weights()),
        ):
            try:
                verb()
            except TitanError as error:
                messages.append(str(error))
    try:
        with engine.sampling():
            raise RuntimeError("a generator fails")
    except RuntimeError:
        engine.forward_backward(batch)  # all is put back
    return made, sample(plain), messages


def test_it_is_the_model_itself(ranks: Any) -> None:
    ((made, expected, messages),) = ranks(1, against_a_plain_model)
    assert made == expected
    assert len(messages) == 6
    assert all("`with engine.sampling()`; leave that block first" in message for message in messages)


def refusals(meshes: list[dict[str, int]]) -> list[str]:
    found = []
    for mesh in meshes:
        config = EIGHT if "ep" in mesh else None
        engine = Engine.build(recipe(Layout(mesh, config=config)), frozen=True)
        try:
            with engine.sampling():
                found.append("no error")
        except TitanError as error:
            found.append(str(error))
    return found


def test_layouts_that_cannot_be_sampled_from_are_named(ranks: Any) -> None:
    meshes = [{"pp": 2}]
    for found in ranks(2, refusals, meshes):
        for mesh, message in zip(meshes, found, strict=True):
            name = list(mesh)[-1]
            assert f"a model under mesh.{name} = 2 cannot be sampled from" in message
            assert f"set mesh.{name} = 1" in message


@component("converter", "tilted", target="tests.engine.test_sampling:TiltedConverter")
class Tilted:
    """Puts a forward of its own on each block, and on a part of it."""


class TiltedConverter:
    def __init__(self, config: Tilted, **runtime: Any) -> None:
        pass

    def convert(self, model: Any) -> None:
        for block in model.layers.values():
            of_block, of_part = block.forward, block.feed_forward.forward
            block.forward = lambda x, *given, run=of_block, **more: run(x, *given, **more) * 1.5
            block.feed_forward.forward = lambda x, run=of_part: run(x) - x

    def after_step(self, model: Any) -> None:
        pass

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def of_blocks(model: Any) -> list[Any]:
    return [(vars(block).get("forward"), is_wrapped(block)) for block in model.layers.values()]


def sampled_and_trained(layout: Layout, base: Path) -> tuple[float, bool, bool]:
    """How far the logits that are sampled from are from those of training, and whether all that stood on
    blocks is back, also after something raised."""
    whole_recipe = recipe(layout)
    if any(isinstance(converter, LoRA) for converter in layout.converters):
        with Engine.build(replace(whole_recipe, converters=[])) as engine:
            engine.save(base)
        whole_recipe = replace(whole_recipe, weights=base)
    engine = Engine.build(whole_recipe)
    engine.forward_backward(my_batches(engine))
    engine.optim_step()
    before = of_blocks(engine.model)
    tokens = my_batches(engine)[0]["tokens"]
    trained = engine.forward({"tokens": tokens}, return_logits=True)
    with engine.sampling() as model:
        cache = model.new_cache()
        rows = [cache.begin() for _ in tokens]
        calls = [tokens[:, :5], *tokens[:, 5:].split(1, dim=1)]
        found = torch.stack([feed(model, cache, rows, list(call)) for call in calls], 1)
        plainly = not any(wrapped for _, wrapped in of_blocks(model))
    back = of_blocks(engine.model) == before
    with pytest.raises(RuntimeError, match="fails"), engine.sampling():
        raise RuntimeError("a generator fails")
    expected = trained[:, 4:]
    away = float((found - expected).norm() / expected.norm())
    return away, plainly, back and of_blocks(engine.model) == before


FORWARDS = {
    "plain": Layout(converters=[Tilted()]),
    "checkpointed and compiled": Layout(
        activation_checkpoint={"mode": "selective"}, compile="eager", converters=[Tilted()]
    ),
    "two ranks": Layout({"dp_shard": 2}, activation_checkpoint={"mode": "full"}, converters=[Tilted()]),
    "bfloat16": Layout(dtype="bfloat16", converters=[Tilted()]),
    "lora": Layout(converters=[LoRA(rank=4), Tilted()], activation_checkpoint={"mode": "full"}),
    "float8": Layout(converters=["float8_linear", Tilted()], activation_checkpoint={"mode": "full"}),
}
"""float8 with a scale for each row of its operands: with one for all of them what is computed depends on what
is computed together."""


@pytest.mark.parametrize("name", FORWARDS)
def test_what_a_converter_put_on_a_block_is_sampled_from(ranks: Any, tmp_path: Path, name: str) -> None:
    layout = FORWARDS[name]
    if "float8_linear" in layout.converters:
        float8 = current().find("converter", "float8_linear")(recipe="rowwise", skip=["output"])
        layout = replace(layout, converters=[float8, *layout.converters[1:]])
    for away, plainly, back in ranks(
        layout.mesh.get("dp_shard", 1), sampled_and_trained, layout, tmp_path / "base"
    ):
        assert away < {"bfloat16": 2e-2, "float8": 2e-2}.get(name, 1e-5)
        assert plainly and back
