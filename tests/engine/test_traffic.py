"""A step waits for nothing, and moves no more than it has to: every recipe, optimizer, converter and loss."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.engine import cases
from tests.engine.cases import Layout, small
from tests.engine.traffic import FILE, RECIPES, measured
from tests.rows import rows
from titancli.converters import LoRA
from titancli.engine.dry_run import traffic_of
from titancli.optimizers import AdamW
from titancli.optimizers.adamw import MixedAdamW
from titancli.planning.traffic import Traffic, kind_of
from titancli.recipe.schema import Recipe
from titancli.registry import current
from titancli.registry.fields import fields_of

FAMILIES = (
    *("llama3_debug", "gpt_oss_debug", "deepseek_v3_debug", "llama4_debug", "qwen3_moe_debug"),
    *("grpo_digit", "dpo_debug"),
)
"""Every block, loop and loss of the others is in one of these."""
NO_ROWS = {
    "titan-flux/flow_matching": "a dry run has rows of tokens, no images",
    "titan-heads/classification": "a dry run has no labels",
    "titan-heads/embedding": "a dry run has no pairs of texts",
}


def every(kind: str) -> dict[str, Any]:
    """Each component that is registered, with its default values, and with each other choice of a field."""
    found = {}
    for name, config in current().components(kind):
        if name in NO_ROWS:
            continue
        plain = found[name] = config()
        for field in fields_of(config).values():
            either = [True, False] if bool in field.type.alternatives else []
            for choice in [*field.type.choices, *either]:
                if choice != field.default:
                    found[f"{name} {field.name}={choice}"] = replace(plain, **{field.name: choice})
    return {name: config for name, config in sorted(found.items()) if not refused(config)}


def refused(config: Any) -> bool:
    return any(config.check(replace(cases.recipe(small()), weights="unread")))


OPTIMIZERS, CONVERTERS, LOSSES = every("optimizer"), every("converter"), every("loss")
CONVERTERS = {  # others insist on a GPU
    name: config
    for name, config in CONVERTERS.items()
    if "emulate=False" not in name or "float8_linear" in name
}
SLOW = {
    name for name in (*OPTIMIZERS, *CONVERTERS) if name.startswith("titan-muon/muon ") or "emulate=" in name
}
TORCHS = [f"titan/adamw implementation={kind}" for kind in ("for-loop", "foreach")]
"""Those of torch that cannot skip a step on the device."""


@cache
def of_optimizer(name: str) -> dict[str, Traffic]:
    return traffic_of(replace(cases.recipe(small()), optimizer=OPTIMIZERS[name]))


def waits(recipe: Recipe) -> list[str]:
    return [place for traffic in traffic_of(recipe).values() for place in traffic.waits]


@pytest.mark.parametrize("name", rows(RECIPES, slow={*RECIPES} - {*FAMILIES}))
def test_a_step_of_a_bundled_recipe(name: str) -> None:
    """It moves what tests/engine/traffic.json says: one more pass over gradients or logits makes it fail.
    Less is to be written there, by `python -m tests.engine.traffic`."""
    found, budget = measured(name), json.loads(FILE.read_text())[name]
    assert found["waits"] == []
    for verb, kinds in budget.items():
        assert found["moved"][verb] == pytest.approx(kinds, rel=0.01, abs=0.001), verb


def test_every_bundled_recipe_has_a_budget() -> None:
    """`python -m tests.engine.traffic` writes them."""
    assert sorted(json.loads(FILE.read_text())) == RECIPES


@pytest.mark.parametrize("name", rows(OPTIMIZERS, slow=SLOW & {*OPTIMIZERS}))
def test_no_optimizer_waits(name: str) -> None:
    found = [place for traffic in of_optimizer(name).values() for place in traffic.waits]
    if name in TORCHS:
        assert found and all("step_with" in place for place in found)
    else:
        assert found == []


def test_an_optimizer_that_reads_its_own_count_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the device, but for torch's own that are not fused."""
    begin = MixedAdamW._begin

    def reading(self: Any, parameter: Any) -> None:
        begin(self, parameter)
        self.state[parameter]["step"].item()

    monkeypatch.setattr(MixedAdamW, "_begin", reading)
    assert waits(replace(cases.recipe(small()), optimizer=AdamW(state_dtype="bfloat16")))


@pytest.mark.parametrize("name", rows(CONVERTERS, slow=SLOW & {*CONVERTERS}))
def test_no_converter_waits(name: str) -> None:
    adapters = isinstance(CONVERTERS[name], LoRA)
    layout = small(converters=[CONVERTERS[name]])
    layout.model["dim"] = 64  # rows of whole blocks of numbers in 4 bits
    recipe = replace(cases.recipe(layout), weights="unread" if adapters else None)
    if name.startswith("titan-qlora/"):
        from titan_qlora import nf4

        nf4.quantise_scales(nf4.quantise(torch.ones(64, 64))[1])  # its tables are made as the base is loaded
    assert waits(recipe) == []


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_waits(name: str) -> None:
    assert waits(cases.recipe(small(loss=LOSSES[name]))) == []


# ---------------------------------------------------------------------------------------------- the counter


def test_what_is_counted() -> None:
    a, b = torch.ones(256), torch.ones(256)
    with Traffic(set()) as traffic:
        a.view(16, 16).t()  # nothing is touched
        torch.empty(1000)
        a + b
        a.copy_(b)
        a.expand(100, 256).sum()
        (a.view(16, 16) @ b.view(16, 16)).add_(1.0)
    assert traffic.moved == {"elementwise": 3 * 1024 + 1024 + 4 + 2 * 1024, "copies": 2048, "products": 3072}
    assert traffic.waits == {}


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0, 2.0]),
    ],
)
def test_what_waits(read: Any) -> None:
    x = torch.ones(4)
    with Traffic(set()) as traffic:
        read(x)
    assert [place for place in traffic.waits if "test_traffic.py" in place]


def test_what_is_on_the_host_is_read_at_once() -> None:
    x = torch.ones(())
    with Traffic({id(x)}) as traffic:
        x.item(), torch.ones(4)[torch.tensor(2)[None]]
    assert list(traffic.waits) == [place for place in traffic.waits if "lift_fresh" in place]


def test_an_extra_pass_over_the_gradients_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from titancli.engine import training

    recipe = cases.recipe(Layout())
    before = traffic_of(recipe)["optim_step"].moved.total()
    plain = training.norm_and_scale

    def twice(parameters: list[Any], *rest: Any) -> Any:
        torch._foreach_mul_([p.grad for p in parameters], 1.0)
        return plain(parameters, *rest)

    monkeypatch.setattr(training, "norm_and_scale", twice)
    assert traffic_of(recipe)["optim_step"].moved.total() > 1.05 * before


def test_an_optimizer_divides_and_clips_gradients_itself() -> None:
    """Else it is a pass over all of them: 8 bytes for each number."""
    moved = {name: of_optimizer(name)["optim_step"].ops for name in {*OPTIMIZERS} - SLOW}
    assert {name for name, ops in moved.items() if "_foreach_div_" in ops} == {*TORCHS}


def test_kinds() -> None:
    ops = torch.ops.aten
    assert kind_of(ops.addmm.default) == "products"
    assert kind_of(ops._scaled_dot_product_flash_attention_for_cpu.default) == "attention"
    assert kind_of(ops._to_copy.default) == "copies"
    assert kind_of(ops.add.Tensor) == "elementwise"
