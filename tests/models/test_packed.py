"""Products of generation on a CPU: those of torch up to rounding, and nothing stays of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.generate.models import small, tokens
from titancli.models.blocks import onednn as module
from titancli.models.blocks.onednn import packed

CLOSE = dict(atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["grouped", "tied"])
@pytest.mark.parametrize("copied", [0, 2**30])
@torch.no_grad()
def test_logits_are_those_of_torch(variant: str, copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights in an order of their own and in torch's."""
    monkeypatch.setattr(module, "COPIED", copied)
    model, text = small(variant), tokens(3, 9)
    before, plain = [dict(vars(one)) for one in model.modules()], model(text)
    for _ in range(2):
        with packed(model):
            torch.testing.assert_close(model(text), plain, **CLOSE)
            assert "forward" in vars(model.layers["0"].attention.wq)
            assert "product" in vars(model.output)
    assert [dict(vars(one)) for one in model.modules()] == before
    assert torch.equal(model(text), plain)


@torch.no_grad()
def test_all_is_put_back_where_something_raises_and_it_can_be_entered_within_itself() -> None:
    model = small()
    with pytest.raises(RuntimeError, match="fails"), packed(model), packed(model):
        raise RuntimeError("fails")
    assert not any({"forward", "product"} & vars(one).keys() for one in model.modules())


@torch.no_grad()
def test_what_is_no_plain_fp32_layer_stays() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    own = nn.Linear(8, 8)
    own.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleList([Doubled(8, 8), nn.Linear(8, 8).bfloat16(), own, nn.Linear(8, 4)])
    with packed(model):
        assert [("forward" in vars(one)) for one in model] == [False, False, True, True]
        x = torch.randn(2, 3, 8)
        assert model[2](x) is x
        torch.testing.assert_close(model[3](x), copy.copy(model[3])(x), **CLOSE)
    assert model[2](x) is x and "forward" not in vars(model[3])
