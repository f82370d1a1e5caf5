"""Optimizers compared to torch's and torchao's; on shards as on whole matrices; saved and resharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optimizer_cases
import pytest
import torch
from torch import Tensor, nn

from tests.engine.cases import Layout, small
from tests.programs import INDUCTOR
from titan_muon import Muon
from titan_optimizers import Adafactor, AdamW8bit, ByName, Group, Lion, ScheduleFree
from titan_optimizers.eight_bit import _nearest, block_of, numbers, values_of
from titan_testing import check_plugin, run_cli
from titancli import TitanError
from titancli.models import Qwen3
from titancli.models.sections import MoE
from titancli.optimizers import AdamW
from titancli.registry.component import build

SHAPES = [(64, 96), (7,), (3, 16, 8), (16, 4096)]
WIDE: dict[str, Any] = {"dim": 64, "hidden_dim": 128, "n_layers": 2}
LOW: dict[str, Any] = {
    "dim": 2048,
    "hidden_dim": 3,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 2,
    "n_layers": 1,
    "vocab_size": 64,
}
"""Matrices of 2 and 3 rows, which 4 ranks share: the last have none."""


def parameters(shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def named(values: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{number}", value) for number, value in enumerate(values)]


def stepped(optimizer: torch.optim.Optimizer, values: list[nn.Parameter], steps: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for value in values:
            value.grad = torch.randn(value.shape, generator=generator)
        optimizer.step()
    return [value.detach() for value in values]


def ours(config: Any, values: list[nn.Parameter]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = build(
        config, named_parameters=named(values), roles={name: "other" for name, _ in named(values)}
    )
    return made


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def test_the_plugin_is_sound() -> None:
    check_plugin(
        "titan-optimizers", configs={"optimizer/by_name": {"groups": [{"match": ["*"], "lr_factor": 0.5}]}}
    )


def test_adafactor_steps_as_torch_does() -> None:
    theirs, mine = parameters(), parameters()
    expected = stepped(torch.optim.Adafactor(theirs, lr=1e-2, weight_decay=0.1, d=1.0), theirs)
    found = stepped(ours(Adafactor(weight_decay=0.1), mine), mine)
    assert distance(found, expected) < 1e-7


def test_lion_steps_as_its_paper_says() -> None:
    values = parameters()
    found = stepped(ours(Lion(lr=1e-2, weight_decay=0.5), values), values)
    expected = [value.detach().double() for value in parameters()]
    momenta = [torch.zeros_like(value) for value in expected]
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for value, momentum in zip(expected, momenta, strict=True):
            gradient = torch.randn(value.shape, generator=generator).double()
            update = torch.sign(0.9 * momentum + 0.1 * gradient)
            value -= 1e-2 * (update + 0.5 * value)
            momentum.mul_(0.99).add_(gradient, alpha=0.01)
    assert distance([value.double() for value in found], expected) < 1e-6


@INDUCTOR  # torchao compiles its step
def test_eight_bits_step_as_torchao_does() -> None:
    from torchao.optim import AdamW8bit as Theirs

    shapes: list[tuple[int, ...]] = [(16, 4096), (7,)]
    theirs, mine, whole = parameters(shapes), parameters(shapes), parameters(shapes)
    rates: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    expected = stepped(Theirs(theirs, **rates), theirs)
    found = stepped(ours(AdamW8bit(lr=1e-2), mine), mine)
    exact = stepped(torch.optim.AdamW(whole, **rates), whole)
    assert distance(found, expected) < 1e-5  # a few of 65,536 values fall to the neighbouring code
    assert 1e-4 < distance(found, exact) < 1e-3


def test_codes_are_those_of_torchao() -> None:
    from torchao.optim.quant_utils import create_dynamic_map

    for signed in (True, False):
        assert numbers(signed) == pytest.approx(create_dynamic_map(signed), rel=1e-6, abs=1e-12)


def test_a_value_gets_the_nearest_code() -> None:
    x = torch.cat((torch.linspace(-1, 1, 4001), torch.tensor([-1.0, 0.0, 1.0, 1e-9])))
    for signed in (True, False):
        values = values_of(signed, torch.device("cpu"))
        own = x if signed else x.abs()
        nearest = (own[:, None] - values).abs().min(1).values
        torch.testing.assert_close((values[_nearest(own, values).int()] - own).abs(), nearest)
        assert torch.equal(_nearest(values, values).int(), torch.arange(256, dtype=torch.int32))


def test_blocks_lie_in_rows() -> None:
    assert block_of((4096, 4096)) == 256
    assert block_of((4096, 14336)) == 128
    assert block_of((64, 64)) == 32
    assert [block_of(shape) for shape in ((4096,), (8, 8), (4096, 33))] == [None] * 3


EXPERTS = Qwen3(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    vocab_size=64,
    moe=MoE(num_experts=4, top_k=2, hidden_dim=32, load_balance_coeff=None),
)
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "FSDP2": (2, Layout({"dp_shard": 2}, model=WIDE)),
    "TP2": (2, Layout({"tp": 2}, model=WIDE)),
    "FSDP2xTP2": (4, Layout({"dp_shard": 2, "tp": 2}, model=WIDE)),
    "FSDP4, few rows": (4, Layout({"dp_shard": 4}, model=LOW)),
    "DDP2": (2, Layout({"dp_replicate": 2}, model=WIDE)),
    "PP2": (2, Layout({"pp": 2}, model=WIDE)),
    "EP2": (2, Layout({"dp_shard": 2, "ep": 2}, config=EXPERTS)),
}
OPTIMIZERS: dict[str, Any] = {
    "lion": Lion(lr=1e-3),
    "adafactor": Adafactor(),
    "adamw_8bit": AdamW8bit(lr=1e-3, eps=1e-4),
    "schedule_free": ScheduleFree(lr=1e-3, eps=1e-4),
    "by_name": ByName(groups=[Group(match=["layers.*"], lr_factor=2.0)], optimizer=AdamW(lr=1e-3, eps=1e-4)),
    "of_muon": ByName(
        groups=[Group(match=["layers.*"], lr_factor=2.0)],
        optimizer=Muon(lr=1e-3, fallback=AdamW(lr=1e-3, eps=1e-4)),
    ),
}
CLOSE = {
    "lion": 2e-3,
    "adafactor": 2e-4,
    "adamw_8bit": 2e-4,
    "schedule_free": 1e-5,
    "by_name": 1e-5,
    "of_muon": 2e-3,
}
"""Of weights after three steps. Signs, codes and bfloat16 make steps of the rounding of gradients."""


@pytest.mark.ranks
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_rank_does(ranks: Any, name: str, which: str) -> None:
    world, layout = LAYOUTS[name]
    alone = Layout(model=layout.model, config=layout.config)
    (one,) = ranks(1, optimizer_cases.trained, alone, OPTIMIZERS[which])
    found: dict[str, Tensor] = {}
    for part in ranks(world, optimizer_cases.trained, layout, OPTIMIZERS[which]):
        found |= part  # a stage has its own
    assert found.keys() == one.keys()
    for key in one:
        if not key.startswith("optimizer."):
            assert (found[key] - one[key]).norm() <= CLOSE[which] * one[key].norm() + 1e-9, key


@pytest.mark.ranks
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_a_resumed_run_is_bitwise_the_one_that_did_not_stop(ranks: Any, tmp_path: Path, which: str) -> None:
    layout, optimizer = LAYOUTS["FSDP2"][1], OPTIMIZERS[which]
    whole = ranks(2, optimizer_cases.trained, layout, optimizer, 3)[0]
    ranks(2, _save, layout, optimizer, tmp_path / "two")
    resumed = ranks(2, _go_on, layout, optimizer, tmp_path / "two")[0]
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.ranks
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("name", ["TP2", "FSDP2xTP2", "FSDP4, few rows"])
def test_state_is_resharded_bit_for_bit(ranks: Any, tmp_path: Path, which: str, name: str) -> None:
    (world, layout), optimizer = LAYOUTS[name], OPTIMIZERS[which]
    saved = ranks(world, _save, layout, optimizer, tmp_path / "many")[0]
    alone = ranks(1, _load, Layout(model=layout.model), optimizer, tmp_path / "many")[0]
    assert alone.keys() == saved.keys()
    for key in saved:
        assert torch.equal(alone[key], saved[key]), key


def _save(layout: Layout, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    return optimizer_cases.trained(layout, optimizer, 2, save=folder)


def _go_on(layout: Layout, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    return optimizer_cases.trained(layout, optimizer, 3, load=folder)


def _load(layout: Layout, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    return optimizer_cases.trained(layout, optimizer, 2, load=folder)


@pytest.mark.ranks
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_state_is_where_offloaded_parameters_are(ranks: Any, which: str) -> None:
    """State of parameters that are elsewhere than their mesh stays with them."""
    assert ranks(1, optimizer_cases.places, OPTIMIZERS[which])[0] == {"cpu"}


def test_rows_that_blocks_do_not_fill_are_refused() -> None:
    from titan_optimizers.eight_bit import _checked

    class Sharded(nn.Parameter):
        pass

    whole = nn.Parameter(torch.zeros(128, 64))
    assert _checked(whole, "w") == 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_optimizers.eight_bit.local", lambda parameter: parameter[:, :16])
        with pytest.raises(TitanError, match="has 16 of the 64 columns of w, which blocks of 32 do not fill"):
            _checked(whole, "w")


@pytest.mark.parametrize("which", ["lion", "adafactor", "adamw_8bit", "schedule_free"])
def test_gradients_are_divided_and_steps_skipped_on_the_device(which: str) -> None:
    plain, scaled = parameters(), parameters()
    one, other = ours(OPTIMIZERS[which], plain), ours(OPTIMIZERS[which], scaled)
    generator = torch.Generator().manual_seed(1)
    bad: Any = other
    for made in (one, other):
        optimizer_cases.enter(made)
    for step in range(4):
        for a, b in zip(plain, scaled, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad * 4.0
        if step == 2:  # skipped by one, not done by the other
            for b in scaled:
                b.grad = torch.full_like(b, torch.nan)
        bad.grad_scale, bad.found_inf = torch.tensor(4.0), torch.tensor(float(step == 2))
        other.step()
        if step != 2:
            one.step()
    for a, b in zip(plain, scaled, strict=True):
        assert torch.equal(a, b)
        for name, value in one.state[a].items():
            assert torch.equal(value, other.state[b][name]), name


# ---------------------------------------------------------------------------------------------- by name


def test_groups_have_their_rates() -> None:
    values = parameters()
    config = ByName(
        groups=[
            Group(match=["p1", "p2"], lr_factor=16.0, weight_decay=0.0),
            Group(match=["p*"], lr_factor=0.5),
        ],
        optimizer=AdamW(lr=1e-3, no_decay=["p3"]),
    )
    optimizer = ours(config, values)
    found = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    expected = [(5e-4, 0.1), (1.6e-2, 0.0), (1.6e-2, 0.0), (5e-4, 0.0)]
    assert [found[id(value)] for value in values] == [pytest.approx(pair) for pair in expected]
    assert (config.lr, config.weight_decay) == (1e-3, 0.1)
    with pytest.raises(TitanError, match=r"groups.0.match: 'q\*' matches no parameter"):
        ours(ByName(groups=[Group(match=["q*"])]), values)


def test_groups_of_muon_and_its_fallback_have_their_rates(caplog: pytest.LogCaptureFixture) -> None:
    """Muon is an optimizer of two, each of which steps on groups of its own."""
    muon = Muon(lr=1e-2, fallback=AdamW(lr=1e-3))
    first = optimizer_cases.trained(small(), muon, 0)
    still = ByName(groups=[Group(match=["layers.0.*"], lr_factor=0.0, weight_decay=0.0)], optimizer=muon)
    for name, found in optimizer_cases.trained(small(), still, 2).items():
        if not name.startswith("optimizer."):
            assert torch.equal(found, first[name]) == ("layers.0." in name), name
    assert "has changed since it was built" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("", ""),
        ("dora = true\n", ', "*.lora_magnitude"'),
        ('rslora = true\ntargets = ["tok_embeddings", "output", "wq"]\n', ', "tok_embeddings.lora_a"'),
    ],
)
def test_lora_plus_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, match: str) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["training.steps=2", "model.n_layers=2", "checkpoint.interval=2"]
    done = run_cli("train", "llama3_debug", "--run-dir", "base", *small)
    assert done.code == 0, done.stderr
    Path("plus.toml").write_text(
        'extends = "titan:llama3_debug"\nweights = "base/checkpoints/step-2"\n[[converters]]\ntype = "lora"\n'
        f'{kind}[optimizer]\ntype = "by_name"\n[[optimizer.groups]]\nmatch = ["*.lora_b"{match}]\n'
        "lr_factor = 16.0\n"
        '[optimizer.optimizer]\ntype = "adamw"\nlr = 1e-4\n'
    )
    done = run_cli("train", "plus.toml", "--run-dir", "run", *small)
    assert done.code == 0, done.stderr


@pytest.mark.parametrize("name", ["lion", "adafactor", "adamw_8bit", "schedule_free"])
def test_weights_in_bfloat16_are_refused(name: str) -> None:
    done = run_cli("validate", "llama3_debug", f"optimizer={name}", "training.dtype=bfloat16")
    assert done.code == 3 and "updates would be lost in rounding" in done.stderr
