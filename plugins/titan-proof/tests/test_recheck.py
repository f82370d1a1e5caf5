"""A step computed twice: nothing of it shows in a sound run; a rank that computes something else is named."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from tests.engine.cases import Layout, my_batches, recipe, small
from tests.engine.test_guard import bits
from tests.parallel.dropout_cases import Dropping
from tests.ranks.layouts import EIGHT
from tests.rows import rows
from titan_proof import Recheck
from titan_proof.recheck import (
    COMPUTED,
    RECEIVED,
    REDUCED,
    SAME,
    checksum,
    refuse_unreproducible,
    suspects,
)
from titancli.engine import Engine
from titancli.errors import RecipeError, TitanError
from titancli.models.blocks.moe import moe_layers
from titancli.observe.metrics import collector
from titancli.registry.component import build

pytestmark = pytest.mark.ranks
BALANCED = dataclasses.replace(EIGHT, moe=dataclasses.replace(EIGHT.moe, aux_loss_coeff=1e-2))


def engine_of(layout: Layout, every: int) -> Engine:
    engine = Engine.build(recipe(layout))
    if every:
        engine.hooks.add(build(Recheck(every=every), engine=engine, run=None))
    return engine


def _trained(layout: Layout, every: int, steps: int = 3) -> Any:
    """Weights, optimizer state, metrics and what was reported of a few steps; one of two calls among them,
    where routers have no losses."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    random.seed(1)
    engine = engine_of(layout, every)
    told: list[Any] = []
    collector.drain()
    for number in range(steps):
        for _ in range(2 if number == 1 and not engine.runner.router_losses else 1):
            metrics = engine.forward_backward(my_batches(engine, number))
        layers = [layer for part in engine.parts for layer in moe_layers(part).values()]
        told.append([layer.token_counts().tolist() for layer in layers])
        metrics |= engine.optim_step()
        told.append({name: float(value) for name, value in metrics.items()})
    told.append({name: float(reading.value) for name, reading in collector.drain().items()})
    told.append({"torch": float(torch.rand(())), "python": random.random()})
    told += [layer.expert_bias.tolist() for layer in layers]
    found = bits(engine)
    engine.close()
    return found, told


def _same(layout: Layout) -> bool:
    return bool(_trained(layout, 0) == _trained(layout, 1) == _trained(layout, 2))


SOUND: dict[str, tuple[int, Layout]] = {
    "dropout": (1, small(converters=[Dropping()], micro_batches=2)),
    "dropout, recomputed": (
        1,
        small(converters=[Dropping()], tied=True, activation_checkpoint={"mode": "full"}),
    ),
    "recomputed by op": (1, small(activation_checkpoint={"mode": "selective"})),
    "bfloat16, accumulated": (1, small(micro_batches=2, accumulate="unsharded", dtype="bfloat16")),
    "tied": (1, small(tied=True)),
    "experts": (1, Layout(config=BALANCED, micro_batches=2)),
    "compiled": (1, small(compile="eager", activation_checkpoint={"mode": "selective"})),
    "FSDP2": (2, small({"dp_shard": 2}, micro_batches=2, accumulate="unsharded")),
    "replicas": (2, small({"dp_replicate": 2}, micro_batches=2)),
    "TP, compiled": (2, small({"tp": 2}, compile="aot_eager")),
    "CP": (2, small({"cp": 2})),
    "EP": (2, Layout({"dp_shard": 2, "ep": 2}, config=BALANCED)),
    "PP": (2, small({"pp": 2}, pipeline={"microbatch_size": 2})),
}


SLOW = ("TP, compiled", "replicas", "FSDP2", "CP", "recomputed by op", "experts", "dropout", "tied")
# EP has experts, replicas and shards as well, and "dropout, recomputed" has dropout and tied weights


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in SOUND]
)
def test_a_run_with_rechecks_is_bitwise_one_without(ranks: Any, case: str) -> None:
    count, layout = SOUND[case]
    assert ranks(count, _same, layout) == [True] * count


# ----------------------------------------------------------------------------------------- injected flips


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same with one bit of one number flipped, the smallest of its mantissa."""
    changed = tensor.clone()
    local = changed.view(-1)
    local[-1:].view(torch.int32).bitwise_xor_(1)
    return changed


def _plant(engine: Engine, where: str, what: str, call: int) -> None:
    """Flip a bit at one call of a module: of what it returns, or of its weight's or its output's gradient."""
    calls = 0
    [module] = [m for part in engine.parts for name, m in part.named_modules() if name == where] or [None]
    if module is None:
        return

    handles: list[Any] = []

    def once(gradient: torch.Tensor) -> torch.Tensor:
        handles.pop().remove()
        if hasattr(gradient, "to_local"):  # of a DTensor: adding to one number is as good as a flip
            return gradient + torch.zeros_like(gradient).fill_(1e-4)
        return flipped(gradient)

    def after(module: Any, args: Any, out: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return None
        if what == "output":
            return out + (flipped(out) - out).detach()
        if what == "gradient":
            out.register_hook(flipped)
        else:
            handles.append(module.weight.register_hook(once))
        return None

    module.register_forward_hook(after)


def _found(layout: Layout, rank: int, where: str, what: str, call: int, every: int) -> list[Any]:
    engine = engine_of(layout, every)
    if torch.distributed.get_rank() == rank:
        _plant(engine, where, what, call)
    for number in range(4):
        before = bits(engine)
        try:
            engine.forward_backward(my_batches(engine, number))
        except TitanError as error:
            unchanged = before == bits(engine)
            engine.forward_backward(my_batches(engine, number))  # the fault is over: it goes on
            engine.optim_step()
            return [str(error), unchanged, engine.step]
        engine.optim_step()
    return ["nothing was found", None, engine.step]


W2 = "layers.1.feed_forward.w2"
FLIPS: dict[str, tuple[int, Layout, int, str, str, str]] = {
    "alone": (1, small(), 0, W2, "output", f"the output of {W2}"),
    "FSDP2, forward": (2, small({"dp_shard": 2}), 1, W2, "output", f"the output of {W2}"),
    "FSDP2, backward": (
        *(2, small({"dp_shard": 2}), 0, W2, "gradient"),
        f"the gradient of the output of {W2}",
    ),
    "FSDP2, weight": (2, small({"dp_shard": 2}), 1, W2, "weight", f"the gradient of {W2}.weight"),
    "replicas": (
        2,
        small({"dp_replicate": 2}),
        1,
        "tok_embeddings",
        "output",
        "the output of tok_embeddings",
    ),
    "TP, forward": (2, small({"tp": 2}), 1, W2, "output", f"the output of {W2}"),
    "TP, weight": (2, small({"tp": 2}), 0, W2, "weight", f"the gradient of {W2}.weight"),
    "PP, first stage": (
        *(2, small({"pp": 2}, pipeline={"microbatch_size": 4}), 0, "layers.0.attention.wq", "output"),
        "the output of layers.0.attention.wq",
    ),
    "PP, last stage": (
        *(2, small({"pp": 2}, pipeline={"microbatch_size": 4}), 1, W2, "output"),
        f"the output of {W2}",
    ),
}


@pytest.mark.parametrize("case", rows(FLIPS, slow=["FSDP2, forward", "TP, forward", "PP, first stage"]))
def test_a_flipped_bit_is_found_and_its_rank_named(ranks: Any, case: str) -> None:
    count, layout, rank, where, what, name = FLIPS[case]
    per_pass = 2 if "pp" in layout.mesh else 1
    # Steps 2 and 4 are computed twice: the calls of step 2 come after those of step 1.
    told = ranks(count, _found, layout, rank, where, what, per_pass + 1, 2)
    for message, unchanged, steps in told:
        assert message.startswith(f"step 2 was computed twice from the same state, and rank {rank} (host ")
        assert f"computed different numbers; the first that differs is {name}" in message, message
        assert unchanged and steps == 2


def _raising(call: int) -> list[Any]:
    """Return whether the step after an error in one of the two passes is the usual one."""
    found = []
    for fault in (True, False):
        engine = engine_of(small(), 1)
        calls = 0

        def broken(module: Any, args: Any, out: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == call:
                raise ValueError("in the middle")

        if fault:
            handle = engine.model.layers["1"].feed_forward.register_forward_hook(broken)
            with pytest.raises(ValueError, match="in the middle"):
                engine.forward_backward(my_batches(engine))
            handle.remove()
            assert engine.status["accumulated"] == 0
            own = [m for m in engine.model.modules() if type(m).__module__.startswith("torch.nn")]
            assert own and not any(
                m._forward_hooks or m._forward_pre_hooks
                for m in own
                if len(m._modules) == 0 and not hasattr(m, "_get_fsdp_state")
            )
        engine.forward_backward(my_batches(engine))
        engine.optim_step()
        found.append(bits(engine))
    return [found[0] == found[1]]


@pytest.mark.parametrize("call", [1, 2])
def test_an_error_in_either_pass_leaves_nothing_behind(ranks: Any, call: int) -> None:
    assert ranks(1, _raising, call) == [[True]]


def test_the_rank_whose_difference_comes_first_is_the_one() -> None:
    assert suspects([[COMPUTED, 9, 0], [COMPUTED, 7, 0], [SAME, 0, 0]]) == [1]
    assert suspects([[COMPUTED, 7, 0], [COMPUTED, 7, 0]]) == [0, 1]  # cannot be told apart
    assert suspects([[RECEIVED, 3, 0], [COMPUTED, 40, 1]]) == [1]
    assert suspects([[COMPUTED, 8, 0], [COMPUTED, 5, 1], [COMPUTED, 9, 0]]) == [0, 1]  # two stages
    assert suspects([[SAME, 0, 0], [REDUCED, 0, 0]]) == [1]
    assert suspects([[RECEIVED, 0, 1], [SAME, 0, 0]]) == [0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64]
)
def test_a_checksum_tells_every_bit_and_place(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(4, 6).to(dtype)
    own = int(checksum(values))
    raw = (
        values.view(torch.uint8) if not values.is_complex() else torch.view_as_real(values).view(torch.uint8)
    )
    flat = raw.reshape(-1)
    for bit in range(0, flat.numel() * 8, 7):
        changed = flat.clone()
        changed[bit // 8] ^= 1 << bit % 8
        assert int(checksum(changed.view(values.real.dtype).reshape(4, -1))) != own
    assert int(checksum(values.flip(0))) != own and int(checksum(values.t().contiguous())) != own
    assert int(checksum(values.t())) == int(checksum(values.t().contiguous()))
    assert int(checksum(values[:0])) == 0 and int(checksum(values[0, 1])) == int(
        checksum(values[0, 1].clone())
    )


def test_a_gpu_that_is_not_deterministic_is_refused() -> None:
    refuse_unreproducible(torch.device("cpu"), deterministic=False)
    with pytest.raises(RecipeError, match=r"recheck needs debug.deterministic = true on a cuda device"):
        refuse_unreproducible(torch.device("cuda", 0), deterministic=False)
    refuse_unreproducible(torch.device("cuda", 0), deterministic=True)
