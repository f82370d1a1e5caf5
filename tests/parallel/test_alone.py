"""One rank without FSDP2 does what it does with it: the same gradients, weights, names and samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import cross_entropy

from tests.engine import cases
from tests.engine.cases import Layout, small
from tests.engine.test_dry_run import EXPERTS
from tests.ranks import Ranks
from tests.rows import rows
from titancli.converters import LoRA
from titancli.distributed.local import local
from titancli.engine import Engine
from titancli.engine.dry_run import local as here
from titancli.engine.weights import Renewal
from titancli.models.blocks.decoder import Decoder as Model
from titancli.parallel import decoder
from titancli.parallel.unsharded import summed_in_float32, summed_over_ranks, whole_on_ranks
from titancli.recipe.schema import Recipe
from titancli.registry import current
from titancli.registry.component import build
from titancli.torch_version import older_than


@contextmanager
def fsdp2() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "gathers_its_own_way", lambda model: True)
        yield


def trained(recipe: Recipe, steps: int = 2) -> dict[str, torch.Tensor]:
    """Gradients, weights, log-probabilities of every step, by name."""
    found: dict[str, torch.Tensor] = {}
    with Engine.build(recipe) as engine:
        for step in range(steps):
            engine.forward_backward(cases.my_batches(engine, step))
            for name, p in engine.named_parameters():
                assert p.grad is None or p.grad.dtype == p.dtype == torch.float32
                found |= {f"{step} {name}.grad": cases.whole(p.grad)} if p.grad is not None else {}
            engine.optim_step()
            found[f"{step} log p"] = engine.forward(cases.whole_batch(step))
        found |= {name: cases.whole(tensor) for name, tensor in engine.save_state()[0].items()}
        assert any(isinstance(m, FSDPModule) for m in engine.model.modules()) == any(
            isinstance(p, DTensor) for _, p in engine.named_parameters()
        )
    return found


ROWS: dict[str, Layout] = {
    "fp32": small(),
    "bf16": small(dtype="bfloat16"),
    "bf16, recomputed": small(dtype="bfloat16", activation_checkpoint={"mode": "full"}),
    "bf16, products kept": small(
        dtype="bfloat16", activation_checkpoint={"mode": "selective", "selective_ac_option": "products"}
    ),
    "bf16, micro-batches": small(dtype="bfloat16", micro_batches=2, accumulate="unsharded"),
    "bf16, compiled": small(dtype="bfloat16", compile="aot_eager"),
    "bf16, compiled, recomputed": small(
        dtype="bfloat16", compile="aot_eager", activation_checkpoint={"mode": "selective"}
    ),
    "bf16, tied": small(dtype="bfloat16", tied=True),
    "bf16, experts": Layout(dtype="bfloat16", config=EXPERTS),
    "bf16, lora": small(dtype="bfloat16", converters=[LoRA()]),
}


def rounded_here(differ: Iterable[str]) -> bool:
    """Return whether the gradients that differ first are those that FSDP2 of torch 2.15 leaves in float32,
    as it was computed, where a cast rounds it to bfloat16: of norms, and of routers' gates."""
    first = [key for key in differ if key.startswith("0 ") and key.endswith(".grad")]
    computed_in_float32 = all("norm.weight" in key or "router.gate" in key for key in first)
    return bool(first) and computed_in_float32 and not older_than("2.15")


@pytest.mark.parametrize(
    "name", rows(ROWS, slow=["bf16, recomputed", "bf16, compiled", "bf16, compiled, recomputed"])
)
def test_it_computes_what_fsdp2_computes(name: str, tmp_path: Path) -> None:
    """Bitwise, but for `rounded_here`. A tied weight in bfloat16 alone is more exact: its two gradients are
    added up in float32."""
    recipe = cases.recipe(ROWS[name])
    if recipe.converters:
        with Engine.build(replace(recipe, converters=[])) as engine:
            engine.save(tmp_path / "step-1")
        recipe = replace(recipe, weights=tmp_path / "step-1")
    with fsdp2():
        expected = trained(recipe)
    found = trained(recipe)
    assert found.keys() == expected.keys()
    differ = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    if "tied" not in name and not rounded_here(differ):
        assert differ == []
        return
    for key, value in expected.items():
        if key.startswith("0 "):
            assert (found[key] - value).norm() < 0.005 * value.norm(), key


SHARED_BY_NONE: dict[str, Layout] = {
    "TP2": small({"tp": 2}),
    "TP2, bf16": small({"tp": 2}, dtype="bfloat16", micro_batches=2),
    "TP2, bf16, tied, compiled": small({"tp": 2}, dtype="bfloat16", tied=True, compile="aot_eager"),
    "EP2 of TP2, bf16": Layout({"tp": 2, "ep": 2}, dtype="bfloat16", config=EXPERTS),
    "PP2, bf16": small({"pp": 2}, dtype="bfloat16"),
    "PP2, bf16, recomputed, compiled": small(
        {"pp": 2}, dtype="bfloat16", compile="aot_eager", activation_checkpoint={"mode": "full"}
    ),
    "PP2xTP2, bf16, compiled": small({"pp": 2, "tp": 2}, dtype="bfloat16", compile="aot_eager"),
    "PP2xTP2, backward in two": Layout({"pp": 2, "tp": 2}, pipeline={"schedule": "ZBVZeroBubble"}),
}


def trained_on_a_rank(layout: Layout, sharded: bool) -> tuple[dict[str, Any], set[str]]:
    """What `trained` finds, of this rank, and the names of what tensor parallelism keeps whole on it."""
    found: dict[str, Any] = {}
    with fsdp2() if sharded else nullcontext(), Engine.build(cases.recipe(layout)) as engine:
        assert {isinstance(m, FSDPModule) for part in engine.parts for m in part.modules()} == (
            {True, False} if sharded else {False}
        )
        for step in range(2):
            engine.forward_backward(cases.my_batches(engine, step))
            if "pp" not in layout.mesh:  # there FSDP2 adds up a call's micro-batches before it adds the call
                engine.forward_backward(cases.my_batches(engine, step + 7))
            for name, p in engine.named_parameters():
                assert getattr(p.grad, "placements", ()) == getattr(p, "placements", ())
                found[f"{step} {name}.grad"] = here(p.grad).clone()
            found[f"{step} norm"] = engine.optim_step()["grad_norm"]
            found[f"{step} log p"] = engine.forward(cases.my_batches(engine)[0])
        found |= {name: here(tensor).clone() for name, tensor in engine.save_state()[0].items()}
        whole = {
            f"0 {n}.grad"
            for n, p in engine.named_parameters()
            if getattr(p, "placements", ())[-1:] == (Replicate(),)
        }
    return found, whole


def trained_both_ways(layout: Layout) -> tuple[Any, ...]:
    return *trained_on_a_rank(layout, sharded=True), *trained_on_a_rank(layout, sharded=False)


QUICK = ("TP2, bf16", "PP2, bf16")


@pytest.mark.parametrize("name", rows(SHARED_BY_NONE, slow=[*SHARED_BY_NONE.keys() - QUICK]))
def test_ranks_that_share_no_parameter_compute_what_fsdp2_computes(name: str, ranks: Ranks) -> None:
    """Bitwise, but for the gradients of what is whole on every rank: FSDP2 adds these up in bfloat16."""
    layout = SHARED_BY_NONE[name]
    world = layout.mesh.get("tp", 1) * layout.mesh.get("pp", 1)
    for expected, _, found, whole in ranks(world, trained_both_ways, layout):
        assert found.keys() == expected.keys()
        differ = {key for key, value in expected.items() if not torch.equal(found[key], value)}
        if layout.dtype == "bfloat16" and "tp" in layout.mesh:
            differ = {key for key in differ if key.endswith(".grad") and key.startswith("0 ")}
            for key in whole:
                assert (found[key] - expected[key]).norm() < 0.01 * expected[key].norm(), key
            whole |= {key for key in differ if layout.tied}
            differ -= whole
        if rounded_here(differ):
            differ = {
                key
                for key, value in expected.items()
                if key.startswith("0 ") and (found[key] - value).norm() > 0.01 * value.norm()
            }
        assert differ == set()


def summed() -> list[list[float]]:
    """The gradients of a weight that two ranks have whole, after one call, one that raises, and another."""
    model, rank = torch.nn.Linear(2, 1, bias=False), dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    model.weight = torch.nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Replicate()]))
    found = []
    for raises in (False, True, False):
        whole = whole_on_ranks([model])
        with pytest.raises(KeyError) if raises else nullcontext(), summed_over_ranks(whole):
            for _ in range(2):
                (local(model.weight) * (rank + 1)).sum().backward()
            if raises:
                raise KeyError
        assert model.weight.grad.placements == (Replicate(),)
        found += model.weight.grad.to_local().tolist()
    return found


def test_what_ranks_have_whole_is_summed_over_them_and_a_call_that_raises_leaves_the_sum_of_before(
    ranks: Ranks,
) -> None:
    assert ranks(2, summed) == [[[6, 6], [6, 6], [12, 12]]] * 2


def test_gradients_of_micro_batches_are_summed_in_float32_where_weights_are_not() -> None:
    """Bitwise what FSDP2 makes of them; a sum of eight in bfloat16 is rounded seven times."""
    recipe = cases.recipe(small(dtype="bfloat16", micro_batches=8, accumulate="unsharded"))
    recipe = replace(recipe, training=replace(recipe.training, dtype="bfloat16"))

    def gradients() -> dict[str, torch.Tensor]:
        with Engine.build(recipe) as engine:
            for step in range(2):  # the second adds to the first
                engine.forward_backward(cases.my_batches(engine, step))
            assert {p.grad.dtype for _, p in engine.named_parameters()} == {torch.bfloat16}
            return {name: cases.whole(p.grad) for name, p in engine.named_parameters()}

    with fsdp2():
        expected = gradients()
    found = gradients()
    differ = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    if rounded_here(f"0 {name}.grad" for name in differ):
        differ = [n for n in differ if (found[n] - expected[n]).norm() > 0.01 * expected[n].norm()]
    assert differ == []


def test_a_backward_that_raises_leaves_the_sum_of_before() -> None:
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    before = model.weight.grad
    with pytest.raises(KeyError), summed_in_float32(model) as add:
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        add()
        raise KeyError
    assert model.weight.grad is before and bool((before == 1).all())
    with summed_in_float32(model) as add:
        for _ in range(300):  # in bfloat16 the sum would stay at 256
            model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            add()
    assert model.weight.grad.tolist() == [[300] * 3]  # and the 1 of before, which is rounded away


def test_gradients_are_those_of_a_plain_loop() -> None:
    """In float32, of the model as anybody would run it."""
    recipe = cases.recipe(small())
    with Engine.build(recipe) as engine:
        plain = build(recipe.model, seq_len=cases.LENGTH)
        plain.load_state_dict({name: p.detach() for name, p in engine.named_parameters()})
        (batch,) = cases.my_batches(engine)
        logits = plain(batch["tokens"]).flatten(0, 1)
        cross_entropy(logits, batch["targets"].flatten(), reduction="sum").backward()
        engine.forward_backward(batch)
        for (name, p), (_, q) in zip(engine.named_parameters(), plain.named_parameters(), strict=True):
            assert not isinstance(p, DTensor) and p.is_leaf
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name


def test_sampling_casts_once() -> None:
    with Engine.build(cases.recipe(small(dtype="bfloat16"))) as engine:
        weight = engine.model.output._parameters["weight"]
        with engine.sampling() as model:
            assert model.output.weight is model.output.weight
            assert model.output.weight.dtype == torch.bfloat16
        assert engine.model.output.weight is not engine.model.output.weight
        assert dict(engine.named_parameters())["output.weight"] is weight and weight.dtype == torch.float32
        with pytest.raises(ZeroDivisionError), engine.sampling():
            raise ZeroDivisionError
        assert engine.model.output.casts is None


def test_what_fills_parameters_as_attributes_fills_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initial values of a plugin's model; what a converter makes of the weights after a step."""

    def init_weights(model: Any, generator_for: Any) -> None:
        for module in model.modules():
            for name, _ in module.named_parameters(recurse=False):
                torch.nn.init.constant_(getattr(module, name), 0.5)

    class Halves:
        def after_step(self, model: Any) -> None:
            model.output.weight.data.mul_(0.5)

    class Fails:
        def after_step(self, model: Any) -> None:
            raise ZeroDivisionError

    monkeypatch.setattr(Model, "init_weights", init_weights)
    with Engine.build(cases.recipe(small(dtype="bfloat16", tied=True))) as engine:
        weights = dict(engine.named_parameters())
        assert all(bool((p == 0.5).all()) for p in weights.values())
        Renewal(engine.parts, [Halves()]).weights_loaded()  # type: ignore[list-item]
        assert bool((weights["tok_embeddings.weight"] == 0.25).all())
        with pytest.raises(ZeroDivisionError):
            Renewal(engine.parts, [Fails()]).weights_loaded()  # type: ignore[list-item]
        assert engine.model.output.weight.dtype == torch.bfloat16  # casts again


def test_a_forward_that_raises_leaves_nothing() -> None:
    recipe = cases.recipe(small(dtype="bfloat16"))
    expected = trained(recipe, steps=1)
    with Engine.build(recipe) as engine:

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError

        hook = engine.model.layers["1"].register_forward_pre_hook(broken)
        with pytest.raises(ZeroDivisionError):
            engine.forward_backward(cases.my_batches(engine))
        hook.remove()
        engine.forward_backward(cases.my_batches(engine))
        for name, p in engine.named_parameters():
            assert torch.equal(p.grad, expected[f"0 {name}.grad"])


def test_what_needs_fsdp2_has_it() -> None:
    """Weights of a class that says how it is gathered."""
    (batch,) = [cases.whole_batch()]
    found = current().find("converter", "float8_linear")
    gather = found(recipe="tensorwise", emulate=True, enable_fsdp_float8_all_gather=True)
    layout = Layout(model={"dim": 64, "hidden_dim": 64}, converters=[gather], dtype="bfloat16")
    with Engine.build(cases.recipe(layout)) as engine:
        assert any(isinstance(module, FSDPModule) for module in engine.model.modules())
        engine.forward_backward(batch)
        engine.optim_step()
