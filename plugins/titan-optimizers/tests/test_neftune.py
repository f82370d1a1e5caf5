"""NEFTune: the noise of a row is the same however ranks split it, and in every pass over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import neftune_cases
import pytest
import torch
from torch import Tensor, nn

from tests.engine.cases import Layout, gradients, small
from titan_families import Granite
from titan_optimizers import Neftune
from titancli import TitanError
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.layout.degrees import Degrees
from titancli.models import Gemma3, Qwen3
from titancli.models.sections import MoE
from titancli.registry.component import build

pytestmark = pytest.mark.ranks
NOISY = [Neftune(alpha=50.0)]
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "TP": (2, small({"tp": 2}, converters=NOISY)),
    "TP, an odd vocabulary": (2, small({"tp": 2}, converters=NOISY)),
    "TP, tied": (2, small({"tp": 2}, tied=True, converters=NOISY)),
    "CP": (2, small({"cp": 2}, converters=NOISY)),
    "CP by heads": (2, small({"cp": 2}, context_parallel="ulysses", converters=NOISY)),
    "CPxTP": (4, small({"cp": 2, "tp": 2}, converters=NOISY)),
    "PP": (2, small({"pp": 2}, converters=NOISY)),
    "FSDP2": (2, small({"dp_shard": 2}, converters=NOISY)),
    "DDP": (2, small({"dp_replicate": 2}, converters=NOISY)),
    "micro-batches": (1, small(micro_batches=4, converters=NOISY)),
    "recomputed": (1, small(activation_checkpoint={"mode": "full"}, converters=NOISY)),
}
ODD = Layout(model={"n_layers": 2, "vocab_size": 65}, converters=NOISY)
LAYOUTS["TP, an odd vocabulary"] = (2, Layout({"tp": 2}, model=ODD.model, converters=NOISY))


@pytest.fixture(scope="module")
def one_rank(ranks: Any) -> Any:
    """Return the rows of one rank, by what else a layout has."""

    def of(layout: Layout) -> Tensor:
        plain = Layout(model=layout.model, tied=layout.tied, converters=NOISY)
        return ranks(1, neftune_cases.embedded, plain)[0].rows

    return of


@pytest.mark.parametrize("name", LAYOUTS)
def test_noise_on_any_layout(ranks: Any, one_rank: Any, name: str) -> None:
    """Bit for bit what one rank draws; data-parallel ranks draw for their own rows."""
    world, layout = LAYOUTS[name]
    whole = one_rank(layout)
    found = [part for part in ranks(world, neftune_cases.embedded, layout) if part is not None]
    for part in found:
        if part.dp_rank == 0:
            assert torch.equal(part.rows, neftune_cases.cut(whole[: len(part.rows)], part, layout))
    if len({part.dp_rank for part in found}) > 1:
        first, second = (part.noise for part in sorted(found, key=lambda part: part.dp_rank))
        assert abs(correlation(first, second)) < 0.05
    if layout.mesh.keys() & {"tp", "cp"}:
        for number, part in enumerate(found[1:], start=1):
            assert abs(correlation(found[number - 1].noise, part.noise)) < 0.05


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


@pytest.mark.parametrize("name", ["TP", "CP", "CPxTP", "PP", "micro-batches", "recomputed"])
def test_noisy_gradients_on_any_layout(ranks: Any, name: str) -> None:
    expected = ranks(1, gradients, small(converters=NOISY))[0]
    quiet = ranks(1, gradients, small())[0]
    world, layout = LAYOUTS[name]
    for found in ranks(world, gradients, layout):
        for key, value in found.items():
            assert distance(value, expected[key]) < 1e-5, key
    assert distance(quiet["loss"], expected["loss"]) > 1e-3


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp_shard": 2}], ids=str)
def test_both_passes_have_one_noise(ranks: Any, mesh: dict[str, int]) -> None:
    """A function of samples sees the log-probabilities that are differentiated."""
    world = 2 if mesh else 1
    for seen, given in ranks(world, neftune_cases.seen_and_given, small(mesh, converters=NOISY)):
        for one, other in zip(seen, given, strict=True):
            assert distance(one, other) < 1e-6


def test_experts_are_counted_with_the_noise(ranks: Any) -> None:
    """With router losses, tokens of all micro-batches are counted by a pass of their own."""
    config = Qwen3(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=64,
        moe=MoE(num_experts=4, top_k=2, hidden_dim=16, aux_loss_coeff=10.0),
    )  # fmt: skip
    whole = ranks(1, gradients, Layout(config=config, converters=NOISY))[0]
    cut = ranks(1, gradients, Layout(config=config, converters=NOISY, micro_batches=4))[0]
    for name, value in cut.items():
        assert distance(value, whole[name]) < 1e-5, name


@pytest.mark.parametrize("mesh", [{}, *({name: 2} for name in ("tp", "dp_shard", "cp", "pp"))], ids=str)
def test_noise_follows_from_the_step(ranks: Any, mesh: dict[str, int]) -> None:
    """Also after a resume; evaluation has none."""
    world = 2 if mesh else 1
    quiet = ranks(world, neftune_cases.losses, small(mesh), 0, 2)[0]
    whole = ranks(world, neftune_cases.losses, small(mesh, converters=NOISY), 0, 3)[0]
    later = ranks(world, neftune_cases.losses, small(mesh, converters=NOISY), 2, 3)[0]
    assert quiet[0] == quiet[1] and len({*whole, quiet[0]}) == 4
    assert later == whole[2:]
    evaluated = ranks(world, neftune_cases.evaluated, small(mesh, converters=NOISY))[0]
    assert evaluated == pytest.approx(quiet[0], rel=1e-6)


def noise_of(model: nn.Module, block: nn.Module, convert: Callable[[], Any]) -> float:
    """Return the size of the noise in the first block's input."""
    given: list[Tensor] = []
    block.register_forward_pre_hook(
        lambda _, args, kw: given.append([*args, *kw.values()][0]), with_kwargs=True
    )
    tokens = torch.arange(64)[None]
    for _ in range(2):
        with torch.no_grad():
            model(tokens)
        convert()
    return float((given[1] - given[0]).abs().max())


@pytest.mark.parametrize("config", [Qwen3, Gemma3, Granite], ids=lambda config: config.__name__)
def test_noise_where_embeddings_are_scaled(config: Any) -> None:
    """Gemma's factor of embeddings is a part of them, Granite's is not."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.neftune import activate_neftune

    more = {"embedding_multiplier": 12.0} if config is Granite else {}
    made = config(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64, **more)
    ours = build(made, seq_len=64).train()
    ours.init_weights(lambda name: torch.Generator().manual_seed(1))
    converter = build(Neftune(alpha=5.0), mesh=Degrees(), compile=False)
    keys = hf_form(made).config_json()
    hf = AutoConfig.for_model(**{key: value for key, value in keys.items() if key != "architectures"})
    theirs = AutoModelForCausalLM.from_config(hf, attn_implementation="eager").train()
    expected = noise_of(theirs, theirs.model.layers[0], lambda: activate_neftune(theirs, 5.0))
    assert noise_of(ours, ours.layers["0"], lambda: converter.convert(ours)) == pytest.approx(
        expected, rel=0.01
    )


def test_noise_has_the_size_of_the_paper() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(16, 32)})
    build(Neftune(alpha=5.0), mesh=Degrees(), compile=False).convert(model)
    tokens = torch.zeros(4, 100, dtype=torch.int64)
    noise = (model["words"](tokens) - model["words"].weight[0]).detach()
    most = 5.0 / (100 * 32) ** 0.5
    assert 0.99 * most < float(noise.abs().max()) <= most * 1.00001
    assert float(noise.std()) == pytest.approx(most / 3**0.5, rel=0.02)
    assert torch.equal(model.eval()["words"](tokens)[0, 0], model["words"].weight[0])
    with pytest.raises(TitanError, match=r"no nn\.Embedding"):
        build(Neftune(), mesh=Degrees(), compile=False).convert(nn.Linear(2, 2))
