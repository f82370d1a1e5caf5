"""What runs again in backward draws the random numbers that it drew in forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine import cases
from tests.engine.cases import MODEL, Layout, small
from tests.parallel.dropout_cases import RECOMPUTATION, Dropping, DroppingConverter, differences
from tests.parallel.test_expert import EIGHT
from titancli.engine import Engine
from titancli.engine.dry_run import dry_run, traffic_of
from titancli.errors import RecipeError
from titancli.models import Llama3
from titancli.models.blocks.decoder import build
from titancli.parallel.activation_checkpoint import draws
from titancli.parallel.compile import compile_model
from titancli.recipe.schema import ActivationCheckpoint, Compile

LAYOUTS: dict[str, tuple[int, Layout]] = {
    "one rank": (1, Layout(micro_batches=2)),
    "compiled": (1, Layout(compile="aot_eager", model={"n_layers": 2})),
    "FSDP2": (2, Layout(mesh={"dp_shard": 2}, micro_batches=2)),
    "tensor parallel": (2, Layout(mesh={"tp": 2}, converters=[Dropping(linears=False)])),
    "context parallel": (2, Layout(mesh={"cp": 2})),
    "a pipeline": (2, Layout(mesh={"pp": 2}, pipeline={"schedule": "1F1B"})),
    "experts": (2, Layout(mesh={"dp_shard": 2, "ep": 2}, config=EIGHT)),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_dropout_gives_the_same_gradients_with_and_without_recomputation(ranks: Any, name: str) -> None:
    world, layout = LAYOUTS[name]
    for found in ranks(world, differences, layout, RECOMPUTATION):
        assert found == {str(way): [] for way in RECOMPUTATION}


def test_dropout_under_a_memory_budget_is_refused_by_name() -> None:
    torch._dynamo.reset()
    model = build(Llama3(**MODEL), seq_len=16)
    model.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
    section = ActivationCheckpoint(mode="memory_budget", memory_budget=0.5)
    DroppingConverter(Dropping()).convert(model)
    compile_model(
        model, Compile(enable=True, backend="aot_eager_decomp_partition"), section, torch.device("cpu")
    )
    with pytest.raises(RecipeError, match=r"memory_budget.*uses random numbers"):
        model(torch.zeros(1, 16, dtype=torch.int64))


def test_attention_is_kept_where_it_drops_nothing() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert not draws(flash, (1, 2, 3), {}) and not draws(flash, (1, 2, 3, 0.0, True), {})
    assert draws(flash, (1, 2, 3, 0.1), {}) and draws(flash, (1, 2, 3), {"dropout_p": 0.1})
    assert draws(torch.ops.aten.native_dropout.default, (1, 0.5, True), {})
    assert not draws(torch.ops.aten.mm.default, (1, 2), {})


def test_what_is_made_again_and_what_is_kept() -> None:
    """In bytes of a step: with "products" no product and no attention is computed twice, and less is kept."""
    modes = {mode: {"mode": mode} for mode in ("none", "full")}
    modes |= {o: {"mode": "selective", "selective_ac_option": o} for o in ("op", "products")}
    recipes = {
        name: cases.recipe(small(activation_checkpoint=mode), seq_len=128) for name, mode in modes.items()
    }
    moved = {name: traffic_of(recipe)["forward_backward"].moved for name, recipe in recipes.items()}
    peaks = {name: dry_run(recipe, 1).ranks[0].peak_bytes for name, recipe in recipes.items()}
    products = {name: of["products"] for name, of in moved.items()}
    assert products["none"] == products["products"] < products["op"] < products["full"]
    assert moved["none"]["attention"] == moved["products"]["attention"] < moved["full"]["attention"]
    assert moved["none"]["elementwise"] < moved["products"]["elementwise"]
    assert peaks["none"] > peaks["products"] > peaks["op"] > peaks["full"]


def test_products_that_are_kept_in_compiled_blocks() -> None:
    torch._dynamo.reset()
    found = []
    for options in ({"mode": "none"}, {"mode": "selective", "selective_ac_option": "products"}):
        layout = Layout(compile="aot_eager", activation_checkpoint=options, model={"n_layers": 1})
        with Engine.build(cases.recipe(layout)) as engine:
            engine.forward_backward(cases.my_batches(engine))
            found.append([p.grad for _, p in engine.named_parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
