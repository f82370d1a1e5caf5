"""The model against diffusers' own, parameter by parameter and number by number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import flux_cases
import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch.utils.flop_counter import FlopCounterMode

from titan_flux import Flux
from titan_flux.model import build
from titancli import Batch, TitanError
from titancli.losses import CrossEntropy
from titancli.models.roles import roles_of
from titancli.registry.component import build as build_component

PUBLISHED = {"flux-dev": 11_901_408_320, "flux-schnell": 11_891_178_560}


def flavor(name: str) -> Flux:
    return Flux(**{k: tuple(v) if isinstance(v, list) else v for k, v in Flux.flavors[name].items()})


def count_by_hand(c: Flux) -> int:
    def linear(rows: int, columns: int, bias: bool = True) -> int:
        return rows * columns + bias * rows

    d, hidden, norms = c.dim, int(c.dim * c.mlp_ratio), 2 * c.dim // c.n_heads
    stream = linear(6 * d, d) + linear(3 * d, d, c.qkv_bias) + norms + linear(d, d)
    stream += linear(hidden, d) + linear(d, hidden)
    single = linear(3 * d, d) + linear(3 * d + hidden, d) + norms + linear(d, d + hidden)
    into = linear(d, c.in_channels) + linear(d, c.context_dim) + (2 + c.guidance_embed) * linear(d, d)
    into += (1 + c.guidance_embed) * linear(d, 256) + linear(d, c.pooled_dim)
    out = linear(2 * d, d) + linear(c.in_channels, d)
    return into + 2 * stream * c.double_blocks + single * c.single_blocks + out


@pytest.mark.parametrize("name", Flux.flavors)
def test_as_many_parameters_as_published_and_as_in_diffusers(name: str) -> None:
    config = flavor(name)
    with torch.device("meta"):
        ours, theirs = build(config, seq_len=4608), FluxTransformer2DModel(**flux_cases.sizes(config))
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in theirs.parameters()) == count_by_hand(config)
    assert count == PUBLISHED.get(name, count)


@pytest.mark.parametrize("guidance", [True, False])
@pytest.mark.parametrize("size", [(3, 4), (8, 2)], ids=str)
def test_velocities_are_those_of_diffusers(
    guidance: bool, size: tuple[int, int], record_property: Callable[[str, object], None]
) -> None:
    record_property("logits", "flux")
    config = replace(flux_cases.TINY, guidance_embed=guidance)
    torch.manual_seed(0)
    theirs = FluxTransformer2DModel(**flux_cases.sizes(config)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.2 if parameter.ndim == 1 else 0.0, 0.2)
    ours = build(config, seq_len=0)
    ours.load_state_dict(flux_cases.from_diffusers(dict(theirs.state_dict()), config))
    given = flux_cases.inputs(config, *size)
    expected = flux_cases.of_diffusers(theirs, given)
    with torch.no_grad():
        found = ours(**given)
    assert expected.std() > 0.1
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_it_begins_as_nothing_and_every_weight_is_set() -> None:
    config = flux_cases.TINY
    model = build(config, seq_len=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert model(**flux_cases.inputs(config)).eq(0).all()
    weight = model.layers["0"].image.mlp_in.weight
    assert weight.std().item() == pytest.approx((2 / sum(weight.shape)) ** 0.5, rel=0.05)
    assert model.embedding.time.inner.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_flops_are_those_that_torch_counts() -> None:
    """At 1024 x 1024: 4096 tokens of an image and 512 of text."""
    config = flavor("flux-dev")
    with torch.device("meta"):
        model = build(config, seq_len=4608)
        rows = {k: v[:1].to("meta") for k, v in flux_cases.inputs(config, 64, 64).items()}
        rows["text"] = torch.empty(1, 512, config.context_dim)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**rows)
    # Backward does every product twice.
    assert 3 * counter.get_total_flops() / 4608 == pytest.approx(model.flops_per_token(4608), rel=0.001)


def test_a_loss_of_log_probabilities_is_refused_in_words() -> None:
    config = flux_cases.TINY
    given = flux_cases.inputs(config)
    with pytest.raises(TitanError, match="velocities, not log-probabilities"):
        build(config, seq_len=0)(**given, batch=Batch(given), loss=build_component(CrossEntropy()))


@pytest.mark.parametrize(
    ("name", "width"), [("latents", 16), ("text", 12), ("pooled", 10)], ids=["latents", "text", "pooled"]
)
def test_data_of_another_width_is_refused_in_words(name: str, width: int) -> None:
    given = flux_cases.inputs(flux_cases.TINY)
    given[name] = given[name][..., :-1]
    with pytest.raises(TitanError, match=f"takes {name} of width {width}, .* returns {width - 1}"):
        build(flux_cases.TINY, seq_len=0)(**given)


def test_what_enters_leaves_and_modulates_is_no_matrix_of_hidden_states() -> None:
    with torch.device("meta"):
        model = build(flux_cases.TINY, seq_len=16)
    roles = roles_of(model)
    matrices = {name.split(".", 2)[2] for name, role in roles.items() if role == "matrix"}
    streams = {f"{s}.{m}.weight" for s in ("image", "text") for m in ("qkv", "proj", "mlp_in", "mlp_out")}
    assert matrices == streams | {"inner.weight", "outer.weight"}
    assert {role for name, role in roles.items() if name.startswith("embedding.")} == {"embedding"}
    assert roles["layers.0.text.modulation.weight"] == roles["layers.3.modulation.weight"] == "modulation"
    assert roles["output.linear.weight"] == "output"
