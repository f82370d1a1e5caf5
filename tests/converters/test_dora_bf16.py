"""DoRA in bfloat16: magnitudes and norms stay in float32, so untouched adapters are their base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.converters.lora_cases import lora_recipe, save_base
from tests.engine.cases import my_batches, small, wholes
from tests.ranks import Ranks
from titancli import Batch, LossResult
from titancli.converters import LoRA
from titancli.distributed.local import local
from titancli.engine import Engine
from titancli.recipe.schema import Recipe

pytestmark = pytest.mark.ranks
DORA = LoRA(rank=4, alpha=6.0, dora=True, targets=["layers.*", "output"])
LAYOUTS: tuple[dict[str, int], ...] = ({}, {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2})


@pytest.fixture(scope="module")
def base(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dora") / "base"
    ranks(1, save_base, folder)
    return folder


def in_bf16(mesh: dict[str, int], base: Path, stored: str, lora: LoRA | None) -> Recipe:
    made = lora_recipe(replace(small(mesh), dtype="bfloat16"), base, lora)
    return replace(made, training=replace(made.training, dtype=stored))


def begun(mesh: dict[str, int], base: Path, stored: str) -> tuple[Tensor, Tensor]:
    """Log-probabilities with untouched adapters, and of the base alone."""
    found = []
    for lora in (DORA, None):
        with Engine.build(in_bf16(mesh, base, stored, lora)) as engine:
            [batch] = my_batches(engine)
            found.append(engine.forward(batch))
    return found[0], found[1]


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_untouched_dora_is_its_base(ranks: Ranks, base: Path, mesh: dict[str, int], stored: str) -> None:
    world = 1
    for degree in mesh.values():
        world *= degree
    for adapted, alone in ranks(world, begun, mesh, base, stored):
        assert torch.equal(adapted, alone), float((adapted - alone).abs().mean())


def moved(mesh: dict[str, int], base: Path, saved: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities after magnitudes have moved by less than bfloat16 can tell: as trained, and as
    loaded by an engine that does not train, and sampled from by a copy."""
    made = in_bf16(mesh, base, "float32", DORA)
    with Engine.build(made) as engine:
        [batch] = my_batches(engine)
        engine.forward_backward(batch)
        engine.optim_step(1e-3)
        engine.save(Path(saved))
        found = [engine.forward(batch)]
        magnitudes = wholes((n, p) for n, p in engine.named_parameters() if n.endswith("magnitude"))
    with Engine.build(made, frozen=True) as other:
        other.load(Path(saved))
        found.append(other.forward(batch))
    return found, magnitudes


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_magnitudes_are_current(ranks: Ranks, base: Path, tmp_path: Path, mesh: dict[str, int]) -> None:
    world = 1
    for degree in mesh.values():
        world *= degree
    for (trained, loaded), magnitudes in ranks(world, moved, mesh, base, str(tmp_path / "step-1")):
        assert torch.equal(trained, loaded)
        assert all(value.dtype == torch.float32 for value in magnitudes.values())
        assert any(not torch.equal(value, value.bfloat16().float()) for value in magnitudes.values())


def older(base: Path, saved: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Adapters of a checkpoint as older versions wrote it, all in bfloat16, and as a resume has them."""
    made = in_bf16({}, base, "bfloat16", DORA)
    with Engine.build(made) as engine:
        engine.forward_backward(my_batches(engine))
        engine.optim_step(1e-2)
        tensors, state = engine.save_state()
        rounded = {name: t.bfloat16() if t.dtype == torch.float32 else t for name, t in tensors.items()}
        engine.save_state = lambda: (rounded, state)  # type: ignore[method-assign]
        engine.save(Path(saved))
        before = {n: t.bfloat16() for n, t in wholes(engine.trained_parameters()).items()}
    with Engine.build(made) as engine:
        engine.load(Path(saved))
        engine.forward_backward(my_batches(engine))
        return before, wholes(engine.trained_parameters()), engine.step


def test_older_checkpoints_load(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    ((before, after, step),) = ranks(1, older, base, str(tmp_path / "step-1"))
    assert step == 1
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name].float()), name


def compiled(base: Path) -> float:
    """The largest difference that compiling makes to log-probabilities after a step."""
    found = []
    for backend in (None, "aot_eager"):
        made = in_bf16({"dp_shard": 2}, base, "float32", DORA)
        if backend is not None:
            made = replace(made, compile=replace(made.compile, enable=True, backend=backend))
        with Engine.build(made) as engine:
            [batch] = my_batches(engine)
            engine.forward_backward(batch)
            engine.optim_step(1e-2)
            found.append(engine.forward(batch))
    return float((found[0] - found[1]).abs().max())


def test_compiled_blocks_see_new_magnitudes(ranks: Ranks, base: Path) -> None:
    assert max(ranks(2, compiled, base)) < 2e-2


class Doubled:
    """A hook that computes gradients where magnitudes are twice as large, as optimizers may elsewhere."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.once_more = engine, False

    @contextmanager
    def around_backward(self, backward: Any) -> Iterator[None]:
        scaled(self.engine, 2.0)
        if self.once_more:
            backward.compute()
            backward.forget()
        yield
        scaled(self.engine, 0.5)


@torch.no_grad()
def scaled(engine: Engine, factor: float) -> None:
    for name, parameter in engine.named_parameters():
        if name.endswith("magnitude"):
            local(parameter).mul_(factor)


def elsewhere(mesh: dict[str, int], base: Path, once_more: bool) -> list[Tensor]:
    """Log-probabilities of passes with doubled magnitudes, what they are then, and with the usual ones."""
    with Engine.build(in_bf16(mesh, base, "float32", DORA)) as engine:
        seen: list[Tensor] = []
        [batch] = my_batches(engine)

        def loss(logprobs: Tensor, batch: Batch) -> LossResult:
            seen.append(logprobs.detach().clone())
            return LossResult(-logprobs.sum(), torch.tensor(1.0))

        usual = engine.forward(batch)
        hook = Doubled(engine)
        hook.once_more = once_more
        engine.hooks.add(hook)
        engine.forward_backward(batch, loss)
        after = engine.forward(batch)
        scaled(engine, 2.0)
        engine.hooks.weights_loaded()
        return [*seen, engine.forward(batch), after, usual]


@pytest.mark.parametrize("once_more", [False, True])
@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}], ids=str)
def test_magnitudes_follow_hooks(ranks: Ranks, base: Path, mesh: dict[str, int], once_more: bool) -> None:
    """Passes of a hook that moves the weights see them where they are, and later passes where they were."""
    for *seen, meant, after, usual in ranks(2 if mesh else 1, elsewhere, mesh, base, once_more):
        assert len(seen) == 1 + once_more and not torch.equal(meant, usual)
        assert torch.equal(after, usual)
        for one in seen:
            assert torch.equal(one, meant)
