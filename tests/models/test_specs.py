"""Modules are built from their specs: what these refuse, and a plugin's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.models.families import DEEPSEEK, GEMMA3, GRANITE
from tests.models.specs import attention, experts
from titancli.distributed.local import local
from titancli.models.blocks.attention_window import WHOLE
from titancli.models.blocks.decoder import Decoder
from titancli.models.sections import AttnTemperature
from titancli.protocols.shape import Block, FeedForward, Norm, Spec
from titancli.registry.component import build

TOKENS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True, kw_only=True)
class MeanSpec(Spec):
    """Each token gets a weighed mean of those before it."""

    module: ClassVar[str] = "tests.models.test_specs:Mean"

    def flops(self, seq_len: int) -> float:
        return 0.0


class Mean(nn.Module):
    takes_local_parameters = True
    styles: ClassVar = {"decay": "replicate"}
    reach, angles = WHOLE, None

    def __init__(self, spec: MeanSpec) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.empty(spec.dim))

    def init_own(self, generator_for: Any) -> None:
        nn.init.constant_(self.decay, 0.5)

    def forward(self, x: Tensor, cos: None, sin: None, mask: Tensor | None, cache: Any = None) -> Tensor:
        steps = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x.cumsum(1) / steps * local(self.decay)


def test_a_plugins_spec_brings_its_module() -> None:
    class Config(GRANITE.config):  # type: ignore[name-defined, misc]
        def layer(self, number: int) -> Block:
            return self.block(MeanSpec(dim=self.dim), self.feed_forward(self.hidden_dim))

    config = Config(**GRANITE.small)
    model = Decoder(config)
    model.init_weights(lambda name: torch.Generator().manual_seed(0))
    assert model.tensor_plan["layers.*.attention.decay"] == "replicate"
    assert torch.equal(model.layers["1"].attention.decay, torch.full((64,), 0.5))
    model(TOKENS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def latent(**options: Any) -> Any:
    return replace(DEEPSEEK.variant("V2").layer(0).attention, **options)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Norm(bias=True), "only LayerNorm has a bias"),
        (lambda: Norm(kind="layer", zero_centred=True), "LayerNorm multiplies by its weight"),
        (lambda: attention(8, 2, 1, 4, qk_norm="whole", norm=Norm(kind="layer")), "a norm over all heads"),
        (lambda: attention(8, 2, 1, 4, temperature=AttnTemperature()), "takes the place of rotary positions"),
        (lambda: attention(8, 2, 1, 4, norm_after=True, rotary=False), "needs rotary positions"),
        (lambda: experts(8, 8, 2, clamped=(1.0, 1.0)), "clamped experts are joined"),
        (lambda: latent(window=4, sinks=True), "latent attention has no window, sinks"),
        (
            lambda: Block(
                dim=8,
                attention=attention(8, 2, 1, 4),
                feed_forward=FeedForward(dim=8, hidden=8),
                norms="after",
                parallel=True,
            ),
            "parallel branches are normed before",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_embeddings_are_multiplied_in_their_own_dtype() -> None:
    """As the releases of Gemma were trained: in bf16 the square root of 1,152 is 34."""
    config = replace(GEMMA3.variant("as released"), dim=1152, n_layers=1)
    with torch.device("meta"):
        model = build(config, seq_len=8).to(torch.bfloat16)
    model.tok_embeddings = nn.Embedding(128, 1152, dtype=torch.bfloat16)
    found = model._embedded(TOKENS)
    assert torch.equal(found, model.tok_embeddings(TOKENS) * 34)
    assert not torch.equal(found, model.tok_embeddings(TOKENS) * 1152**0.5)
