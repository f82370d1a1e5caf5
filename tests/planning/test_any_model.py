"""Any model is planned: a plugin's, one with adapters; and what cannot be is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.planning.measure import planned, recipe
from titancli.engine.dry_run import dry_run
from titancli.errors import RecipeError, TitanError
from titancli.models.blocks.attention import Attention
from titancli.observe.peaks import DEVICES
from titancli.planning import out_of_memory
from titancli.planning.blueprint import Blueprint
from titancli.planning.trace import Trace
from titancli.recipe import load_recipe

BF16 = "training.mixed_precision_param=bfloat16"
FULL = "activation_checkpoint.mode=full"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_model_of_transformers(world: int, mode: str) -> None:
    pytest.importorskip("titan_transformers")
    found = load_recipe("hf_causal_lm_debug", [f"activation_checkpoint.mode={mode}", BF16]).recipe
    (real,) = dry_run(found, world).ranks
    computed = planned(found, world).worst
    assert computed.total == pytest.approx(real.peak_bytes, rel=0.03)
    assert computed.parameters == real.parameters


@pytest.mark.parametrize("world", [1, 4])
def test_adapters_have_gradients_and_state_and_what_they_adapt_has_none(world: int) -> None:
    lora = ('converters=[{type="lora", rank=8}]', "weights=base")
    # More than a few layers: of all but the first the input has a gradient too.
    sizes = (BF16, "training.seq_len=64", "model.n_layers=8")
    found = recipe(*lora, *sizes)
    (real,) = dry_run(found, world).ranks
    computed = planned(found, world).worst
    assert computed.parameters == real.parameters
    assert computed.total == pytest.approx(real.peak_bytes, rel=0.03)
    assert computed.total < 0.8 * planned(recipe(*sizes), world).worst.total


class Odd(nn.Module):
    """A block that no table knows: a convolution over the row, and a wide square of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(dim, dim, 5, padding=4, groups=dim)
        self.up, self.down = nn.Linear(dim, 8 * dim), nn.Linear(8 * dim, dim)
        self.attention = Nothing()

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        mixed = self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.down(self.up(mixed).square())


class Nothing(nn.Module):
    angles = None
    reach = None


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Put blocks of another kind in the place of some of a model's."""
    from titancli.models.blocks import decoder

    build = decoder.build

    def made(config: Any, *, seq_len: int) -> Any:
        model = build(config, seq_len=seq_len)
        with torch.device("meta"):
            model.layers["1"] = Odd(config.dim)
        model.tensor_plan = {**model.tensor_plan, "layers.*": "replicate"}
        return model

    monkeypatch.setattr(decoder, "build", made)
    return made


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("overrides", [(), (FULL,)])
def test_a_block_that_nobody_has_described(odd: Any, world: int, overrides: tuple[str, ...]) -> None:
    found = recipe(BF16, *overrides, "training.seq_len=256")
    (real,) = dry_run(found, world).ranks
    computed = planned(found, world).worst
    assert computed.total == pytest.approx(real.peak_bytes, rel=0.03)
    assert computed.parameters == real.parameters


def test_blocks_of_a_kind_are_measured_once() -> None:
    kinds = Blueprint(recipe("model.n_layers=6"), DEVICES["cpu"]).kinds
    assert kinds == [0] * 6
    windows = Blueprint(load_recipe("gpt_oss_debug", ["model.n_layers=4"]).recipe, DEVICES["cpu"]).kinds
    assert windows == [0, 1, 0, 1]
    first_dense = Blueprint(load_recipe("deepseek_v3_debug").recipe, DEVICES["cpu"]).kinds
    assert first_dense[0] == 0 and set(first_dense[1:]) == {1}


def test_a_model_whose_step_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Tensor:
        raise ValueError("heads are missing")

    monkeypatch.setattr(Attention, "forward", fails)
    with pytest.raises(RecipeError, match=r"rank 0 of 2: a step failed: ValueError: heads are missing"):
        planned(recipe(), 2)
    # A run that is out of memory has its own error to tell.
    found = recipe()
    assert out_of_memory.advice(found, found.degrees(2), "NVIDIA H100") is None
    assert out_of_memory.memory_report(found, found.degrees(2), "NVIDIA H100", {}) == ""


def test_what_failed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a mode of torch nor a device that meta stands for: the next plan is as if it were the first."""
    before = planned(recipe(), 1).worst.total
    with monkeypatch.context() as patch:
        patch.setattr(Trace, "number", _raising)
        with pytest.raises(TitanError):
            planned(recipe(), 1)
    assert torch.zeros(2).sum().item() == 0
    assert planned(recipe(), 1).worst.total == before


def _raising(*args: Any) -> int:
    raise OSError("in the middle")


def test_a_model_of_something_else_is_not_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titancli.models.blocks import decoder
    from titancli.observe.peaks import DEVICES
    from titancli.planning.estimate import as_data, estimate

    monkeypatch.setattr(decoder.Decoder, "inputs", ("pixels",))
    found = recipe()
    degrees, device = found.degrees(1), DEVICES["H100"]
    assert estimate(found, degrees, device) is None
    (note,) = as_data(found, degrees, device, None)["notes"]
    assert (
        note == "the model llama3 does not take rows of tokens: memory, traffic and speed are not estimated"
    )


@pytest.fixture(autouse=True)
def _gradients_stay() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()
